"""Outcomes and measurements of rows. Written once each, under the fence of their shard; read in settling order or in input order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from specbatch.database import Database, Record, now, records
from specbatch.domain import Claim, Outcome, RowResult
from specbatch.lines import storable
from specbatch.models import measurements, results, rows
from specbatch.store import bulk

BODIES = 16  # read at a time: each may be as large as an answer gets
_ENDINGS = (
    *("job_id", "row_index", "sequence", "attempt", "outcome"),
    *("status_code", "body", "error_code", "error_message", "settled_at"),
)
_COSTS = (
    *("job_id", "row_index", "model", "mode", "task", "prompt_tokens", "cached_tokens", "generated_tokens", "finish_reason"),
    *("load", "queue_seconds", "ttft_seconds", "tpot_seconds", "drafted_tokens", "accepted_tokens", "mean_acceptance_length"),
    *("steps_by_accepted", "measured_at"),
)
_LINE = ("status_code", "body", "error_code", "error_message")
_NO_ERROR = (None, None)


def add(tx: sa.Connection, job_id: str, attempt: int, settled_before: int, batch: Sequence[RowResult], at: float) -> None:
    """Insert outcomes, numbered from `settled_before` + 1. The fence allows no second outcome of a row; the primary key refuses it."""
    values = [
        (
            *(job_id, result.row_index, sequence, attempt, result.outcome.value),
            *(result.status_code, result.body, *(_NO_ERROR if result.error is None else map(storable, result.error)), at),
        )
        for sequence, result in enumerate(batch, start=settled_before + 1)
    ]
    bulk.insert(tx, results, _ENDINGS, values)


def unwritten(tx: sa.Connection, job_id: str, batch: Sequence[RowResult]) -> Sequence[RowResult]:
    """Those of a batch that have no outcome yet. All of them, unless a commit succeeded whose answer was lost, and is tried again."""
    indexes = [result.row_index for result in batch]
    query = sa.select(results.c.row_index).where(results.c.job_id == job_id, results.c.row_index.in_(indexes))
    written = set(tx.execute(query).scalars())
    return [result for result in batch if result.row_index not in written] if written else batch


def measure(tx: sa.Connection, claim: Claim, model: str, batch: Sequence[RowResult], at: float) -> None:
    mode, task = claim.mode.value, claim.task.value
    values = [
        (
            *(claim.job_id, result.row_index, model, mode, task),
            *(cost.prompt_tokens, cost.cached_tokens, cost.generated_tokens, cost.finish_reason),
            *(result.load, cost.queue_seconds, cost.ttft_seconds, cost.tpot_seconds),
            *(cost.drafted_tokens, cost.accepted_tokens, cost.mean_acceptance_length),
            *(json.dumps(cost.steps_by_accepted) if cost.steps_by_accepted else None, at),
        )
        for result in batch
        if (cost := result.measurement) is not None
    ]
    bulk.insert(tx, measurements, _COSTS, values)


def add_alike(
    tx: sa.Connection, job_id: str, shard_no: int, attempt: int, settled_before: int, outcome: Outcome, error: tuple[str, str]
) -> None:
    """Give every row that a shard still owes the same ending, in one statement."""
    settled = sa.exists().where(results.c.job_id == rows.c.job_id, results.c.row_index == rows.c.row_index)
    owed = sa.select(
        rows.c.job_id,
        rows.c.row_index,
        sa.literal(settled_before) + sa.func.row_number().over(order_by=rows.c.row_index),
        sa.literal(attempt),
        sa.literal(outcome.value),
        sa.literal(error[0]),
        sa.literal(error[1]),
        now(),
    ).where(rows.c.job_id == job_id, rows.c.shard_no == shard_no, ~settled)
    columns = ["job_id", "row_index", "sequence", "attempt", "outcome", "error_code", "error_message", "settled_at"]
    tx.execute(sa.insert(results).from_select(columns, owed))


def in_input_order(database: Database, job_id: str, count: int, *, succeeded: bool, size: int = 500) -> Iterator[Sequence[Any]]:
    """What `lines.dump` takes of the successes among a job's `count` rows, or of its other outcomes, by row_index.

    In constant memory: `size` indexes at a time, each page in a transaction of its own, of which BODIES answers are held. A page is a
    range in both tables: without it, a planner that has no statistics of the job yet reads all of it for every page.
    """
    kind = results.c.outcome == Outcome.SUCCEEDED if succeeded else results.c.outcome != Outcome.SUCCEEDED
    query = (
        sa.select(results.c.row_index, rows.c.custom_id, *(results.c[name] for name in _LINE))
        .join(rows, sa.and_(results.c.job_id == rows.c.job_id, results.c.row_index == rows.c.row_index))
        .where(results.c.job_id == job_id, kind)
        .order_by(results.c.row_index)
    )
    for start in range(0, count, size):
        page = (column.between(start, start + size - 1) for column in (results.c.row_index, rows.c.row_index))
        with database.read() as tx:
            yield from tx.execute(query.where(*page).execution_options(yield_per=BODIES))


def since(tx: sa.Connection, job_id: str, sequence: int, limit: int) -> list[Record]:
    """Outcomes with their measurements in the order they were settled, from the one after `sequence`."""
    cost = [column for column in measurements.c if column.name not in {"job_id", "row_index", "task"}]
    query = (
        sa.select(rows.c.custom_id, rows.c.task, rows.c.reason, rows.c.mode.label("decided_mode"), results, *cost)
        .join(rows, sa.and_(rows.c.job_id == results.c.job_id, rows.c.row_index == results.c.row_index))
        .outerjoin(measurements, sa.and_(measurements.c.job_id == results.c.job_id, measurements.c.row_index == results.c.row_index))
    )
    page = results.c.sequence.between(sequence + 1, sequence + limit)  # without gaps; a LIMIT would leave the planner free to read all
    return records(tx.execute(query.where(results.c.job_id == job_id, page).order_by(results.c.sequence)))
