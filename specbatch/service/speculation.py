"""What speculation achieves here: the figures behind `specbatch stats` and GET /v1/speculation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pydantic import BaseModel, Field

from specbatch.context import Context
from specbatch.domain import Mode, TaskType
from specbatch.store import acceptance

MOST_BUCKETS = 100


class Point(BaseModel):
    """The rows of one (model, mode, task) that ended within one stretch of time. Times are means over rows, in seconds."""

    model: str
    mode: Mode
    task: TaskType
    since: int = Field(description="The stretch's first second, Unix time.")
    rows: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None = Field(description="Accepted over drafted tokens; null where nothing was drafted.")
    mean_acceptance_length: float | None = Field(description="Tokens for each step of the target, averaged over rows.")
    ttft_seconds: float | None
    tpot_seconds: float | None
    load: float = Field(description="Requests that ran beside a row when it ended, on average.")


class Speculation(BaseModel):
    bucket_seconds: float
    points: list[Point]
    acceptance_by_position: list[float] = Field(
        description="Of the latest rows' steps, the share that accepted the draft's first token, its first two, and so on."
    )


def speculation(
    ctx: Context,
    *,
    hours: float = 24.0,
    model: str | None = None,
    mode: Mode | None = None,
    task: TaskType | None = None,
    job_id: str | None = None,
) -> Speculation:
    """Acceptance over the last `hours`, in at most MOST_BUCKETS stretches."""
    filters = {"model": model, "mode": mode, "task": task, "job_id": job_id}
    bucket = max(60.0, hours * 3600 / MOST_BUCKETS)
    with ctx.database.read() as tx:
        rows = acceptance.by_time(tx, hours * 3600, bucket, filters)
        steps = acceptance.step_counts(tx, filters)
    points = [
        Point(
            **{name: row[name] for name in row if name != "bucket"},
            since=int(row["bucket"]),
            acceptance_rate=round(row["accepted_tokens"] / row["drafted_tokens"], 4) if row["drafted_tokens"] else None,
        )
        for row in rows
    ]
    return Speculation(bucket_seconds=bucket, points=points, acceptance_by_position=by_position(steps))


def by_position(step_counts: Sequence[Sequence[int]]) -> list[float]:
    """Element p: the share of all steps that accepted more than p drafted tokens. Rows may differ in K."""
    totals = [sum(counts) for counts in itertools.zip_longest(*step_counts, fillvalue=0)]
    steps = sum(totals)
    return [round(sum(totals[position:]) / steps, 4) for position in range(1, len(totals))] if steps else []
