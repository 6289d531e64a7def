"""What a worker does to a shard: claim it, read its rows, settle them under the fence, hand it back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import sqlalchemy as sa

from specbatch.context import Context
from specbatch.domain import Claim, Mode, Outcome, Row, RowResult
from specbatch.store import jobs, results, shards, workers

WINDOW_ROWS = 256  # bodies read at a time: a shard's, by default


class Standing(Enum):
    """Where a claim stands after a write."""

    HELD = auto()
    FENCED = auto()  # a newer attempt has the shard: nothing was written
    CANCELLED = auto()  # written; the job's remaining rows shall end as cancelled
    EXPIRED = auto()


_STOPS = {None: Standing.HELD, Outcome.CANCELLED: Standing.CANCELLED, Outcome.EXPIRED: Standing.EXPIRED}
CLOSINGS = {
    Outcome.CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
    Outcome.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
}


@dataclass(frozen=True, slots=True)
class Taken:
    """A claimed shard: the rows it still owes, and whether it has seen an engine or a worker die (then it runs alone)."""

    claim: Claim
    owed: tuple[int, ...]
    suspect: bool


def suspect(ctx: Context, job_id: str, shard_no: int) -> bool:
    """Whether a shard has seen an engine or a worker die. Only who can run it alone claims it: waiting for that is not running."""
    with ctx.database.read() as tx:
        return shards.losses(tx, job_id, shard_no) > 0


def claim(ctx: Context, job_id: str, shard_no: int, *, model: str, mode: Mode, owner: str) -> Taken | None:
    """Take a shard of this model and mode, or None when it is not to be had: done, stopped, redirected, or in another worker's hands."""
    with ctx.database.write() as tx:
        lease, most = ctx.settings.lease_seconds, ctx.settings.max_attempts
        taken = shards.claim(tx, job_id, shard_no, model=model, mode=mode, owner=owner, seconds=lease, most_losses=most)
        if taken is None:
            return None
        jobs.stamp_first_claim(tx, job_id)
        held, losses, owed = taken
        return Taken(held, tuple(owed), losses > 0)


def read_rows(ctx: Context, claim: Claim, indexes: Sequence[int]) -> list[Row]:
    """The rows so numbered, in order. The caller asks for WINDOW_ROWS at a time: bodies may be large."""
    with ctx.database.read() as tx:
        found = shards.bodies(tx, claim, indexes)
    return [Row(row_index, custom_id, json.loads(body)) for row_index, custom_id, body in found]


def settle(
    ctx: Context, claim: Claim, batch: Sequence[RowResult], *, owed: int | None = None, peak_memory_bytes: int | None = None
) -> Standing:
    """Write outcomes and renew the lease in one transaction, if the claim still holds; the last outcome ends the shard.

    Safe to repeat after a commit whose answer was lost: what is written already is passed over. `owed` is how many rows the caller
    believes the shard to owe: where it does, nothing of the batch is written, and nobody has to look.
    """
    with ctx.database.write() as tx:
        if (held := shards.lock(tx, claim)) is None:
            return Standing.FENCED
        model, owes, at = held
        if owes != owed:
            batch = results.unwritten(tx, claim.job_id, batch)
        results.measure(tx, claim, model, batch, at)
        shards.hold(tx, claim, ctx.settings.lease_seconds, len(batch))
        # From here on the job's row is locked, and every other shard of the job waits: outcomes get their numbers from it.
        settled, stop = jobs.add_settled(tx, claim.job_id, _totals(batch), peak_memory_bytes)
        results.add(tx, claim.job_id, claim.attempt, settled - len(batch), batch, at)
        return _STOPS[stop]


def renew(ctx: Context, claim: Claim) -> Standing:
    """Prolong the lease while nothing is ready to settle."""
    with ctx.database.write() as tx:
        if not shards.hold(tx, claim, ctx.settings.lease_seconds):
            return Standing.FENCED
        job = jobs.get(tx, claim.job_id)
        return Standing.FENCED if job is None else _STOPS[job["stop"]]


def close(ctx: Context, claim: Claim, why: Outcome) -> Standing:
    """End a held shard whose job was stopped: every row still owed is settled as `why`."""
    with ctx.database.write() as tx:
        if shards.lock(tx, claim) is None:
            return Standing.FENCED
        owed = settle_alike(tx, claim.job_id, claim.shard_no, claim.attempt, why, CLOSINGS[why])
        shards.hold(tx, claim, ctx.settings.lease_seconds, owed)
        return Standing.HELD


def settle_alike(tx: sa.Connection, job_id: str, shard_no: int, attempt: int, outcome: Outcome, error: tuple[str, str]) -> int:
    """Settle every row that a shard still owes with one ending. The caller holds the shard's row. Answers how many there were."""
    owed = len(shards.unsettled(tx, job_id, shard_no))
    settled, _ = jobs.add_settled(tx, job_id, {"settled": owed}, None)
    results.add_alike(tx, job_id, shard_no, attempt, settled - owed, outcome, error)
    return owed


def hand_back(ctx: Context, claim: Claim, *, lost: bool, delay: float = 0.0) -> None:
    """Queue a shard again: `lost` when its engine died under it, else because this worker stops."""
    with ctx.database.write() as tx:
        shards.put_back(tx, claim, lost=lost, delay=delay)


def alive(
    ctx: Context,
    worker_id: str,
    *,
    model: str,
    names: Sequence[str],
    modes: Sequence[Mode],
    withheld: Mapping[Mode, str],
    mode: Mode | None,
    endpoints: Sequence[str] | None = None,
) -> None:
    """A worker's sign of life, with what it offers. `endpoints` is None while no engine of it runs."""
    with ctx.database.write() as tx:
        workers.seen(ctx.database, tx, worker_id, model=model, names=names, modes=modes, withheld=withheld, mode=mode, endpoints=endpoints)


def backlog(ctx: Context, model: str) -> list[tuple[Mode, int, float]]:
    """(mode, rows still owed, seconds that the oldest has waited) of each queue of a model."""
    with ctx.database.read() as tx:
        return shards.backlog(tx, model)


def _totals(batch: Sequence[RowResult]) -> dict[str, int]:
    costs = [result.measurement for result in batch if result.measurement is not None]
    return {
        "settled": len(batch),
        "succeeded": sum(result.outcome is Outcome.SUCCEEDED for result in batch),
        "prompt_tokens": sum(cost.prompt_tokens for cost in costs),
        "cached_tokens": sum(cost.cached_tokens for cost in costs),
        "generated_tokens": sum(cost.generated_tokens for cost in costs),
        "drafted_tokens": sum(cost.drafted_tokens for cost in costs),
        "accepted_tokens": sum(cost.accepted_tokens for cost in costs),
    }
