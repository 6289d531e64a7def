"""What a file, an answer, a receiver or a database may do to others: nothing is held that grows with them, and nobody waits for ever."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from specbatch import lines, outbound
from specbatch.context import Context
from specbatch.database import Database
from specbatch.domain import Mode, Outcome, Row, RowResult
from specbatch.errors import ServiceUnavailable
from specbatch.models import results, rows, workers
from specbatch.service import files, ingest, upkeep
from specbatch.store import results as settled
from tests.faults.audit import audit
from tests.integration.test_store_machine import Hints, open_store, submitted
from tests.server_fixtures import Desk, file_lines, jsonl, line

MIB = 1024**2
Upload = Callable[..., str]
Create = Callable[..., dict[str, Any]]


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """The most bytes that Python held since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


class Slow(Hints):
    """Each message takes longer than the patience with one that waits."""

    def publish(self, shards: Any, *, again: bool = False) -> None:
        super().publish(shards, again=again)
        assert len(self.sent) <= 100, "the same shards are sent for ever"


def test_a_pass_sends_each_shard_once_however_long_it_takes(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(database_url, tmp_path)
    ctx = Context(store.settings, store.database, hints := Slow())
    try:
        submitted(ctx, 50)
        ingest.ingest_next(ctx, "reconciler")
        monkeypatch.setattr(upkeep, "SOME", 3)
        monkeypatch.setattr(upkeep, "RESEND_SECONDS", 0.0)
        upkeep.publish(ctx, upkeep.Tally())
        assert sorted(shard_no for _, shard_no in hints.sent) == list(range(10))
    finally:
        store.database.close()


def test_blank_lines_cost_no_memory(tmp_path: Path, traced: Callable[[], int]) -> None:
    path = tmp_path / "blank.jsonl"
    path.write_bytes(b"\n" * 200_000 + b"{}\n" + b"\r\n" * 3)
    found = sum(1 for _ in lines.read(path, MIB))
    assert (found, traced() < MIB) == (200_001, True)


def test_lines_between_blank_ones_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n\na\n \r\nb\n" + b" " * 50 + b"\nc\n\n\n")
    found = [(number, line[:1]) for number, line in lines.read(path, 20)]
    assert found == [(1, b""), (2, b""), (3, b"a"), (4, b""), (5, b"b"), (6, b" "), (7, b"c")], "a line of blanks may be too long, too"


def test_a_file_that_begins_with_more_blank_lines_than_are_looked_at(api: TestClient, desk: Desk, create: Create, ctx: Context) -> None:
    file_id = files.upload(ctx, "in.jsonl", "batch", [b"\n" * (files.FIRST_LINE_BYTES + 1), jsonl(line("a"))]).id
    object.__setattr__(ctx.settings, "max_batch_rows", 10)
    batch_id = create(file_id)["id"]
    desk.validate()
    (error,) = api.get(f"/v1/batches/{batch_id}").json()["errors"]["data"]
    assert error["code"] == "too_many_requests"


ODD_NAMES = {"nul": "a\0b", "a lone surrogate": "a\ud800", "a long one": "m" * 50_000}


@pytest.mark.parametrize("name", ODD_NAMES.values(), ids=ODD_NAMES)
@pytest.mark.parametrize("on_invalid", ["skip", "fail"])
def test_a_name_that_no_message_can_bear(api: TestClient, desk: Desk, ctx: Context, create: Create, name: str, on_invalid: str) -> None:
    keys: list[dict[str, Any]] = [{f"guided_{name}": 1}, {f"guided_{number}{name}": 1 for number in range(50)}]
    refused = [line("model", model=name), line("key", **keys[0]), line("keys", **keys[1])]
    file_id = files.upload(ctx, "in.jsonl", "batch", [jsonl(line("good"), *refused)]).id
    batch_id = create(file_id, on_invalid=on_invalid, mode=Mode.PLAIN)["id"]
    desk.validate()
    if on_invalid == "fail":
        errors = api.get(f"/v1/batches/{batch_id}").json()["errors"]["data"]
        assert len(errors) == 52
        told = [error["message"] + error["param"] for error in errors]
    else:
        desk.work(batch_id)
        desk.finalize()
        assert audit(ctx, batch_id).rows == 4
        failed = file_lines(api, api.get(f"/v1/batches/{batch_id}").json()["error_file_id"])
        assert [each["custom_id"] for each in failed] == ["model", "key", "keys"]
        told = [each["error"]["message"] for each in failed[:2]]
        assert len(failed[2]["error"]["message"]) < 10_000
    assert all(len(each) < 1000 and "\0" not in each for each in told)


@pytest.mark.parametrize("message", ODD_NAMES.values(), ids=ODD_NAMES)
def test_an_error_message_of_any_text_is_kept(api: TestClient, desk: Desk, upload: Upload, create: Create, message: str) -> None:
    batch_id = create(upload(line("a")), mode=Mode.PLAIN)["id"]
    desk.validate()
    desk.work(batch_id, lambda row: RowResult(row.row_index, Outcome.FAILED, error=("engine_error", message)))
    desk.finalize()
    (failed,) = file_lines(api, api.get(f"/v1/batches/{batch_id}").json()["error_file_id"])
    assert failed["error"]["message"].startswith(message[:1])


def test_an_output_of_large_answers_is_written_a_few_at_a_time(
    desk: Desk, ctx: Context, upload: Upload, create: Create, traced: Callable[[], int]
) -> None:
    batch_id = create(upload(*(line(str(number)) for number in range(200))), mode=Mode.PLAIN)["id"]
    desk.validate()

    def large(row: Row) -> RowResult:
        return RowResult(row.row_index, Outcome.SUCCEEDED, 200, lines.compact({"text": f"{row.row_index} ".ljust(MIB // 4, "x")}))

    desk.work(batch_id, large)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    read = sum(len(lines.dump(batch_id, *ended)) for ended in settled.in_input_order(ctx.database, batch_id, 200, succeeded=True))
    assert read > 50 * MIB
    assert traced() - before < 20 * MIB


def test_rows_of_an_unfinished_validation_are_dropped_in_steps(
    api: TestClient, desk: Desk, ctx: Context, upload: Upload, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "DROPPED_AT_ONCE", 3)
    file_id = upload(*(line(str(number)) for number in range(10)), line("bad", stream=True))
    batch_id = create(file_id, on_invalid="skip", mode=Mode.PLAIN)["id"]
    desk.validate_without_end(batch_id)
    desk.validate()
    desk.work(batch_id)
    desk.finalize()
    assert audit(ctx, batch_id).rows == 11
    failed = create(file_id)["id"]
    desk.validate()
    assert api.get(f"/v1/batches/{failed}").json()["status"] == "failed"
    with ctx.database.read() as tx:
        for table in (rows, results):
            assert not tx.execute(sa.select(table).where(table.c.job_id == failed)).all()


def test_a_receiver_that_answers_a_byte_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "ATTEMPT_SECONDS", 1.0)
    over = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not over.wait(0.1):
                    connection.sendall(b"x")
            except OSError:
                over.set()  # the sender has gone

    with socket.create_server(("127.0.0.1", 0)) as server:
        dripping = threading.Thread(target=drip, args=(server,))
        dripping.start()
        try:
            with pytest.raises(outbound.DeliveryFailed, match="within 1 s"):
                outbound.post(f"http://127.0.0.1:{server.getsockname()[1]}/", b"{}", {}, allow_private=True)
            assert over.wait(30), "the connection was left open"
        finally:
            over.set()
            dripping.join()


@pytest.mark.parametrize("query", ["model=%00", "batch_id=a%00"])
def test_nul_is_not_looked_for(api: TestClient, query: str) -> None:
    assert api.get(f"/v1/speculation?{query}").status_code == 400


def test_a_file_of_another_purpose_is_no_input(api: TestClient) -> None:
    uploaded = api.post("/v1/files", files={"file": ("in.jsonl", jsonl(line("a")))}, data={"purpose": "assistants"}).json()
    body = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    refused = api.post("/v1/batches", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_file_id")


@pytest.mark.postgres
def test_a_database_that_takes_no_writes_is_one_that_comes_back(postgres_url: str) -> None:
    """As while a standby takes the place of its primary."""
    database = Database(postgres_url)

    def write() -> None:
        with database.write() as tx:
            tx.execute(sa.text("SET TRANSACTION READ ONLY"))
            tx.execute(sa.delete(workers))

    try:
        with pytest.raises(ServiceUnavailable, match="no writes"):
            write()
    finally:
        database.close()


def test_connections_that_are_all_in_use_are_waited_for(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(database_url)
    monkeypatch.setattr(database._engine.pool, "_timeout", 0.05)

    def deeper(depth: int) -> None:
        with database.read() as tx:
            tx.execute(sa.select(sa.literal(1)))
            deeper(depth + 1)

    try:
        with pytest.raises(ServiceUnavailable, match="every connection"):
            deeper(0)
    finally:
        database.close()
