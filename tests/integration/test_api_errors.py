"""No answer but OpenAI's shape, on any route, for any mistake; and an OpenAPI document that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.app import create_app
from specbatch.context import Context
from specbatch.errors import ServiceUnavailable
from specbatch.queue import Queue
from specbatch.service import batches
from specbatch.settings import Settings
from tests.server_fixtures import line, refused

JSON = {"content-type": "application/json"}


@pytest.fixture
def settings(tmp_path: Path, sqlite_url: str) -> Settings:
    """One database: none of this depends on which."""
    return Settings(data_dir=tmp_path, database_url=sqlite_url, engine="scripted")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/batches/", "/v1/files/x/y/z", "/v2/batches"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_unknown_urls(api: TestClient, method: str, path: str) -> None:
    assert path in refused(api.request(method, path), 404, "unknown_url", None)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, POST"),
        ("PATCH", "/v1/batches", "GET, POST"),
        ("POST", "/v1/files/file-x", "DELETE, GET"),
        ("DELETE", "/v1/batches/batch_x", "GET"),
        ("GET", "/v1/batches/batch_x/cancel", "POST"),
        ("POST", "/healthz", "GET"),
        ("OPTIONS", "/v1/models", "GET"),
    ],
)
def test_wrong_methods_name_the_right_ones(api: TestClient, method: str, path: str, allowed: str) -> None:
    response = api.request(method, path)
    refused(response, 405, "method_not_allowed", None)
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "missing_body"),
        (b"null", "missing_body"),
        (b"[1,2,3]", "invalid_type"),
        (b'"hello"', "invalid_type"),
        (b'{"\\ud800": 1}', "invalid_type"),
        (b"[" * 100_000, None),
        (b"\xff", None),
        (b'{"input_file_id": ' + b"9" * 5000 + b"}", None),
    ],
)
def test_bodies_that_are_no_batch(api: TestClient, content: bytes, code: str | None) -> None:
    refused(api.post("/v1/batches", content=content, headers=JSON), 400, code, None)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "garbage"])
def test_a_batch_that_is_not_json(api: TestClient, kind: str) -> None:
    refused(api.post("/v1/batches", content=b"{}", headers={"content-type": kind}), 415, "unsupported_media_type", None)


def test_a_file_that_is_not_a_form(api: TestClient) -> None:
    refused(api.post("/v1/files", content=b"{}", headers=JSON), 415, "unsupported_media_type", None)


def test_a_batch_that_is_too_large(api: TestClient) -> None:
    refused(api.post("/v1/batches", content=b" " * 2_000_000, headers=JSON), 413, "request_too_large", None)
    pieces = (b" " * 100_000 for _ in range(20))
    refused(api.post("/v1/batches", content=pieces, headers=JSON), 413, "request_too_large", None)


def test_a_cancel_needs_no_body_and_minds_none(api: TestClient, upload: Callable[..., str], create: Callable[..., Any]) -> None:
    batch_id = create(upload(line("a")))["id"]
    assert api.post(f"/v1/batches/{batch_id}/cancel").status_code == 200
    assert api.post(f"/v1/batches/{batch_id}/cancel", json={}).status_code == 200


def test_a_defect_is_a_500_without_its_inside(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(batches, "get", broken)
    with TestClient(create_app(ctx), raise_server_exceptions=False) as client:
        assert "secret" not in refused(client.get("/v1/batches/batch_x"), 500, "internal_error", None)


def test_a_database_that_does_not_answer_is_a_503(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise ServiceUnavailable("the database does not answer", code="database_unavailable")

    monkeypatch.setattr(batches, "page", gone)
    response = api.get("/v1/batches")
    refused(response, 503, "database_unavailable", None)
    assert int(response.headers["retry-after"]) > 0


def test_health_and_readiness(api: TestClient) -> None:
    assert api.get("/healthz").json() == {"status": "ok"}
    assert api.get("/readyz").json() == {"status": "ready", "database": "ok", "disk": "ok", "redis": None}


def test_readiness_without_a_migrated_database(ctx: Context, tmp_path: Path) -> None:
    lost = Settings(data_dir=tmp_path, database_url=f"sqlite:///{tmp_path}/none.db")
    with TestClient(create_app(Context(lost, ctx.database, None))) as client:
        assert "db upgrade" in refused(client.get("/readyz"), 503, "database_not_migrated", None)


def test_readiness_with_redis(ctx: Context, redis_url: str) -> None:
    for url, status in ((redis_url, "ready"), ("redis://127.0.0.1:1", "degraded")):
        queue = Queue(url)
        with TestClient(create_app(Context(ctx.settings, ctx.database, queue))) as client:
            answer = client.get("/readyz")
            assert (answer.status_code, answer.json()["status"]) == (200, status)
        queue.close()


def test_models(api: TestClient) -> None:
    listing = api.get("/v1/models").json()
    assert "default" in {model["id"] for model in listing["data"]}
    assert {tuple(sorted(model)) for model in listing["data"]} == {("created", "id", "object", "owned_by")}


def test_the_openapi_document_describes_our_errors(api: TestClient) -> None:
    document = api.get("/openapi.json").json()
    assert "HTTPValidationError" not in document["components"]["schemas"]
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len(operations) >= 12
    for operation in operations:
        assert "422" not in operation["responses"]
        for kind in ("4XX", "5XX"):
            assert operation["responses"][kind]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
    assert {"input_file_id", "endpoint", "completion_window"} <= set(document["components"]["schemas"]["CreateBatch"]["required"])
