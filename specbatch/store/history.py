"""What modes achieved lately, by task type: the latest rows of each, whatever job they belonged to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from specbatch.domain import Mode, TaskType
from specbatch.models import measurements
from specbatch.policy import Window

LATEST_ROWS = 256


def windows(tx: sa.Connection, model: str, modes: Iterable[Mode], loads: Mapping[TaskType, int]) -> dict[tuple[Mode, TaskType], Window]:
    """The latest rows of each mode and of these tasks. Speed is taken from those that ran beside half to twice their task's load."""
    return {(mode, task): window(tx, model, mode, task, load) for mode in modes for task, load in loads.items()}


def window(tx: sa.Connection, model: str, mode: Mode, task: TaskType, load: int) -> Window:
    """Tokens a second are the engine's at `load`: so many requests, whose tokens took TPOT seconds each.

    All tokens over all seconds: a mean of speeds would flatter a mode that is fast on some rows and slow on others.
    """
    latest = (
        sa.select(measurements)
        .where(measurements.c.model == model, measurements.c.mode == mode, measurements.c.task == task)
        .order_by(measurements.c.measured_at.desc())
        .limit(LATEST_ROWS)
        .subquery()
    )
    alike = sa.and_(latest.c.load * 2 >= load, latest.c.load <= load * 2, latest.c.tpot_seconds > 0)
    tokens = sa.func.sum(sa.case((alike, sa.cast(latest.c.generated_tokens, sa.Double))))
    seconds = sa.func.sum(sa.case((alike, latest.c.generated_tokens * latest.c.tpot_seconds)))
    speed = load * tokens / sa.func.nullif(seconds, 0.0)
    found = tx.execute(sa.select(sa.func.count(), sa.func.sum(latest.c.drafted_tokens), sa.func.sum(latest.c.accepted_tokens), speed)).one()
    return Window(found[0], int(found[1] or 0), int(found[2] or 0), found[3])
