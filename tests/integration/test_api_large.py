"""Files far larger than usual, and the limits that settings put on them."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from specbatch.context import Context, opened
from specbatch.domain import Mode
from specbatch.service import files, ingest
from specbatch.settings import Settings
from tests.server_fixtures import Desk, line
from worker.host import EngineHost
from worker.runner import Runner

Create = Callable[..., dict[str, Any]]
MANY = 200_000
CHUNK = 1000
MIB = 1024**2


def peak() -> int:
    """The most memory that this process has held, in bytes. Unlike getrusage, it knows nothing of the process that started this one."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def apart(work: Callable[..., int], *arguments: object) -> int:
    """In a process of its own, whose memory is then its own too."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        answer = pool.apply(work, arguments)
        pool.close()
        pool.join()
    return answer


def validate(settings: Settings) -> int:
    """What validation adds to the memory of a process."""
    with opened(settings) as ctx:
        before = peak()
        assert ingest.ingest_next(ctx, "child")
        return peak() - before


def work(settings: Settings, batch_id: str, shards: int) -> int:
    """What a worker adds, which serves some shards, to the memory that it has once its engine runs."""
    host = EngineHost(settings, Mode.PLAIN)
    host.start()
    with opened(settings) as ctx:
        before = peak()
        for shard_no in range(shards):
            assert Runner(ctx, host, "child").run(batch_id, shard_no)
    host.stop()
    return peak() - before


def test_a_line_of_fifty_megabytes(api: TestClient, ctx: Context, desk: Desk, create: Create) -> None:
    """The reconciler and a worker start at less than 100 MB: neither may come near 400."""
    long = json.dumps(line("long", content="word " * (10 * MIB))).encode() + b"\n"
    file_id = files.upload(ctx, "in.jsonl", "batch", [json.dumps(line("short")).encode() + b"\n", long]).id
    batch_id = create(file_id, mode=Mode.PLAIN)["id"]
    assert apart(validate, ctx.settings) < 256 * MIB
    assert apart(work, ctx.settings.model_copy(update={"max_model_len": 10**9}), batch_id, 2) < 256 * MIB  # a shard holds some megabytes
    desk.finalize()
    assert api.get(f"/v1/batches/{batch_id}").json()["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_a_line_beyond_the_limit_is_named(api: TestClient, ctx: Context, desk: Desk, create: Create) -> None:
    object.__setattr__(ctx.settings, "max_line_bytes", 1000)
    content = b"".join(json.dumps(line(name, content="x" * size)).encode() + b"\n" for name, size in (("a", 10), ("b", 5000), ("c", 10)))
    batch_id = create(files.upload(ctx, "in.jsonl", "batch", [content]).id)["id"]
    desk.validate()
    batch = api.get(f"/v1/batches/{batch_id}").json()
    assert [(error["line"], error["code"]) for error in batch["errors"]["data"]] == [(2, "invalid_request")]


def test_two_hundred_thousand_lines(api: TestClient, ctx: Context, create: Create) -> None:
    """An unknown model on line 150,000, and a custom_id on the last line that the first one has, in memory that knows no lines."""

    def chunks() -> Iterator[bytes]:
        for start in range(0, MANY, CHUNK):
            some = range(start, start + CHUNK)
            requests = (line(str(0 if i == MANY - 1 else i), model="gpt-9" if i == 149_999 else "default") for i in some)
            yield b"".join(json.dumps(request).encode() + b"\n" for request in requests)

    batch_id = create(files.upload(ctx, "in.jsonl", "batch", chunks()).id)["id"]
    assert apart(validate, ctx.settings) < 96 * MIB  # SQLite's caches; the rows themselves would take 200
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
