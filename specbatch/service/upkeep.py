"""What the reconciler keeps true, whoever died: each verb is safe to run anywhere, any number of times, at once."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from specbatch.context import Context
from specbatch.database import moment
from specbatch.domain import Mode, Outcome
from specbatch.service.files import path
from specbatch.service.reconsider import reconsider
from specbatch.service.shards import CLOSINGS, settle_alike
from specbatch.store import files, jobs, shards, workers

SOME = 500  # shards handled in one transaction
RESEND_SECONDS = 5.0  # a message older than this, whose queue is empty, was lost
RESEND_ANYWAY_SECONDS = 6 * 3600.0  # and in a queue that never empties; each time, all that waits there has one more message
HELD_UP_SECONDS = 1.0
PIECES = 4  # into which a suspect shard is split
WORKER_MEMORY_SECONDS = 7 * 86_400.0


@dataclass(slots=True)
class Tally:
    """What a sweep did."""

    published: int = 0
    leases_expired: int = 0
    split: int = 0
    rows_failed: int = 0
    closed: int = 0
    jobs_expired: int = 0
    files_expired: int = 0
    redirected: int = 0

    def __bool__(self) -> bool:
        return any(asdict(self).values())


def sweep(ctx: Context) -> Tally:
    """Everything that was lost or is overdue, once. Raises ServiceUnavailable when the database or Redis does not answer."""
    tally = Tally()
    expire_leases(ctx, tally)
    part_suspects(ctx, tally)
    expire_jobs(ctx, tally)
    close_stopped(ctx, tally)
    expire_files(ctx, tally)
    tally.redirected += reconsider(ctx)
    forget_workers(ctx)
    publish(ctx, tally)
    return tally


def ping(ctx: Context) -> None:
    """Raises ServiceUnavailable while the database does not answer."""
    with ctx.database.read() as tx:
        jobs.overdue(tx)


def expire_leases(ctx: Context, tally: Tally) -> None:
    """Not after waiting for the database's lock: then the holders waited too, and renew before the next sweep."""
    asked = time.monotonic()
    with ctx.database.write() as tx:
        if time.monotonic() - asked < HELD_UP_SECONDS:
            tally.leases_expired += len(shards.expire_leases(tx, SOME))


def part_suspects(ctx: Context, tally: Tally) -> None:
    """Split what was lost twice, until a row that kills engines stands alone; alone and lost too often, it fails."""
    with ctx.database.read() as tx:
        suspects = shards.suspects(tx, SOME)
    for shard in suspects:
        with ctx.database.write() as tx:
            owed = len(shards.unsettled(tx, shard["job_id"], shard["shard_no"]))
            if owed > 1:
                tally.split += shards.split(tx, shard, PIECES)
            elif owed == 0 or shard["losses"] >= ctx.settings.max_attempts:
                message = f"The engine or its worker died {shard['losses']} times while this request ran; it was given up."
                if shards.end(tx, shard):
                    tally.rows_failed += settle_alike(
                        tx, shard["job_id"], shard["shard_no"], shard["attempt"], Outcome.FAILED, ("engine_died", message)
                    )


def expire_jobs(ctx: Context, tally: Tally) -> None:
    with ctx.database.read() as tx:
        late = jobs.overdue(tx)
    for job_id in late:
        with ctx.database.write() as tx:
            tally.jobs_expired += jobs.stop(tx, job_id, Outcome.EXPIRED)


def close_stopped(ctx: Context, tally: Tally) -> None:
    """Settle the rows of stopped jobs that no worker holds. Those in a worker's hands are settled by it, or after its lease."""
    with ctx.database.read() as tx:
        stopped = jobs.stopped(tx)
    for job in stopped:
        why = Outcome(job["stop"])
        while True:
            with ctx.database.write() as tx:
                seized = shards.seize(tx, job["id"], SOME)
                for shard in seized:
                    settle_alike(tx, job["id"], shard["shard_no"], shard["attempt"], why, CLOSINGS[why])
            tally.closed += len(seized)
            if len(seized) < SOME:
                break


def expire_files(ctx: Context, tally: Tally) -> None:
    with ctx.database.read() as tx:
        dead = files.expired(tx, SOME)
    for file_id in dead:
        path(ctx, file_id).unlink(missing_ok=True)  # first: what SQL has forgotten, nobody would delete
        with ctx.database.write() as tx:
            files.delete(tx, file_id)
        tally.files_expired += 1


def publish(ctx: Context, tally: Tally) -> None:
    """Send a message for every queued shard that has none.

    A shard whose queue still holds messages is probably behind them, unless later ones were served. One whose queue is empty was lost.
    """
    assert ctx.queue is not None, "the process that sweeps needs a queue"
    with ctx.database.read() as tx:
        began = moment(tx)
        queues = [(model, Mode(mode)) for model, mode in shards.queues(tx)]
    for model, mode in queues:
        patience = RESEND_SECONDS if ctx.queue.depth(model, mode) == 0 else RESEND_ANYWAY_SECONDS
        while True:
            with ctx.database.read() as tx:
                lost = shards.unpublished(
                    tx,
                    model,
                    mode,
                    at=began,
                    older_than=patience,
                    overtaken_by=RESEND_SECONDS,
                    most_losses=ctx.settings.max_attempts,
                    limit=SOME,
                )
            for again in (True, False):
                some = (shard for shard in lost if _was_sent(shard) is again)
                ctx.queue.publish(((shard["job_id"], shard["shard_no"], model, mode) for shard in some), again=again)
            with ctx.database.write() as tx:
                shards.stamp_published(tx, lost)
            tally.published += len(lost)
            if len(lost) < SOME:
                break


def _was_sent(shard: shards.Shard) -> bool:
    return bool(shard["attempt"] > 0 or shard["losses"] > 0 or shard["published_at"] > 0)


def forget_workers(ctx: Context) -> None:
    with ctx.database.write() as tx:
        workers.forget(tx, WORKER_MEMORY_SECONDS)
