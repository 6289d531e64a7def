"""What a job's measurements say, computed by the database: counts by mode, and quantiles by rank."""

from __future__ import annotations

import math

import sqlalchemy as sa

from specbatch.models import measurements


def by_mode(tx: sa.Connection, job_id: str) -> list[sa.RowMapping]:
    """(mode, rows, generated_tokens, drafted_tokens, accepted_tokens, mean_acceptance_length), the largest group first."""
    sums = [sa.func.sum(measurements.c[name]).label(name) for name in ("generated_tokens", "drafted_tokens", "accepted_tokens")]
    length = sa.func.avg(measurements.c.mean_acceptance_length).label("mean_acceptance_length")
    query = sa.select(measurements.c.mode, sa.func.count().label("rows"), *sums, length).where(measurements.c.job_id == job_id)
    return list(tx.execute(query.group_by(measurements.c.mode).order_by(sa.func.count().desc())).mappings())


def quantile(tx: sa.Connection, job_id: str, name: str, share: float) -> float | None:
    """The nearest-rank quantile of a column in seconds: the smallest value that at least `share` of the values do not exceed.

    SQLite has no percentile function; a sort and an offset are the same statement on both databases.
    """
    column = measurements.c[name]
    known = (measurements.c.job_id == job_id, column.is_not(None))
    count = tx.execute(sa.select(sa.func.count()).where(*known)).scalar_one()
    if count == 0:
        return None
    rank = math.ceil(share * count) - 1
    return float(tx.execute(sa.select(column).where(*known).order_by(column).limit(1).offset(rank)).scalar_one())
