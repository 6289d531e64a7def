"""The shard machine in SQL: claimed by one attempt, written only under that attempt's fence, put back when it is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from specbatch.database import Record, now, records, unlocked
from specbatch.domain import Claim, JobStatus, Mode, ShardStatus, TaskType
from specbatch.models import jobs, results, rows, shards

Shard = Record
SUSPECT_LOSSES = 2  # lost so often, a shard is split before it runs again: one of its rows may be what kills engines
_KEY = (shards.c.job_id, shards.c.shard_no)
# A worker's first silence is forgiven: a machine that went away says nothing about the rows, and a suspect has to run alone.
_SILENCE = sa.case((sa.or_(shards.c.attempt > 1, shards.c.losses > 0), 1), else_=0)


def add_all(tx: sa.Connection, job_id: str, model: str) -> None:
    """Shards as the rows were numbered, in one statement."""
    grouped = (
        sa.select(
            rows.c.job_id,
            rows.c.shard_no,
            sa.literal(model),
            sa.func.min(rows.c.mode),
            sa.func.min(rows.c.task),
            sa.literal(ShardStatus.QUEUED.value),
            sa.func.count(),
        )
        .where(rows.c.job_id == job_id, rows.c.shard_no >= 0)
        .group_by(rows.c.job_id, rows.c.shard_no)
    )
    tx.execute(sa.insert(shards).from_select(["job_id", "shard_no", "model", "mode", "task", "status", "rows"], grouped))


def claim(
    tx: sa.Connection, job_id: str, shard_no: int, *, model: str, mode: Mode, owner: str, seconds: float, most_losses: int
) -> tuple[Claim, int, list[int]] | None:
    """Take a queued shard: the claim, the losses it has seen, and the rows that it owes. None when it is not to be had."""
    live = sa.exists().where(jobs.c.id == job_id, jobs.c.status == JobStatus.IN_PROGRESS, jobs.c.stop.is_(None))
    statement = (
        sa.update(shards)
        .where(_is(job_id, shard_no), shards.c.model == model, shards.c.mode == mode, *_takeable(most_losses), live)
        .values(status=ShardStatus.RUNNING, attempt=shards.c.attempt + 1, owner=owner, lease_until=now() + seconds)
        .returning(shards.c.attempt, shards.c.losses, shards.c.task, shards.c.settled)
    )
    taken = tx.execute(statement).one_or_none()
    if taken is None:
        return None
    endpoint = tx.execute(sa.select(jobs.c.endpoint).where(jobs.c.id == job_id)).scalar_one()
    owed = unsettled(tx, job_id, shard_no) if taken.settled else members(tx, job_id, shard_no)
    return Claim(job_id, shard_no, taken.attempt, endpoint, mode, TaskType(taken.task)), taken.losses, owed


def losses(tx: sa.Connection, job_id: str, shard_no: int) -> int:
    return tx.execute(sa.select(shards.c.losses).where(_is(job_id, shard_no))).scalar_one_or_none() or 0


def lock(tx: sa.Connection, claim: Claim) -> tuple[str, int, float] | None:
    """The fence: None when a newer attempt took the shard. It locks the shard's row until the transaction ends.

    The shard's model, the rows that it owes, and the time now.
    """
    query = sa.select(shards.c.model, shards.c.rows - shards.c.settled, now()).where(_held(claim)).with_for_update()
    held = tx.execute(query).one_or_none()
    return None if held is None else (held[0], held[1], held[2])


def hold(tx: sa.Connection, claim: Claim, seconds: float, settled: int = 0) -> bool:
    """The fence again: renew the lease and count settled rows. With its last row a shard is done, in the same statement."""
    after = shards.c.settled + settled
    values: dict[str, Any] = {
        "lease_until": now() + seconds,
        "settled": after,
        "status": sa.case((after >= shards.c.rows, ShardStatus.DONE.value), else_=shards.c.status),
        "owner": sa.case((after >= shards.c.rows, sa.null()), else_=shards.c.owner),
    }
    return tx.execute(sa.update(shards).where(_held(claim)).values(values)).rowcount == 1


def put_back(tx: sa.Connection, claim: Claim, *, lost: bool, delay: float) -> bool:
    """Queue a held shard again. `lost` counts against it: its engine died under it."""
    values = {
        "status": ShardStatus.QUEUED,
        "owner": None,
        "losses": shards.c.losses + int(lost),
        "not_before": now() + delay,
        "published_at": 0.0,
    }
    return tx.execute(sa.update(shards).where(_held(claim)).values(values)).rowcount == 1


def expire_leases(tx: sa.Connection, limit: int) -> list[Shard]:
    """Queue again every shard whose holder fell silent, and count the loss. A holder that renews meanwhile wins."""
    silent = (shards.c.status == ShardStatus.RUNNING, shards.c.lease_until < now())
    dead = unlocked(tx, sa.select(*_KEY).where(*silent).limit(limit))
    statement = (
        sa.update(shards)
        .where(sa.tuple_(*_KEY).in_(dead), *silent)
        .values(status=ShardStatus.QUEUED, owner=None, losses=shards.c.losses + _SILENCE, published_at=0.0)
        .returning(shards)
    )
    return records(tx.execute(statement))


def suspects(tx: sa.Connection, limit: int) -> list[Shard]:
    """Queued shards that were lost so often that they are to be split, or given up."""
    lost = (shards.c.status == ShardStatus.QUEUED, shards.c.losses >= SUSPECT_LOSSES)
    return records(tx.execute(sa.select(shards).where(*lost).limit(limit)))


def split(tx: sa.Connection, shard: Shard, pieces: int) -> bool:
    """Deal the rows still owed over `pieces` new shards, and end this one. False when somebody took the shard meanwhile."""
    guard = (_is(shard["job_id"], shard["shard_no"]), shards.c.status == ShardStatus.QUEUED, shards.c.attempt == shard["attempt"])
    owed = unsettled(tx, shard["job_id"], shard["shard_no"])
    ended = sa.update(shards).where(*guard).values(status=ShardStatus.DONE, owner=None, rows=shards.c.settled)
    if tx.execute(ended).rowcount != 1:
        return False
    tx.execute(sa.select(jobs.c.id).where(jobs.c.id == shard["job_id"]).with_for_update())  # another split would take the same numbers
    last = tx.execute(sa.select(sa.func.max(shards.c.shard_no)).where(shards.c.job_id == shard["job_id"])).scalar_one()
    size = -(-len(owed) // pieces)
    for number, start in enumerate(range(0, len(owed), size), start=last + 1):
        piece = owed[start : start + size]
        alike = {name: shard[name] for name in ("job_id", "model", "mode", "task")}
        tx.execute(sa.insert(shards).values(**alike, shard_no=number, status=ShardStatus.QUEUED, rows=len(piece), losses=1))
        tx.execute(sa.update(rows).where(rows.c.job_id == shard["job_id"], rows.c.row_index.in_(piece)).values(shard_no=number))
    return True


def end(tx: sa.Connection, shard: Shard) -> bool:
    """End a queued shard; the caller settles what it owes in the same transaction. False when somebody took it meanwhile."""
    guard = (_is(shard["job_id"], shard["shard_no"]), shards.c.status == ShardStatus.QUEUED, shards.c.attempt == shard["attempt"])
    return tx.execute(sa.update(shards).where(*guard).values(status=ShardStatus.DONE, owner=None, settled=shards.c.rows)).rowcount == 1


def members(tx: sa.Connection, job_id: str, shard_no: int) -> list[int]:
    """Indexes of a shard's rows, in order: all that it owes at first. No planner can take this for a walk through all results."""
    return list(tx.execute(sa.select(rows.c.row_index).where(_member(job_id, shard_no)).order_by(rows.c.row_index)).scalars())


