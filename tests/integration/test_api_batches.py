"""/v1/batches: every rule of the contract, with each state of a batch in its turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from specbatch.context import Context
from specbatch.domain import Outcome, Row, RowResult
from specbatch.lines import compact
from specbatch.service import upkeep
from tests.server_fixtures import CHAT, Desk, file_lines, line, refused, succeed

Upload = Callable[..., str]
Create = Callable[..., dict[str, Any]]

FIELDS = {
    *("id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id"),
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at"),
    *("cancelled_at", "request_counts", "usage", "metadata"),
}


def refuse(row: Row) -> RowResult:
    return RowResult(row.row_index, Outcome.REFUSED, 400, compact({"error": {"message": "no", "type": "x", "param": None, "code": None}}))


def test_a_new_batch_has_every_field_with_explicit_nulls(upload: Upload, create: Create) -> None:
    file_id = upload(line("a"))
    batch = create(file_id, metadata={"who": "me"})
    assert set(batch) >= FIELDS
    assert {name for name in FIELDS if batch[name] is None} == FIELDS - {
        *("id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at", "expires_at", "request_counts"),
        *("usage", "metadata"),
    }
    assert (batch["object"], batch["status"], batch["input_file_id"], batch["endpoint"]) == ("batch", "validating", file_id, CHAT)
    assert batch["expires_at"] - batch["created_at"] == pytest.approx(86_400, abs=1)
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["metadata"] == {"who": "me"}


def test_a_batch_passes_through_its_states(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a"), line("b")))["id"]

    def look() -> dict[str, Any]:
        return dict(api.get(f"/v1/batches/{batch_id}").json())

    desk.validate()
    running = look()
    assert (running["status"], running["request_counts"]["total"]) == ("in_progress", 2)
    assert running["model"]
    desk.work(batch_id)
    assert look()["status"] == "finalizing"
    desk.finalize()
    done = look()
    assert (done["status"], done["error_file_id"], done["errors"]) == ("completed", None, None)
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert (done["usage"]["input_tokens"], done["usage"]["output_tokens"], done["usage"]["total_tokens"]) == (6, 4, 10)
    stamps = [done[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert stamps == sorted(stamps)
    assert all(done[f"{name}_at"] is None for name in ("failed", "expired", "cancelling", "cancelled"))
    output = api.get(f"/v1/files/{done['output_file_id']}").json()
    assert (output["purpose"], output["expires_at"]) == ("batch_output", None)
    lines = file_lines(api, done["output_file_id"])
    assert [each["custom_id"] for each in lines] == ["a", "b"]
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in lines)
    assert all(each["id"].startswith("batch_req_") and each["error"] is None for each in lines)
    assert all(set(each["response"]) == {"status_code", "request_id", "body"} for each in lines)


def test_refused_rows_go_to_the_error_file(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("good"), line("bad")))["id"]
    desk.validate()
    desk.work(batch_id, lambda row: refuse(row) if row.custom_id == "bad" else succeed(row))
    desk.finalize()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert [each["custom_id"] for each in file_lines(api, batch["output_file_id"])] == ["good"]
    (bad,) = file_lines(api, batch["error_file_id"])
    assert (bad["custom_id"], bad["error"], bad["response"]["status_code"]) == ("bad", None, 400)
    assert bad["response"]["body"]["error"]["message"] == "no"


def test_a_batch_where_every_row_fails_still_completes(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a")))["id"]
    desk.validate()
    desk.work(batch_id, refuse)
    desk.finalize()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert (batch["status"], batch["output_file_id"]) == ("completed", None)
    assert batch["error_file_id"]


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input_file_id": None}, "missing_required_parameter", "input_file_id"),
        ({"endpoint": None}, "missing_required_parameter", "endpoint"),
        ({"completion_window": None}, "missing_required_parameter", "completion_window"),
        ({"input_file_id": "file-unknown"}, "invalid_value", "input_file_id"),
        ({"input_file_id": "\0"}, "invalid_value", "input_file_id"),
        ({"input_file_id": 3}, "invalid_type", "input_file_id"),
        ({"endpoint": "/v1/audio"}, "invalid_value", "endpoint"),
        ({"completion_window": "48h"}, "invalid_value", "completion_window"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ({"metadata": {"a": None}}, "invalid_type", "metadata.a"),
        ({"metadata": "x"}, "invalid_type", "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "invalid_value", "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "invalid_value", "metadata." + "k" * 64),
        ({"metadata": {"k": "x" * 513}}, "invalid_value", "metadata.k"),
        ({"metadata": {"k": "\ud800"}}, "invalid_value", "metadata"),
        ({"metadata": {"task": "dancing"}}, "invalid_value", "metadata.task"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "integer_below_min_value", "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 2592001}}, "integer_above_max_value", "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "invalid_value", "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at"}}, "missing_required_parameter", "output_expires_after.seconds"),
        ({"mode": "warp"}, "invalid_value", "mode"),
        ({"completion_windows": "24h"}, "unknown_parameter", "completion_windows"),
    ],
)
def test_what_creation_refuses(api: TestClient, upload: Upload, change: dict[str, Any], code: str, param: str) -> None:
    body = {"input_file_id": upload(line("a")), "endpoint": CHAT, "completion_window": "24h", **change}
    body = {name: value for name, value in body.items() if value is not None}
    # As ASCII: httpx has no bytes for a lone surrogate.
    response = api.post("/v1/batches", content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    refused(response, 400, code, param)
    assert api.get("/v1/batches").json()["data"] == []


def test_limits_of_metadata_are_allowed(upload: Upload, create: Create) -> None:
    metadata = {"k" * 62 + f"{number:02}": "\0" + "é" * 511 for number in range(16)}
    assert create(upload(line("a")), metadata=metadata)["metadata"] == metadata


def test_outputs_expire_as_asked(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a")), output_expires_after={"anchor": "created_at", "seconds": 7200})["id"]
    desk.validate()
    desk.work(batch_id)
    desk.finalize()
    output = api.get(f"/v1/files/{api.get(f'/v1/batches/{batch_id}').json()['output_file_id']}").json()
    assert output["expires_at"] - output["created_at"] == pytest.approx(7200, abs=1)


def test_a_failed_batch_lists_every_offending_line(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a"), line("a"), "nonsense", line("b", model="none")))["id"]
    desk.validate()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("failed", None, None)
    assert batch["failed_at"]
    assert batch["errors"]["object"] == "list"
    assert [(error["line"], error["code"]) for error in batch["errors"]["data"]] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
        (4, "model_not_found"),
    ]
    assert all(set(error) == {"code", "message", "param", "line"} for error in batch["errors"]["data"])


def test_a_message_that_quotes_a_lone_surrogate_can_be_read(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a", model="\ud800")))["id"]
    desk.validate()
    (error,) = api.get(f"/v1/batches/{batch_id}").json()["errors"]["data"]
    assert error["code"] == "model_not_found"


def test_cancel_before_validation_ends_with_every_line_accounted_for(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a"), line("b")))["id"]
    cancelling = api.post(f"/v1/batches/{batch_id}/cancel").json()
    assert cancelling["status"] == "cancelling"
    assert cancelling["cancelling_at"]
    assert api.post(f"/v1/batches/{batch_id}/cancel").json()["status"] == "cancelling"
    desk.validate()
    desk.close()
    desk.finalize()
    cancelled = api.post(f"/v1/batches/{batch_id}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert cancelled["cancelled_at"]
    lines = file_lines(api, cancelled["error_file_id"])
    assert [(each["custom_id"], each["response"], each["error"]["code"]) for each in lines] == [
        ("a", None, "batch_cancelled"),
        ("b", None, "batch_cancelled"),
    ]


def test_cancel_keeps_what_was_finished(api: TestClient, ctx: Context, desk: Desk, upload: Upload, create: Create) -> None:
    object.__setattr__(ctx.settings, "shard_rows", 2)
    batch_id = create(upload(*(line(name) for name in "abc")))["id"]
    desk.validate()
    desk.work(batch_id, shard_no=0)
    api.post(f"/v1/batches/{batch_id}/cancel")
    desk.close()
    desk.finalize()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert (batch["status"], batch["request_counts"]) == ("cancelled", {"total": 3, "completed": 2, "failed": 1})
    assert [each["custom_id"] for each in file_lines(api, batch["output_file_id"])] == ["a", "b"]
    assert [each["custom_id"] for each in file_lines(api, batch["error_file_id"])] == ["c"]


def test_a_batch_that_ended_cannot_be_cancelled(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    completed, failed = create(upload(line("a")))["id"], create(upload(line("a", stream=True)))["id"]
    desk.validate()
    desk.work(completed)
    desk.finalize()
    for batch_id, status in ((completed, "completed"), (failed, "failed")):
        message = refused(api.post(f"/v1/batches/{batch_id}/cancel"), 409, None, None)
        assert message == f"Cannot cancel a batch with status '{status}'."


def test_expiry_gives_partial_results(api: TestClient, ctx: Context, desk: Desk, upload: Upload, create: Create) -> None:
    object.__setattr__(ctx.settings, "shard_rows", 1)
    batch_id = create(upload(line("a"), line("b")))["id"]
    desk.validate()
    desk.work(batch_id, shard_no=0)
    desk.pass_window(batch_id)
    upkeep.expire_jobs(ctx, upkeep.Tally())
    desk.close()
    desk.finalize()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert (batch["status"], batch["request_counts"]) == ("expired", {"total": 2, "completed": 1, "failed": 1})
    assert batch["expired_at"]
    assert [each["custom_id"] for each in file_lines(api, batch["output_file_id"])] == ["a"]
    (late,) = file_lines(api, batch["error_file_id"])
    assert (late["response"], late["error"]) == (
        None,
        {"code": "batch_expired", "message": "This request could not be executed before the completion window expired."},
    )
    refused(api.post(f"/v1/batches/{batch_id}/cancel"), 409, None, None)


@pytest.mark.parametrize("path", ["/v1/batches/{}", "/v1/batches/{}/results"])
@pytest.mark.parametrize("bad", ["batch_unknown", "%00", "b" * 65, "%ed%a0%80"])
def test_unknown_batches(api: TestClient, path: str, bad: str) -> None:
    refused(api.get(path.format(bad)), 404, None, "id")
    refused(api.post(f"/v1/batches/{bad}/cancel"), 404, None, "id")


def test_list_is_newest_first_and_pages_by_object_id(api: TestClient, upload: Upload, create: Create) -> None:
    file_id = upload(line("a"))
    ids = [create(file_id)["id"] for _ in range(25)][::-1]
    first = api.get("/v1/batches").json()
    assert (first["object"], first["has_more"]) == ("list", True)
    assert [batch["id"] for batch in first["data"]] == ids[:20]
    assert (first["first_id"], first["last_id"]) == (ids[0], ids[19])
    rest = api.get("/v1/batches", params={"after": first["last_id"], "limit": 100}).json()
    assert ([batch["id"] for batch in rest["data"]], rest["has_more"]) == (ids[20:], False)
    end = api.get("/v1/batches", params={"after": ids[-1]}).json()
    assert end == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("query", "status", "code", "param"),
    [
        ({"limit": 0}, 400, "integer_below_min_value", "limit"),
        ({"limit": 101}, 400, "integer_above_max_value", "limit"),
        ({"limit": "x"}, 400, "invalid_type", "limit"),
        ({"after": "batch_unknown"}, 404, None, "id"),
    ],
)
def test_bad_list_queries(api: TestClient, query: dict[str, Any], status: int, code: str | None, param: str) -> None:
    refused(api.get("/v1/batches", params=query), status, code, param)
