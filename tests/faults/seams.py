"""What a test changes inside a process before it starts: its name, its clock, or a mechanism switched off to show that it matters."""

from __future__ import annotations

import socket
import time
from typing import Any

import sqlalchemy as sa

from specbatch import models
from specbatch.models import rows
from specbatch.service import upkeep
from specbatch.store import shards


def call_host(name: str) -> None:
    """The name begins the owner of every shard that this process claims."""
    socket.gethostname = lambda: name


def skew_clock(seconds: str) -> None:
    """This process believes that it is so much later."""
    honest, skew = time.time, float(seconds)
    time.time = lambda: honest() + skew


def switch_off_fence(_: str) -> None:
    """Writes no longer ask whose attempt the shard is."""
    shards._held = lambda claim: shards._is(claim.job_id, claim.shard_no)


def switch_off_renewal(_: str) -> None:
    """A holder no longer prolongs its lease."""
    hold = shards.hold

    def hold_without_renewing(tx: sa.Connection, claim: Any, seconds: float, settled: int = 0) -> bool:
        until = sa.select(models.shards.c.lease_until).where(shards._is(claim.job_id, claim.shard_no))
        before = tx.execute(until).scalar_one()
        held = hold(tx, claim, seconds, settled)
        tx.execute(sa.update(models.shards).where(shards._is(claim.job_id, claim.shard_no)).values(lease_until=before))
        return held

    shards.hold = hold_without_renewing


def switch_off_expiry(_: str) -> None:
    """The reconciler no longer takes shards from silent holders."""
    upkeep.expire_leases = lambda ctx, tally: None


def switch_off_resume(_: str) -> None:
    """A claim no longer asks which rows are settled already."""

    def all_rows(tx: sa.Connection, job_id: str, shard_no: int) -> list[int]:
        query = sa.select(rows.c.row_index).where(rows.c.job_id == job_id, rows.c.shard_no == shard_no)
        return list(tx.execute(query.order_by(rows.c.row_index)).scalars())

    shards.unsettled = all_rows


def lose_messages(first: str) -> None:
    """So many publishes are lost on their way, without an error."""
    from specbatch.queue import Queue

    publish, count = Queue.publish, iter(range(1_000_000))

    def publish_most(self: Queue, shards: Any, *, again: bool = False) -> None:
        publish(self, [shard for shard in shards if next(count) >= int(first)], again=again)

    Queue.publish = publish_most  # type: ignore[method-assign]
