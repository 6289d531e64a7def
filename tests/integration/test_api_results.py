"""/v1/batches/{id}/results: what is settled can be read while the rest runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from specbatch.context import Context
from specbatch.domain import Outcome, Row, RowResult
from specbatch.lines import compact
from tests.server_fixtures import Desk, line

Upload = Callable[..., str]
Create = Callable[..., dict[str, Any]]


def refuse(row: Row) -> RowResult:
    return RowResult(row.row_index, Outcome.REFUSED, 400, compact({"error": {"message": "no", "type": "x", "param": None, "code": None}}))


def test_results_are_readable_while_the_batch_runs(api: TestClient, ctx: Context, desk: Desk, upload: Upload, create: Create) -> None:
    object.__setattr__(ctx.settings, "shard_rows", 2)
    batch_id = create(upload(*(line(name) for name in "abcd")))["id"]
    desk.validate()
    desk.work(batch_id, shard_no=1)
    url = f"/v1/batches/{batch_id}/results"
    page = api.get(url, params={"limit": 1}).json()
    assert (page["status"], page["has_more"], page["last_sequence"]) == ("in_progress", True, 1)
    (result,) = page["data"]
    assert (result["sequence"], result["custom_id"], result["outcome"]) == (1, "c", "succeeded")
    assert result["response"]["status_code"] == 200
    assert set(result["decision"]) == {"task", "mode", "reason"}
    assert (result["measured"]["drafted_tokens"], result["measured"]["accepted_tokens"]) == (4, 1)
    page = api.get(url, params={"after": 1}).json()
    assert ([each["custom_id"] for each in page["data"]], page["has_more"], page["last_sequence"]) == (["d"], False, 2)
    assert api.get(url, params={"after": 2}).json()["last_sequence"] == 2
    desk.work(batch_id, refuse, shard_no=0)
    assert [each["outcome"] for each in api.get(url, params={"after": 2}).json()["data"]] == ["refused", "refused"]


def test_results_of_rows_that_never_ran_say_so(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a")))["id"]
    desk.validate()
    api.post(f"/v1/batches/{batch_id}/cancel")
    desk.close()
    (result,) = api.get(f"/v1/batches/{batch_id}/results").json()["data"]
    assert (result["outcome"], result["response"], result["measured"]) == ("cancelled", None, None)
    assert result["error"]["code"] == "batch_cancelled"


@pytest.mark.parametrize(
    ("query", "param"), [({"after": -1}, "after"), ({"after": 2**53}, "after"), ({"limit": 0}, "limit"), ({"limit": 1001}, "limit")]
)
def test_bad_result_queries(api: TestClient, upload: Upload, create: Create, query: dict[str, int], param: str) -> None:
    batch_id = create(upload(line("a")))["id"]
    response = api.get(f"/v1/batches/{batch_id}/results", params=query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_page_far_behind_the_last_result_is_empty(api: TestClient, upload: Upload, create: Create) -> None:
    batch_id = create(upload(line("a")))["id"]
    page = api.get(f"/v1/batches/{batch_id}/results", params={"after": 2**53 - 1, "limit": 1000}).json()
    assert (page["data"], page["last_sequence"], page["has_more"]) == ([], 2**53 - 1, False)


def test_a_stream_of_results_ends_with_the_batch(api: TestClient, desk: Desk, upload: Upload, create: Create) -> None:
    batch_id = create(upload(*(line(name) for name in "abc")))["id"]
    desk.validate()
    desk.work(batch_id)
    desk.finalize()
    response = api.get(f"/v1/batches/{batch_id}/results", headers={"accept": "application/x-ndjson"}, params={"after": 1})
    assert response.headers["content-type"].startswith("application/x-ndjson")
    results = [json.loads(each) for each in response.content.split(b"\n") if each]
    assert [(each["sequence"], each["custom_id"]) for each in results] == [(2, "b"), (3, "c")]
