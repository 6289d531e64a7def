"""Which shards need a message: those without one, and those whose message cannot be waiting any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from specbatch.context import Context
from specbatch.database import now
from specbatch.domain import Mode
from specbatch.models import shards
from specbatch.service import ingest, upkeep
from tests.integration.test_store_machine import Hints, open_store, submitted, taken_now


class Waiting(Hints):
    """There are always messages in it."""

    def depth(self, model: str, mode: Mode) -> int:
        return 1


@pytest.fixture
def ctx(database_url: str, tmp_path: Path) -> Iterator[Context]:
    store = open_store(database_url, tmp_path)
    yield Context(store.settings, store.database, Waiting())
    store.database.close()


def published(ctx: Context) -> list[int]:
    """The shards that a sweep sends messages for."""
    assert isinstance(ctx.queue, Hints)
    ctx.queue.sent.clear()
    upkeep.publish(ctx, upkeep.Tally())
    return sorted(shard_no for _, shard_no in ctx.queue.sent)


def sent_before(ctx: Context, shard_no: int, seconds: float) -> None:
    with ctx.database.write() as tx:
        tx.execute(sa.update(shards).where(shards.c.shard_no == shard_no).values(published_at=now() - seconds))


def test_a_message_that_was_overtaken_was_lost(ctx: Context) -> None:
    job_id = submitted(ctx, 15)
    ingest.ingest_next(ctx, "reconciler")
    assert published(ctx) == [0, 1, 2]
    for shard_no, seconds in ((0, 100.0), (1, 50.0), (2, 49.0)):
        sent_before(ctx, shard_no, seconds)
    assert published(ctx) == [], "all may still wait"
    assert taken_now(ctx, job_id, 1) is not None
    assert published(ctx) == [0], "it was sent before one that was served; 2 was sent after it"
    assert published(ctx) == []


def test_what_was_lost_goes_first_and_overtakes_rightly(ctx: Context) -> None:
    job_id = submitted(ctx, 10)
    ingest.ingest_next(ctx, "reconciler")
    published(ctx)
    assert taken_now(ctx, job_id, 1) is not None
    sent_before(ctx, 0, 100.0)
    with ctx.database.write() as tx:  # shard 1 came back, was sent again, and served again
        tx.execute(sa.update(shards).where(shards.c.shard_no == 1).values(attempt=2, published_at=now()))
    assert published(ctx) == [], "shard 0 was passed by one that goes before it"
