"""What OpenAI's contract does not have: lenient validation, idempotent creation."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from specbatch.context import Context
from specbatch.domain import Mode, Outcome, Row, RowResult
from specbatch.lines import compact
from specbatch.service import shards
from specbatch.serving import resolve_model
from tests.server_fixtures import CHAT, Desk, file_lines, line, refused, succeed

Upload = Callable[..., str]
Create = Callable[..., dict[str, Any]]


def fail(row: Row) -> RowResult:
    return RowResult(row.row_index, Outcome.FAILED, 500, compact({"error": {"message": "no", "type": "x", "param": None, "code": None}}))


def test_skip_lets_bad_lines_through_as_error_lines(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    lines = [line("a"), "nonsense", line("b", stream=True), line("a"), line("c", model="none"), "[1]", line("d"), line("a")]
    batch_id = create(upload(*lines), on_invalid="skip")["id"]
    desk.validate()
    running = api.get(f"/v1/batches/{batch_id}").json()
    assert (running["status"], running["request_counts"]) == ("in_progress", {"total": 8, "completed": 0, "failed": 6})
    early = api.get(f"/v1/batches/{batch_id}/results").json()["data"]
    assert sorted(each["sequence"] for each in early) == [1, 2, 3, 4, 5, 6]
    desk.work(batch_id)
    desk.finalize()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert (batch["status"], batch["errors"]) == ("completed", None)
    assert batch["request_counts"] == {"total": 8, "completed": 2, "failed": 6}
    assert [each["custom_id"] for each in file_lines(api, batch["output_file_id"])] == ["a", "d"]
    errors = file_lines(api, batch["error_file_id"])
    assert [(each["custom_id"], each["response"], each["error"]["code"]) for each in errors] == [
        (None, None, "invalid_json_line"),
        ("b", None, "streaming_unsupported"),
        ("a", None, "duplicate_custom_id"),
        ("c", None, "model_not_found"),
        (None, None, "invalid_json_line"),
        ("a", None, "duplicate_custom_id"),
    ]
    assert [each["error"]["message"].split(":")[0] for each in errors] == [f"Line {number}" for number in (2, 3, 4, 5, 6, 8)]


def test_skip_of_every_line_completes_at_once(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a", stream=True)), on_invalid="skip")["id"]
    desk.validate()
    desk.finalize()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert (batch["status"], batch["output_file_id"]) == ("completed", None)
    assert [each["custom_id"] for each in file_lines(api, batch["error_file_id"])] == ["a"]


def test_skip_does_not_excuse_a_file_that_is_not_there(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    file_id = upload(line("a"))
    batch_id = create(file_id, on_invalid="skip")["id"]
    api.delete(f"/v1/files/{file_id}")
    desk.validate()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert (batch["status"], batch["errors"]["data"][0]["param"]) == ("failed", "file_id")


def test_skip_and_cancel_account_for_every_line(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a"), line("b", stream=True)), on_invalid="skip")["id"]
    api.post(f"/v1/batches/{batch_id}/cancel")
    desk.validate()
    desk.close()
    desk.finalize()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert (batch["status"], batch["request_counts"]["failed"]) == ("cancelled", 2)
    codes = {each["custom_id"]: each["error"]["code"] for each in file_lines(api, batch["error_file_id"])}
    assert codes == {"a": "batch_cancelled", "b": "streaming_unsupported"}


def test_a_validation_that_is_done_again_counts_once(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a"), line("b", stream=True), line("a")), on_invalid="skip")["id"]
    desk.validate_without_end(batch_id)
    desk.validate()
    assert api.get(f"/v1/batches/{batch_id}").json()["request_counts"] == {"total": 3, "completed": 0, "failed": 2}
    assert [each["sequence"] for each in api.get(f"/v1/batches/{batch_id}/results").json()["data"]] == [1, 2]


def test_a_model_that_cannot_answer_the_endpoint_is_refused_naming_why(
    ctx: Context, api: TestClient, desk: Desk, upload: Upload, create: Create
) -> None:
    model, names = resolve_model(ctx.settings), ["default"]
    shards.alive(ctx, "w", model=model, names=names, modes=[Mode.PLAIN], withheld={}, mode=Mode.PLAIN, endpoints=["/v1/embeddings"])
    shards.alive(ctx, "w", model=model, names=names, modes=[Mode.PLAIN], withheld={}, mode=None)  # its engine starts anew
    chat = create(upload(line("a"), line("b")))["id"]
    request = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "default", "input": "hi"}}
    embeddings = create(upload(request), endpoint="/v1/embeddings")["id"]
    desk.validate()
    errors = api.get(f"/v1/batches/{chat}").json()["errors"]["data"]
    assert [(error["line"], error["code"], error["param"]) for error in errors] == [
        (1, "unsupported_endpoint", "url"),
        (2, "unsupported_endpoint", "url"),
    ]
    assert errors[0]["message"] == "The model 'default' cannot answer /v1/chat/completions. It answers: /v1/embeddings."
    assert api.get(f"/v1/batches/{embeddings}").json()["status"] == "in_progress"


@pytest.mark.parametrize("on_invalid", ["fail", "skip"])
def test_a_lone_surrogate_is_a_400_of_its_row(api: TestClient, desk: Desk, upload: Upload, create: Create, on_invalid: str) -> None:
    batch_id = create(upload(line("good", content="😀"), line("bad", content="\ud800")), on_invalid=on_invalid)["id"]
    desk.validate()
    desk.work(batch_id)
    desk.finalize()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 2, "completed": 1, "failed": 1})
    (bad,) = file_lines(api, batch["error_file_id"])
    assert (bad["custom_id"], bad["error"], bad["response"]["status_code"]) == ("bad", None, 400)
    assert bad["response"]["body"]["error"]["code"] == "invalid_unicode"


def test_retry_takes_the_rows_that_did_not_succeed(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    lines = [line("good"), line("bad", content="\0é😀"), line("streamed", stream=True), line("worse", max_tokens=3)]
    batch_id = create(upload(*lines), on_invalid="skip", metadata={"who": "me"})["id"]
    refused(api.post(f"/v1/batches/{batch_id}/retry"), 409, None, None)
    desk.validate()
    desk.work(batch_id, lambda row: succeed(row) if row.custom_id == "good" else fail(row))
    refused(api.post(f"/v1/batches/{batch_id}/retry"), 409, None, None)
    desk.finalize()
    again = api.post(f"/v1/batches/{batch_id}/retry").json()
    assert (again["status"], again["metadata"]) == ("validating", {"who": "me", "retry_of": batch_id})
    assert file_lines(api, again["input_file_id"]) == [lines[1], lines[3]]
    desk.validate()
    desk.work(again["id"])
    desk.finalize()
    assert api.get(f"/v1/batches/{again['id']}").json()["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert "nothing to retry" in refused(api.post(f"/v1/batches/{again['id']}/retry"), 409, None, None)
    refused(api.post("/v1/batches/batch_none/retry"), 404, None, "id")


def test_retry_of_a_cancelled_batch_takes_what_was_not_run(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a"), line("b")), output_expires_after={"anchor": "created_at", "seconds": 3600})["id"]
    desk.validate()
    api.post(f"/v1/batches/{batch_id}/cancel")
    desk.close()
    desk.finalize()
    again = api.post(f"/v1/batches/{batch_id}/retry").json()
    assert [each["custom_id"] for each in file_lines(api, again["input_file_id"])] == ["a", "b"]


def test_an_idempotency_key_makes_one_batch(api: TestClient, upload: Upload) -> None:
    body = {"input_file_id": upload(line("a")), "endpoint": CHAT, "completion_window": "24h"}
    headers = {"Idempotency-Key": "nightly-1"}
    first = api.post("/v1/batches", json=body, headers=headers).json()
    assert api.post("/v1/batches", json=body, headers=headers).json() == first
    other = api.post("/v1/batches", json=body, headers={"Idempotency-Key": "nightly-2"}).json()
    assert other["id"] != first["id"]
    assert "idempotency key" in refused(
        api.post("/v1/batches", json={**body, "metadata": {"a": "b"}}, headers=headers), 409, "idempotency_key_reused", None
    )
    assert len(api.get("/v1/batches").json()["data"]) == 2


def test_an_idempotency_key_outlives_its_file(api: TestClient, upload: Upload) -> None:
    body = {"input_file_id": upload(line("a")), "endpoint": CHAT, "completion_window": "24h"}
    first = api.post("/v1/batches", json=body, headers={"Idempotency-Key": "k"}).json()
    api.delete(f"/v1/files/{body['input_file_id']}")
    assert api.post("/v1/batches", json=body, headers={"Idempotency-Key": "k"}).json()["id"] == first["id"]


def test_requests_that_race_under_one_key_make_one_batch(api: TestClient, upload: Upload) -> None:
    body = {"input_file_id": upload(line("a")), "endpoint": CHAT, "completion_window": "24h"}

    def create(_: int) -> str:
        response = api.post("/v1/batches", json=body, headers={"Idempotency-Key": "race"})
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(16)))) == 1
    assert len(api.get("/v1/batches").json()["data"]) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_keys_that_are_none(api: TestClient, upload: Upload, key: str) -> None:
    body = json.dumps({"input_file_id": upload(line("a")), "endpoint": CHAT, "completion_window": "24h"})
    response = api.post("/v1/batches", content=body, headers={"Idempotency-Key": key, "content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "idempotency-key")
