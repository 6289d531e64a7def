"""Files far larger than usual, and the limits that settings put on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from specbatch.context import Context
from specbatch.service import files
from tests.server_fixtures import Desk, line

Create = Callable[..., dict[str, Any]]
MANY = 200_000
CHUNK = 1000


def test_a_line_of_fifty_megabytes(api: TestClient, ctx: Context, desk: Desk, create: Create) -> None:
    long = json.dumps(line("long", content="word " * (10 * 1024**2))).encode() + b"\n"
    file_id = files.upload(ctx, "in.jsonl", "batch", [json.dumps(line("short")).encode() + b"\n", long]).id
    batch_id = create(file_id)["id"]
    desk.validate()
    for shard_no in (0, 1):  # a shard holds some megabytes
        desk.work(batch_id, shard_no=shard_no)
    desk.finalize()
    assert api.get(f"/v1/batches/{batch_id}").json()["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_a_line_beyond_the_limit_is_named(api: TestClient, ctx: Context, desk: Desk, create: Create) -> None:
    object.__setattr__(ctx.settings, "max_line_bytes", 1000)
    content = b"".join(json.dumps(line(name, content="x" * size)).encode() + b"\n" for name, size in (("a", 10), ("b", 5000), ("c", 10)))
    batch_id = create(files.upload(ctx, "in.jsonl", "batch", [content]).id)["id"]
    desk.validate()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert [(error["line"], error["code"]) for error in batch["errors"]["data"]] == [(2, "invalid_request")]


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_two_hundred_thousand_lines(api: TestClient, ctx: Context, desk: Desk, create: Create) -> None:
    """An unknown model on line 150,000, and a custom_id on the last line that the first one has."""

    def chunks() -> Iterator[bytes]:
        for start in range(0, MANY, CHUNK):
            some = range(start, start + CHUNK)
            requests = (line(str(0 if i == MANY - 1 else i), model="gpt-9" if i == 149_999 else "default") for i in some)
            yield b"".join(json.dumps(request).encode() + b"\n" for request in requests)

    batch_id = create(files.upload(ctx, "in.jsonl", "batch", chunks()).id)["id"]
    desk.validate()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert [(error["line"], error["code"]) for error in batch["errors"]["data"]] == [
        (150_000, "model_not_found"),
        (200_000, "duplicate_custom_id"),
    ]
    assert "line 1." in batch["errors"]["data"][1]["message"]


def test_more_problems_than_are_listed(api: TestClient, ctx: Context, desk: Desk, create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.service.reading.MOST_PROBLEMS", 3)
    content = b"".join(json.dumps(line(str(number), stream=True)).encode() + b"\n" for number in range(5))
    batch_id = create(files.upload(ctx, "in.jsonl", "batch", [content]).id)["id"]
    desk.validate()
    errors = api.get(f"/v1/batches/{batch_id}").json()["errors"]["data"]
    assert [error["code"] for error in errors].count("streaming_unsupported") == 3
    (rest,) = [error for error in errors if error["code"] == "too_many_errors"]
    assert rest["message"].startswith("2 more")
