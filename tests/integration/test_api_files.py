"""/v1/files: every rule of the contract."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest
from starlette.testclient import TestClient

from specbatch.context import Context
from specbatch.service import files
from tests.server_fixtures import jsonl, line, refused

GOOD = jsonl(line("a"), line("b"))


def post(api: TestClient, content: bytes = GOOD, name: str = "in.jsonl", purpose: str = "batch", **more: str) -> Any:
    fields = {"purpose": purpose} | {f"expires_after[{field}]": value for field, value in more.items()}
    return api.post("/v1/files", files={"file": (name, content)}, data=fields)


def test_a_file_comes_back_as_it_went_in(api: TestClient) -> None:
    uploaded = post(api).json()
    assert uploaded == {
        "id": uploaded["id"],
        "object": "file",
        "bytes": len(GOOD),
        "created_at": uploaded["created_at"],
        "expires_at": None,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert uploaded["id"].startswith("file-")
    assert isinstance(uploaded["created_at"], int)
    assert api.get(f"/v1/files/{uploaded['id']}").json() == uploaded
    content = api.get(f"/v1/files/{uploaded['id']}/content")
    assert content.content == GOOD
    assert "in.jsonl" in content.headers["content-disposition"]


@pytest.mark.parametrize("purpose", ["assistants", "batch", "fine-tune", "vision", "user_data", "evals"])
def test_purposes(api: TestClient, purpose: str) -> None:
    assert post(api, purpose=purpose).json()["purpose"] == purpose


def test_other_purposes_may_hold_any_bytes_under_any_name(api: TestClient) -> None:
    assert post(api, b"\xff\xfe\x00", "picture.png", purpose="vision").status_code == 200


@pytest.mark.parametrize("purpose", ["batch_output", "", "Batch"])
def test_unknown_purpose(api: TestClient, purpose: str) -> None:
    refused(post(api, purpose=purpose), 400, "missing_required_parameter" if purpose == "" else "invalid_value", "purpose")


def test_missing_fields(api: TestClient) -> None:
    refused(api.post("/v1/files", files={"file": ("in.jsonl", GOOD)}), 400, "missing_required_parameter", "purpose")
    refused(api.post("/v1/files", files={"other": b"x"}, data={"purpose": "batch"}), 400, "missing_required_parameter", "file")


@pytest.mark.parametrize(
    ("content", "name", "code"),
    [
        (GOOD, "in.txt", "invalid_file_format"),
        (GOOD, "jsonl", "invalid_file_format"),
        (b"", "in.jsonl", "empty_file"),
        (b"\n \r\n\n", "in.jsonl", "empty_file"),
        (b'{"custom_id": "\xff"}\n', "in.jsonl", "invalid_file_format"),
        (GOOD + b"\xe2\x82", "in.jsonl", "invalid_file_format"),
        (GOOD.decode().encode("utf-16"), "in.jsonl", "invalid_file_format"),
        (GOOD.decode().encode("utf-16-le"), "in.jsonl", "invalid_json_line"),
        (b"id,question\n1,hi\n", "in.jsonl", "invalid_json_line"),
        (b"[1,2,3]\n" + GOOD, "in.jsonl", "invalid_json_line"),
        (b'{"custom_id": NaN}\n', "in.jsonl", "invalid_json_line"),
        (b"\n" + GOOD, "in.jsonl", "invalid_json_line"),
        (b"[" * 100_000 + b"\n", "in.jsonl", "invalid_json_line"),
        (GOOD, "a\u200b.jsonl", "invalid_value"),
    ],
)
def test_what_no_batch_could_use_is_refused_and_leaves_nothing(api: TestClient, ctx: Context, content: bytes, name: str, code: str) -> None:
    message = refused(post(api, content, name), 400, code, "file")
    assert message
    assert api.get("/v1/files").json()["data"] == []
    assert list(ctx.settings.files_dir.glob("*")) == []


def test_later_lines_are_left_to_the_batch(api: TestClient) -> None:
    assert post(api, GOOD + b"not json\n").status_code == 200


def test_a_byte_order_mark_and_crlf_are_no_fault(api: TestClient) -> None:
    assert post(api, b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n")).status_code == 200


def test_a_large_first_line_is_left_to_the_batch(api: TestClient) -> None:
    assert post(api, jsonl(line("a", content="x" * files.FIRST_LINE_BYTES))).status_code == 200


def test_too_large(api: TestClient, ctx: Context) -> None:
    object.__setattr__(ctx.settings, "max_file_bytes", len(GOOD))
    assert post(api).status_code == 200
    message = refused(post(api, GOOD + b"x"), 413, "file_too_large", "file")
    assert "SPECBATCH_MAX_FILE_BYTES" in message


def test_too_large_is_refused_before_it_is_spooled(api: TestClient, ctx: Context) -> None:
    object.__setattr__(ctx.settings, "max_file_bytes", 1000)
    refused(post(api, GOOD * 10_000), 413, "file_too_large", "file")


def test_too_large_without_a_declared_length(api: TestClient, ctx: Context) -> None:
    object.__setattr__(ctx.settings, "max_file_bytes", 1000)
    whole = api.build_request("POST", "/v1/files", files={"file": ("in.jsonl", GOOD * 10_000)}, data={"purpose": "batch"})
    body = whole.read()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    response = api.post("/v1/files", content=pieces(), headers={"content-type": whole.headers["content-type"]})
    refused(response, 413, "file_too_large", "file")


def test_expiry(api: TestClient) -> None:
    uploaded = post(api, anchor="created_at", seconds="3600").json()
    assert uploaded["expires_at"] - uploaded["created_at"] == pytest.approx(3600, abs=1)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"anchor": "created_at", "seconds": "3599"}, "integer_below_min_value", "expires_after[seconds]"),
        ({"anchor": "created_at", "seconds": "2592001"}, "integer_above_max_value", "expires_after[seconds]"),
        ({"anchor": "created_at", "seconds": "soon"}, "invalid_type", "expires_after[seconds]"),
        ({"anchor": "now", "seconds": "3600"}, "invalid_value", "expires_after[anchor]"),
        ({"anchor": "created_at"}, "missing_required_parameter", "expires_after[seconds]"),
        ({"seconds": "3600"}, "missing_required_parameter", "expires_after[anchor]"),
    ],
)
def test_bad_expiry(api: TestClient, fields: dict[str, str], code: str, param: str) -> None:
    refused(post(api, GOOD, **fields), 400, code, param)


def test_an_expired_file_is_gone(api: TestClient, ctx: Context) -> None:
    file_id = files.upload(ctx, "in.jsonl", "batch", [GOOD], expires_seconds=-1).id
    refused(api.get(f"/v1/files/{file_id}"), 404, None, "id")
    refused(api.get(f"/v1/files/{file_id}/content"), 404, None, "id")
    assert api.get("/v1/files").json()["data"] == []


def test_delete(api: TestClient, ctx: Context) -> None:
    file_id = post(api).json()["id"]
    assert api.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
    assert "No such File object" in refused(api.get(f"/v1/files/{file_id}"), 404, None, "id")
    refused(api.delete(f"/v1/files/{file_id}"), 404, None, "id")
    assert list(ctx.settings.files_dir.glob("*")) == []


@pytest.mark.parametrize("bad", ["file-unknown", "%00", "..%2f..%2fetc", "a" * 65, "%ed%a0%80", "file-é"])
def test_ids_that_no_file_has(api: TestClient, bad: str) -> None:
    assert api.get(f"/v1/files/{bad}").status_code == 404
    assert set(api.get(f"/v1/files/{bad}").json()) == {"error"}


def test_list_pages_both_ways(api: TestClient) -> None:
    ids = [post(api, name=f"{number}.jsonl").json()["id"] for number in range(5)]
    everything = api.get("/v1/files").json()
    assert [file["id"] for file in everything["data"]] == ids[::-1]
    assert (everything["object"], everything["first_id"], everything["last_id"]) == ("list", ids[4], ids[0])
    assert everything["has_more"] is False
    page = api.get("/v1/files", params={"limit": 2, "order": "asc"}).json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[:2], True)
    rest = api.get("/v1/files", params={"limit": 3, "order": "asc", "after": page["last_id"]}).json()
    assert ([file["id"] for file in rest["data"]], rest["has_more"]) == (ids[2:], False)
    beyond = api.get("/v1/files", params={"after": ids[0]}).json()
    assert beyond == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_list_by_purpose(api: TestClient) -> None:
    post(api)
    vision = post(api, b"x", "x.png", purpose="vision").json()["id"]
    assert [file["id"] for file in api.get("/v1/files", params={"purpose": "vision"}).json()["data"]] == [vision]


@pytest.mark.parametrize(
    ("query", "status", "code", "param"),
    [
        ({"limit": 0}, 400, "integer_below_min_value", "limit"),
        ({"limit": 10_001}, 400, "integer_above_max_value", "limit"),
        ({"limit": "many"}, 400, "invalid_type", "limit"),
        ({"order": "up"}, 400, "invalid_value", "order"),
        ({"after": "file-unknown"}, 404, None, "id"),
        ({"after": "\0"}, 404, None, "id"),
        ({"purpose": "\0"}, 400, "invalid_value", "purpose"),
    ],
)
def test_bad_list_queries(api: TestClient, query: dict[str, Any], status: int, code: str | None, param: str) -> None:
    refused(api.get("/v1/files", params=query), status, code, param)


def test_a_full_disk_is_told(api: TestClient, ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: BinaryIO, *_: object, **__: object) -> int:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_copy", full)
    response = post(api)
    refused(response, 503, "disk_full", None)
    assert response.headers["retry-after"]
    assert list(ctx.settings.files_dir.glob("*")) == []


def test_upload_order_of_fields_does_not_matter(api: TestClient) -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + GOOD + b"\r\n"
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    )
    response = api.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=x"})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("body", [b"", b"--x\r\n", b"--x\r\nContent-Disposition: form-data\r\n\r\nx\r\n--x--\r\n", b"garbage"])
def test_malformed_multipart(api: TestClient, body: bytes) -> None:
    response = api.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=x"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_multipart_without_a_boundary(api: TestClient) -> None:
    response = api.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"})
    assert response.status_code == 400
    assert "boundary" in response.json()["error"]["message"]


def test_the_file_may_not_be_a_field(api: TestClient) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\ntext\r\n--x--\r\n'
    response = api.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
