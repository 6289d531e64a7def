"""The batch machine in SQL. Each transition is one guarded UPDATE; it answers whether it happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from specbatch.database import Record, now, record, records, unlocked
from specbatch.domain import JOB_TRANSITIONS, TERMINAL, JobStatus, Mode, Outcome, TaskType
from specbatch.models import jobs

Job = Record
_LIVE = [status for status in JobStatus if status not in TERMINAL]
_STOPPABLE = [JobStatus.VALIDATING, JobStatus.IN_PROGRESS, JobStatus.CANCELLING]


def add(
    tx: sa.Connection,
    job_id: str,
    *,
    endpoint: str,
    input_file_id: str,
    completion_window: str,
    window_seconds: float,
    metadata: Mapping[str, str] | None,
    output_expires_seconds: int | None,
    task: TaskType | None,
    mode: Mode | None,
    on_invalid: str = "fail",
    idempotency: tuple[str, str] | None = None,
    webhook_url: str | None = None,
    run_key: str | None = None,
    model: str | None = None,
) -> Job:
    """A new job. `model` is the one that shared names (`default`) shall mean in it, where that is known before validation.
    `idempotency` is its key and the digest of its parameters; a key that another job has raises IntegrityError."""
    values: dict[str, Any] = {
        "id": job_id,
        "endpoint": endpoint,
        "status": JobStatus.VALIDATING,
        "input_file_id": input_file_id,
        "completion_window": completion_window,
        "metadata": dict(metadata) if metadata is not None else sa.null(),
        "errors": sa.null(),
        "output_expires_seconds": output_expires_seconds,
        "named_task": task,
        "named_mode": mode,
        "on_invalid": on_invalid,
        "idempotency_key": idempotency[0] if idempotency else None,
        "idempotency_digest": idempotency[1] if idempotency else None,
        "webhook_url": webhook_url,
        "run_key": run_key,
        "model": model,
        "created_at": now(),
        "expires_at": now() + window_seconds,
    }
    return tx.execute(sa.insert(jobs).values(values).returning(jobs)).one()._asdict()


def get(tx: sa.Connection, job_id: str) -> Job | None:
    return record(tx.execute(sa.select(jobs).where(jobs.c.id == job_id)))


def by_idempotency_key(tx: sa.Connection, key: str) -> Job | None:
    return record(tx.execute(sa.select(jobs).where(jobs.c.idempotency_key == key)))


def owing_run(tx: sa.Connection, run_key: str) -> Job | None:
    """The newest job of a `specbatch run` whose output was not delivered yet."""
    query = sa.select(jobs).where(jobs.c.run_key == run_key).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(1)
    return record(tx.execute(query))


def forget_run(tx: sa.Connection, job_id: str) -> None:
    tx.execute(sa.update(jobs).where(jobs.c.id == job_id).values(run_key=None))


def page(tx: sa.Connection, after: Job | None, limit: int) -> list[Job]:
    """Newest first, at most `limit`, from the job behind `after`."""
    query = sa.select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit)
    if after is not None:
        query = query.where(sa.tuple_(jobs.c.created_at, jobs.c.id) < sa.tuple_(after["created_at"], after["id"]))
    return records(tx.execute(query))


def move(tx: sa.Connection, job_id: str, to: JobStatus, values: Mapping[str, Any] | None = None) -> bool:
    """Move a job along a legal transition and stamp the time. False when the job is not in a state that leads there."""
    before = [status for status, following in JOB_TRANSITIONS.items() if to in following]
    new: dict[str, Any] = {"status": to, f"{to}_at": now(), **(values or {})}
    return tx.execute(sa.update(jobs).where(jobs.c.id == job_id, jobs.c.status.in_(before)).values(new)).rowcount == 1


def lease_next(tx: sa.Connection, owner: str, seconds: float, work: sa.ColumnElement[bool]) -> Job | None:
    """Take the oldest job that `work` selects and nobody holds."""
    free = unlocked(tx, sa.select(jobs.c.id).where(work, jobs.c.lease_until < now()).order_by(jobs.c.created_at, jobs.c.id).limit(1))
    statement = (
        sa.update(jobs)
        .where(jobs.c.id == free.scalar_subquery(), jobs.c.lease_until < now())  # IN may ask again for each row, and lease several
        .values(attempt=jobs.c.attempt + 1, owner=owner, lease_until=now() + seconds)
        .returning(jobs)
    )
    return record(tx.execute(statement))


def held(job: Job) -> sa.ColumnElement[bool]:
    """The fence of a leased job: true while no newer attempt has taken it, and its holder has not let go."""
    return sa.and_(jobs.c.id == job["id"], jobs.c.attempt == job["attempt"], jobs.c.owner == job["owner"])


def renew(tx: sa.Connection, job: Job, seconds: float) -> bool:
    """Prolong a lease, and lock the job's row until the transaction ends.

    False when a newer attempt holds the job: then nothing more may be written for it.
    """
    return tx.execute(sa.update(jobs).where(held(job)).values(lease_until=now() + seconds)).rowcount == 1


def validated(tx: sa.Connection, job: Job, *, model: str | None, rows: int) -> None:
    """The rows are complete. A job that was cancelled meanwhile stays `cancelling`: its rows are settled as cancelled."""
    tx.execute(sa.update(jobs).where(held(job)).values(validated_at=now(), model=model, rows=rows, owner=None))
    move(tx, job["id"], JobStatus.IN_PROGRESS)


def invalid(tx: sa.Connection, job: Job, errors: Mapping[str, Any]) -> None:
    """The lines are at fault. A job that was cancelled meanwhile ends as cancelled, with the errors."""
    tx.execute(sa.update(jobs).where(held(job)).values(validated_at=now(), errors=errors, owner=None))
    if not move(tx, job["id"], JobStatus.FAILED):
        move(tx, job["id"], JobStatus.CANCELLED)


def stop(tx: sa.Connection, job_id: str, why: Outcome) -> bool:
    """Ask that a job end early. Rows in flight are settled by their workers, the others by `shards.close`."""
    return (
        tx.execute(
            sa.update(jobs).where(jobs.c.id == job_id, jobs.c.status.in_(_STOPPABLE), jobs.c.stop.is_(None)).values(stop=why)
        ).rowcount
        == 1
    )


def overdue(tx: sa.Connection) -> list[str]:
    """Jobs past their window that still have rows to settle."""
    late = (jobs.c.status.in_([JobStatus.VALIDATING, JobStatus.IN_PROGRESS]), jobs.c.stop.is_(None), jobs.c.expires_at < now())
    return list(tx.execute(sa.select(jobs.c.id).where(*late)).scalars())


def stopped(tx: sa.Connection) -> list[Job]:
    """Jobs that were asked to end and still have rows to settle."""
    owing = (jobs.c.stop.is_not(None), jobs.c.validated_at.is_not(None), jobs.c.status.in_(_LIVE), jobs.c.settled < jobs.c.rows)
    return records(tx.execute(sa.select(jobs).where(*owing)))


def to_validate() -> sa.ColumnElement[bool]:
    """A job stopped before its rows are known is validated all the same: each of its lines gets an ending."""
    return sa.and_(jobs.c.status.in_([JobStatus.VALIDATING, JobStatus.CANCELLING]), jobs.c.validated_at.is_(None))


def to_finalize() -> sa.ColumnElement[bool]:
    ended = jobs.c.status.in_([JobStatus.FINALIZING, JobStatus.CANCELLING])
    return sa.and_(ended, jobs.c.validated_at.is_not(None), jobs.c.settled >= jobs.c.rows)


def add_settled(tx: sa.Connection, job_id: str, totals: Mapping[str, int], peak_memory_bytes: int | None) -> tuple[int, Outcome | None]:
    """Count settled rows into their job: how many it now has, and why it shall stop, if it shall.

    The job that has no more rows to settle becomes `finalizing` in the same statement.
    """
    after = jobs.c.settled + totals["settled"]
    complete = sa.and_(jobs.c.status == JobStatus.IN_PROGRESS, after >= jobs.c.rows)
    peak = sa.func.coalesce(jobs.c.peak_memory_bytes, 0)
    values: dict[str, Any] = {name: jobs.c[name] + amount for name, amount in totals.items()}
    values |= {
        "status": sa.case((complete, JobStatus.FINALIZING.value), else_=jobs.c.status),
        "finalizing_at": sa.case((complete, now()), else_=jobs.c.finalizing_at),
        "last_settle_at": now(),
    }
    if peak_memory_bytes is not None:
        values["peak_memory_bytes"] = sa.case((peak < peak_memory_bytes, peak_memory_bytes), else_=peak)
    counted = tx.execute(sa.update(jobs).where(jobs.c.id == job_id).values(values).returning(jobs.c.settled, jobs.c.stop)).one()
    return counted.settled, None if counted.stop is None else Outcome(counted.stop)


def stamp_first_claim(tx: sa.Connection, job_id: str) -> None:
    tx.execute(sa.update(jobs).where(jobs.c.id == job_id, jobs.c.first_claim_at.is_(None)).values(first_claim_at=now()))
