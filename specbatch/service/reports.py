"""What a batch cost, out of SQL: speed, latency, and how much of what was drafted the model accepted."""

from __future__ import annotations

import sqlalchemy as sa
from pydantic import BaseModel, Field

from specbatch.context import Context
from specbatch.domain import Mode, TaskType
from specbatch.errors import NotFound
from specbatch.service.plan import Group
from specbatch.store import jobs, report, rows, workers
from specbatch.wire import BatchObject

ALIVE_SECONDS = 12.0  # a worker gives a sign every 5 s


class Quantiles(BaseModel):
    """Seconds, by nearest rank; null where no row was measured."""

    p50: float | None
    p95: float | None


class ModeReport(BaseModel):
    mode: Mode
    rows: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None = Field(description="Accepted over drafted tokens; null where nothing was drafted.")
    mean_acceptance_length: float | None = Field(description="Tokens for each step of the target, averaged over rows.")


class Report(BaseModel):
    batch: BatchObject
    ttft: Quantiles
    tpot: Quantiles
    modes: list[ModeReport]
    decisions: list[Group]


def of_batch(ctx: Context, job_id: str) -> Report:
    """Raises NotFound."""
    with ctx.database.read() as tx:
        job = jobs.get(tx, job_id)
        if job is None:
            raise NotFound(f"No batch found with id '{job_id}'.", param="id")
        ttft, tpot = (_quantiles(tx, job_id, name) for name in ("ttft_seconds", "tpot_seconds"))
        modes = [_mode(row) for row in report.by_mode(tx, job_id)]
        return Report(batch=BatchObject.of(job), ttft=ttft, tpot=tpot, modes=modes, decisions=_groups(tx, job_id))


def decisions(ctx: Context, job_id: str) -> list[Group]:
    """What was decided for a batch's rows, the largest group first."""
    with ctx.database.read() as tx:
        return _groups(tx, job_id)


def engines_alive(ctx: Context) -> set[tuple[str, Mode]]:
    """(model, mode) of every engine that a worker runs now."""
    with ctx.database.read() as tx:
        return {(each["model"], Mode(each["mode"])) for each in workers.alive(tx, ALIVE_SECONDS) if each["mode"]}


def _groups(tx: sa.Connection, job_id: str) -> list[Group]:
    return [Group(task=TaskType(task), mode=Mode(mode), reason=why, rows=count) for task, mode, why, count in rows.decisions(tx, job_id)]


def _quantiles(tx: sa.Connection, job_id: str, name: str) -> Quantiles:
    return Quantiles(p50=report.quantile(tx, job_id, name, 0.5), p95=report.quantile(tx, job_id, name, 0.95))


def _mode(row: sa.RowMapping) -> ModeReport:
    drafted, accepted = row["drafted_tokens"], row["accepted_tokens"]
    return ModeReport(**row, acceptance_rate=round(accepted / drafted, 4) if drafted else None)