def unsettled(tx: sa.Connection, job_id: str, shard_no: int) -> list[int]:
    """Indexes of the rows without a result, in order: at most a shard's worth of integers."""
    settled = sa.exists().where(results.c.job_id == rows.c.job_id, results.c.row_index == rows.c.row_index)
    query = sa.select(rows.c.row_index).where(_member(job_id, shard_no), ~settled).order_by(rows.c.row_index)
    return list(tx.execute(query).scalars())


def bodies(tx: sa.Connection, claim: Claim, indexes: Sequence[int]) -> list[tuple[int, str, str]]:
    """(row_index, custom_id, body) of the named rows of a shard; they come in order."""
    within = rows.c.row_index.between(indexes[0], indexes[-1])
    query = sa.select(rows.c.row_index, rows.c.custom_id, rows.c.body).where(_member(claim.job_id, claim.shard_no), within)
    wanted = frozenset(indexes)
    found = tx.execute(query.order_by(rows.c.row_index))
    return [(row_index, custom_id, body) for row_index, custom_id, body in found if row_index in wanted]


def seize(tx: sa.Connection, job_id: str, limit: int) -> list[Shard]:
    """End queued shards of a stopped job; the caller settles what they owe in the same transaction. The attempt fences a late holder."""
    queued = (shards.c.job_id == job_id, shards.c.status == ShardStatus.QUEUED)
    some = unlocked(tx, sa.select(shards.c.shard_no).where(*queued).limit(limit))
    statement = (
        sa.update(shards)
        .where(*queued, shards.c.shard_no.in_(some))
        .values(status=ShardStatus.DONE, attempt=shards.c.attempt + 1, owner=None, settled=shards.c.rows)
        .returning(shards)
    )
    return records(tx.execute(statement))


