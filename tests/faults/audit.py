"""What must hold of a batch whatever happened to it, asked of SQL and of its files. Every fault test and every chaos run ends here."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from specbatch.context import Context
from specbatch.database import Database, Record, records
from specbatch.domain import TERMINAL, JobStatus, Outcome, ShardStatus
from specbatch.models import jobs, measurements, results, rows, shards
from specbatch.store.rows import NO_SHARD

COSTS = ("prompt_tokens", "cached_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens")


@dataclass(frozen=True, slots=True)
class Tally:
    """What an audited batch went through."""

    status: str
    rows: int
    outcomes: dict[str, int] = field(default_factory=dict)
    shards: int = 0
    attempts: int = 0  # of all shards together
    most_attempts: int = 0  # of one shard
    losses: int = 0
    most_losses: int = 0


def audit(ctx: Context, job_id: str, *, ended: bool = True) -> Tally:
    """Raises AssertionError naming the first broken promise. `ended`: the batch must be over, with nothing owed and its files complete."""
    with ctx.database.read() as tx:
        job = tx.execute(sa.select(jobs).where(jobs.c.id == job_id)).one()._asdict()
        parts = records(tx.execute(sa.select(shards).where(shards.c.job_id == job_id)))
        outcomes = _count(tx, results.c.outcome, job_id)
        if job["validated_at"] is not None and job["status"] != JobStatus.FAILED:
            _check_job(tx, job, outcomes)
            _check_shards(tx, job, parts)
            _check_fence(tx, job)
            _check_measurements(tx, job)
    often = [part for part in parts if part["losses"] > ctx.settings.max_attempts]
    assert not often, f"lost more than {ctx.settings.max_attempts} times: {often}"
    if ended:
        _check_ended(ctx.database, job, parts)
        if job["status"] != JobStatus.FAILED:
            _check_files(ctx, job, outcomes)
    attempts = [part["attempt"] for part in parts] or [0]
    losses = [part["losses"] for part in parts] or [0]
    return Tally(job["status"], job["rows"], outcomes, len(parts), sum(attempts), max(attempts), sum(losses), max(losses))


def _check_job(tx: sa.Connection, job: Record, outcomes: dict[str, int]) -> None:
    written = sum(outcomes.values())
    asked = tx.execute(sa.select(sa.func.count()).select_from(rows).where(rows.c.job_id == job["id"])).scalar_one()
    assert asked == job["rows"], f"the job counts {job['rows']} rows and has {asked}"
    assert written == job["settled"], f"the job counts {job['settled']} settled rows and has {written} results"
    assert outcomes.get(Outcome.SUCCEEDED, 0) == job["succeeded"], f"the job counts {job['succeeded']} successes: {outcomes}"
    number = results.c.sequence
    numbering = sa.select(sa.func.min(number), sa.func.max(number), sa.func.count(number.distinct())).where(results.c.job_id == job["id"])
    first, last, distinct = tx.execute(numbering).one()
    assert not written or (first, last, distinct) == (1, written, written), f"results are numbered {first}..{last}, {distinct} of {written}"
    known = sa.exists().where(rows.c.job_id == results.c.job_id, rows.c.row_index == results.c.row_index)
    strays = sa.select(sa.func.count()).select_from(results).where(results.c.job_id == job["id"], ~known)
    assert tx.execute(strays).scalar_one() == 0, "there are results of rows that nobody asked for"


def _check_shards(tx: sa.Connection, job: Record, parts: list[Record]) -> None:
    dealt = _count(tx, rows.c.shard_no, job["id"])
    joined = sa.and_(rows.c.job_id == results.c.job_id, rows.c.row_index == results.c.row_index)
    query = sa.select(rows.c.shard_no, sa.func.count()).join(results, joined).where(rows.c.job_id == job["id"]).group_by(rows.c.shard_no)
    written = {row[0]: row[1] for row in tx.execute(query)}
    assert written.get(NO_SHARD, 0) == dealt.pop(NO_SHARD, 0), "rows that validation refused have no ending"
    numbers = {part["shard_no"] for part in parts}
    assert set(dealt) <= numbers, f"rows lie in shards that do not exist: {set(dealt) - numbers}"
    for part in parts:
        held, settled = dealt.get(part["shard_no"], 0), written.get(part["shard_no"], 0)
        assert part["rows"] == held, f"shard {part['shard_no']} counts {part['rows']} rows and has {held}"
        assert part["settled"] == settled, f"shard {part['shard_no']} counts {part['settled']} settled rows and has {settled}"
        assert part["status"] != ShardStatus.DONE or settled == held, f"shard {part['shard_no']} is done and owes {held - settled} rows"


def _check_fence(tx: sa.Connection, job: Record) -> None:
    """Within a shard no attempt writes after a newer one has written."""
    joined = sa.and_(rows.c.job_id == results.c.job_id, rows.c.row_index == results.c.row_index)
    query = sa.select(rows.c.shard_no, results.c.attempt).join(results, joined).where(rows.c.job_id == job["id"])
    newest: dict[int, int] = {}
    for shard_no, attempt in tx.execute(query.order_by(results.c.sequence)):
        assert attempt >= newest.get(shard_no, 0), f"in shard {shard_no}, attempt {attempt} wrote after attempt {newest[shard_no]}"
        newest[shard_no] = attempt


def _check_measurements(tx: sa.Connection, job: Record) -> None:
    written = sa.exists().where(results.c.job_id == measurements.c.job_id, results.c.row_index == measurements.c.row_index)
    strays = sa.select(sa.func.count()).select_from(measurements).where(measurements.c.job_id == job["id"], ~written)
    assert tx.execute(strays).scalar_one() == 0, "there are measurements of rows without a result"
    sums = (sa.func.coalesce(sa.func.sum(measurements.c[name]), 0) for name in COSTS)
    measured = tuple(tx.execute(sa.select(*sums).where(measurements.c.job_id == job["id"])).one())
    assert measured == tuple(job[name] for name in COSTS), f"the rows cost {measured}, the job counts otherwise"


def _check_ended(database: Database, job: Record, parts: list[Record]) -> None:
    assert job["status"] in TERMINAL, f"the batch is still {job['status']}"
    assert job["settled"] == job["rows"], f"{job['rows'] - job['settled']} rows were lost"
    assert all(part["status"] == ShardStatus.DONE for part in parts), "a batch that ended has open shards"


def _check_files(ctx: Context, job: Record, outcomes: dict[str, int]) -> None:
    """Output and error together hold each custom_id once, and the output the successes."""
    with ctx.database.read() as tx:
        asked = Counter(tx.execute(sa.select(rows.c.custom_id).where(rows.c.job_id == job["id"])).scalars())
    told: Counter[str] = Counter()
    for kind, count in (("output", outcomes.get(Outcome.SUCCEEDED, 0)), ("error", job["rows"] - outcomes.get(Outcome.SUCCEEDED, 0))):
        file_id = job[f"{kind}_file_id"]
        assert (file_id is not None) == (count > 0), f"{count} rows belong in the {kind} file, which is {file_id}"
        if file_id is not None:
            found = [json.loads(line)["custom_id"] for line in (ctx.settings.files_dir / file_id).read_bytes().splitlines()]
            assert len(found) == count, f"the {kind} file has {len(found)} lines for {count} rows"
            told.update(found)
    assert told == asked, f"lost: {asked - told}; too often: {told - asked}"


def _count(tx: sa.Connection, column: sa.Column[Any], job_id: str) -> dict[Any, int]:
    query = sa.select(column, sa.func.count()).where(column.table.c.job_id == job_id).group_by(column)
    return dict(iter(tx.execute(query)))
