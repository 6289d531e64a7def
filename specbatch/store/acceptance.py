"""How much of what was drafted the model accepted: over time by model, mode and task, and by position within a draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from specbatch.database import Record, now, records
from specbatch.models import measurements

POSITION_ROWS = 2000  # the latest rows that positions are read from


def by_time(tx: sa.Connection, seconds: float, bucket_seconds: float, filters: Mapping[str, Any]) -> list[Record]:
    """(model, mode, task, bucket, rows, tokens, ...) of the last `seconds`, a row a bucket; `bucket` is its first second."""
    bucket = (sa.func.floor(measurements.c.measured_at / bucket_seconds) * bucket_seconds).label("bucket")
    key = (measurements.c.model, measurements.c.mode, measurements.c.task, bucket)
    query = (
        sa.select(
            *key,
            sa.func.count().label("rows"),
            sa.func.sum(measurements.c.generated_tokens).label("generated_tokens"),
            sa.func.sum(measurements.c.drafted_tokens).label("drafted_tokens"),
            sa.func.sum(measurements.c.accepted_tokens).label("accepted_tokens"),
            sa.func.avg(measurements.c.mean_acceptance_length).label("mean_acceptance_length"),
            sa.func.avg(measurements.c.ttft_seconds).label("ttft_seconds"),
            sa.func.avg(measurements.c.tpot_seconds).label("tpot_seconds"),
            sa.func.avg(measurements.c.load).label("load"),
        )
        .where(measurements.c.measured_at > now() - seconds, *_matching(filters))
        .group_by(*key)
        .order_by(*key)
    )
    return records(tx.execute(query))


def step_counts(tx: sa.Connection, filters: Mapping[str, Any]) -> list[list[int]]:
    """`steps_by_accepted` of the latest rows that drafted."""
    known = (measurements.c.steps_by_accepted.is_not(None), *_matching(filters))
    query = sa.select(measurements.c.steps_by_accepted).where(*known).order_by(measurements.c.measured_at.desc()).limit(POSITION_ROWS)
    return list(tx.execute(query).scalars())


def _matching(filters: Mapping[str, Any]) -> list[sa.ColumnElement[bool]]:
    return [measurements.c[name] == value for name, value in filters.items() if value is not None]