def queues(tx: sa.Connection) -> list[tuple[str, str]]:
    """(model, mode) of every queue that shards wait in."""
    query = sa.select(shards.c.model, shards.c.mode).where(shards.c.status == ShardStatus.QUEUED).distinct()
    return [(row.model, row.mode) for row in tx.execute(query)]


def unpublished(
    tx: sa.Connection, model: str, mode: Mode, *, at: float, older_than: float, overtaken_by: float, most_losses: int, limit: int
) -> list[Shard]:
    """Shards of one queue that need a message as of the time `at`; those of the oldest batch first.

    None was sent, or longer than `older_than` seconds before, or one that was sent `overtaken_by` seconds later has been served already:
    messages are served in the order they were sent, those of shards that were lost before all others. What was sent after `at` is not
    asked for again, however long its sender takes over the rest.
    """
    served = shards.alias()
    in_turn = (served.c.status != ShardStatus.QUEUED, served.c.attempt == 1, served.c.losses == 0)
    latest = (
        sa.select(sa.func.coalesce(sa.func.max(served.c.published_at), 0.0))
        .join(jobs, jobs.c.id == served.c.job_id)
        .where(served.c.model == model, served.c.mode == mode, jobs.c.status == JobStatus.IN_PROGRESS, *in_turn)
        .scalar_subquery()
    )
    overdue = sa.or_(shards.c.published_at < at - older_than, shards.c.published_at < latest - overtaken_by)
    stale = (*_takeable(most_losses), shards.c.published_at < at, overdue)
    query = (
        sa.select(shards)
        .join(jobs, jobs.c.id == shards.c.job_id)
        .where(shards.c.model == model, shards.c.mode == mode, *stale, jobs.c.status == JobStatus.IN_PROGRESS, jobs.c.stop.is_(None))
        .order_by(jobs.c.created_at, shards.c.job_id, shards.c.shard_no)
        .limit(limit)
    )
    return records(tx.execute(query))


def stamp_published(tx: sa.Connection, sent: Sequence[Shard]) -> None:
    """Those claimed since are left as they are: one that came back already needs a message again. So are those in somebody's hands now:
    he claims them, or stamps them himself; else they get a second message."""
    if sent:
        keys = [(shard["job_id"], shard["shard_no"], shard["attempt"]) for shard in sent]
        same = (sa.tuple_(*_KEY, shards.c.attempt).in_(keys), shards.c.status == ShardStatus.QUEUED)
        tx.execute(sa.update(shards).where(sa.tuple_(*_KEY).in_(unlocked(tx, sa.select(*_KEY).where(*same)))).values(published_at=now()))


