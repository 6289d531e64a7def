"""Two reconcilers at work on the same rows: whoever writes several passes over those in somebody's hands, and never waits crosswise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from specbatch.context import Context, opened
from specbatch.database import Record
from specbatch.domain import Mode, ShardStatus, TaskType
from specbatch.models import jobs, metadata, shards, webhooks, workers
from specbatch.settings import Settings
from specbatch.store import jobs as job_store
from specbatch.store import shards as shard_store
from specbatch.store import webhooks as webhook_store
from specbatch.store import workers as worker_store

pytestmark = pytest.mark.postgres  # SQLite has one writer at a time
COUNT = 4
HELD = 1  # the second of them: whoever took them in order would hold the first, and wait
Verb = Callable[[sa.Connection], object]


@pytest.fixture
def store(postgres_url: str, tmp_path: Path) -> Iterator[Context]:
    with opened(Settings(data_dir=tmp_path, database_url=postgres_url, engine="scripted")) as ctx:
        yield ctx


def a_job(tx: sa.Connection, number: int, **values: object) -> None:
    known = {
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-1",
        "completion_window": "24h",
        "created_at": number,
        "expires_at": 9e9,
    }
    given = {"id": f"batch_{number}", **known, **values}
    for column in jobs.c:
        if column.name not in given and not column.nullable and column.server_default is None:
            given[column.name] = {str: "", int: 0, float: 0.0, bool: False}.get(column.type.python_type, {})
    tx.execute(sa.insert(jobs).values(given))


def some_shards(tx: sa.Connection, **values: object) -> None:
    a_job(tx, 1, status="in_progress")
    alike = {"job_id": "batch_1", "model": "m", "mode": Mode.NGRAM, "task": TaskType.CODE, "rows": 1, "status": ShardStatus.QUEUED}
    tx.execute(sa.insert(shards), [{**alike, "shard_no": number, **values} for number in range(COUNT)])


def sent(tx: sa.Connection) -> list[Record]:
    return [{"job_id": "batch_1", "shard_no": number, "attempt": 0} for number in range(COUNT)]


def redirect(tx: sa.Connection) -> object:
    return shard_store.redirect(tx, "m", Mode.NGRAM, TaskType.CODE, named=False, to=Mode.PLAIN, why="", leave=0, limit=100)


def lease(tx: sa.Connection) -> object:
    return [job_store.lease_next(tx, "reconciler", 60.0, job_store.to_validate()) for _ in range(COUNT)]


def take(tx: sa.Connection) -> object:
    return [webhook_store.take(tx, 60.0) for _ in range(COUNT)]


def running(tx: sa.Connection) -> None:
    some_shards(tx, status=ShardStatus.RUNNING)


def jobs_to_validate(tx: sa.Connection) -> None:
    for number in range(COUNT):
        a_job(tx, number, status="validating")


def due_webhooks(tx: sa.Connection) -> None:
    a_job(tx, 1, status="completed")
    for number in range(COUNT):
        webhook_store.add(tx, f"evt_{number}", job_id="batch_1", kind="batch.completed", url="http://there")


def silent_workers(tx: sa.Connection) -> None:
    alike = {"model": "m", "names": [], "modes": [], "withheld": {}, "started_at": 0.0, "seen_at": 0.0}
    tx.execute(sa.insert(workers), [{"id": f"worker-{number}", **alike} for number in range(COUNT)])


VERBS: dict[str, tuple[sa.Table, Callable[[sa.Connection], None], Verb]] = {
    "expire_leases": (shards, running, lambda tx: shard_store.expire_leases(tx, 100)),
    "seize": (shards, some_shards, lambda tx: shard_store.seize(tx, "batch_1", 100)),
    "stamp_published": (shards, some_shards, lambda tx: shard_store.stamp_published(tx, sent(tx))),
    "redirect": (shards, some_shards, redirect),
    "lease_next": (jobs, jobs_to_validate, lease),
    "webhooks.take": (webhooks, due_webhooks, take),
    "workers.forget": (workers, silent_workers, lambda tx: worker_store.forget(tx, 60.0)),
}


def contents(tx: sa.Connection, table: sa.Table) -> dict[tuple[object, ...], tuple[object, ...]]:
    """The table's rows by primary key."""
    return {tuple(row._mapping[column] for column in table.primary_key): tuple(row) for row in tx.execute(sa.select(table))}


@pytest.mark.parametrize("verb", VERBS)
def test_what_another_holds_is_passed_over_and_done_the_next_time(store: Context, verb: str) -> None:
    table, prepare, act = VERBS[verb]
    with store.database.write() as tx:
        prepare(tx)
        before = contents(tx, table)
    held = sorted(before, key=str)[HELD]
    with store.database.write() as other:
        other.execute(sa.select(table).where(sa.tuple_(*table.primary_key) == held).with_for_update()).one()
        with store.database.write() as tx:
            tx.execute(sa.text("SET LOCAL lock_timeout = '20s'"))  # a verb that waits fails with it
            act(tx)
    with store.database.read() as tx:
        after = contents(tx, table)
    assert {key for key in before if after.get(key) == before[key]} == {held}
    with store.database.write() as tx:
        act(tx)
        last = contents(tx, table)
    assert last.get(held) != before[held]


def test_every_table_that_several_processes_write_rows_of_is_here() -> None:
    """A new table has to say how its rows are taken: in `VERBS`, or here, and why nothing waits there."""
    one_at_a_time = {"files", "speeds"}  # each transaction writes one row
    under_their_shard = {"rows", "results", "measurements"}  # whose row the writer has locked, or their job's
    assert {table.name for table in metadata.sorted_tables} == {
        table.name for table, *_ in VERBS.values()
    } | one_at_a_time | under_their_shard