def backlog(tx: sa.Connection, model: str) -> list[tuple[Mode, int, float]]:
    """(mode, rows still owed, seconds that the oldest has waited) of each queue of a model."""
    owed = sa.func.sum(shards.c.rows - shards.c.settled)
    waited = sa.func.max(now() - jobs.c.in_progress_at)
    query = sa.select(shards.c.mode, owed.label("owed"), waited.label("waited")).join(jobs, jobs.c.id == shards.c.job_id)
    live = (shards.c.model == model, shards.c.status == ShardStatus.QUEUED, jobs.c.status == JobStatus.IN_PROGRESS, jobs.c.stop.is_(None))
    return [(Mode(row.mode), int(row.owed), row.waited) for row in tx.execute(query.where(*live).group_by(shards.c.mode))]


def kinds(tx: sa.Connection) -> list[tuple[str, Mode, TaskType, bool, int]]:
    """(model, mode, task, whether the user named the mode, rows still owed) of every kind of queued shard."""
    named = jobs.c.named_mode.is_not(None)
    owed = sa.func.sum(shards.c.rows - shards.c.settled)
    key = (shards.c.model, shards.c.mode, shards.c.task, named)
    query = sa.select(*key, owed).join(jobs, jobs.c.id == shards.c.job_id).where(shards.c.status == ShardStatus.QUEUED).group_by(*key)
    return [(model, Mode(mode), TaskType(task), bool(hand), int(many)) for model, mode, task, hand, many in tx.execute(query)]


def redirect(tx: sa.Connection, model: str, mode: Mode, task: TaskType, *, named: bool, to: Mode, why: str, leave: int, limit: int) -> int:
    """Send queued shards of one kind to another mode, all but `leave` of each batch, and say so on their rows.

    At most `limit` of them; answers how many.
    """
    rank = sa.func.row_number().over(partition_by=shards.c.job_id, order_by=shards.c.shard_no).label("rank")
    hand = jobs.c.named_mode.is_not(None) if named else jobs.c.named_mode.is_(None)
    ranked = (
        sa.select(*_KEY, rank)
        .join(jobs, jobs.c.id == shards.c.job_id)
        .where(shards.c.model == model, shards.c.mode == mode, shards.c.task == task, shards.c.status == ShardStatus.QUEUED, hand)
        .subquery()
    )
    chosen = sa.select(ranked.c.job_id, ranked.c.shard_no).where(ranked.c.rank > leave)
    free = unlocked(tx, sa.select(*_KEY).where(sa.tuple_(*_KEY).in_(chosen), shards.c.status == ShardStatus.QUEUED).limit(limit))
    statement = sa.update(shards).where(sa.tuple_(*_KEY).in_(free)).values(mode=to, published_at=0.0).returning(*_KEY)
    moved = [tuple(key) for key in tx.execute(statement)]
    if moved:
        theirs = sa.tuple_(rows.c.job_id, rows.c.shard_no).in_(moved)
        tx.execute(sa.update(rows).where(theirs).values(mode=to, reason=why))
    return len(moved)


def _takeable(most_losses: int) -> tuple[sa.ColumnElement[bool], ...]:
    """A suspect is not to be had before it is split; a row that stands alone is, until it was lost too often."""
    stands_alone = sa.and_(shards.c.rows - shards.c.settled == 1, shards.c.losses < most_losses)
    innocent = sa.or_(shards.c.losses < SUSPECT_LOSSES, stands_alone)
    return shards.c.status == ShardStatus.QUEUED, shards.c.not_before <= now(), innocent


def _unlocked(tx: sa.Connection, query: sa.Select[Any]) -> sa.Select[Any]:
    """Pass over rows that another transaction holds: two reconcilers then share the work instead of waiting crosswise."""
    return query.with_for_update(skip_locked=True) if tx.dialect.name == "postgresql" else query


def _is(job_id: str, shard_no: int) -> sa.ColumnElement[bool]:
    return sa.and_(shards.c.job_id == job_id, shards.c.shard_no == shard_no)


def _member(job_id: str, shard_no: int) -> sa.ColumnElement[bool]:
    return sa.and_(rows.c.job_id == job_id, rows.c.shard_no == shard_no)


def _held(claim: Claim) -> sa.ColumnElement[bool]:
    return sa.and_(_is(claim.job_id, claim.shard_no), shards.c.attempt == claim.attempt, shards.c.status == ShardStatus.RUNNING)
