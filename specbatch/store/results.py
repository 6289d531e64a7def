"""Outcomes and measurements of rows. Written once each, under the fence of their shard; read in settling order or in input order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from specbatch.database import Database, Record, now, records
from specbatch.domain import Claim, Outcome, RowResult
from specbatch.models import measurements, results, rows


def add(tx: sa.Connection, job_id: str, attempt: int, settled_before: int, batch: Sequence[RowResult]) -> None:
    """Insert outcomes, numbered from `settled_before` + 1. The fence allows no second outcome of a row; the primary key refuses it."""
    values = [
        {
            "job_id": job_id,
            "row_index": result.row_index,
            "sequence": sequence,
            "attempt": attempt,
            "outcome": result.outcome.value,
            "status_code": result.status_code,
            "body": None if result.body is None else json.dumps(result.body, allow_nan=False, separators=(",", ":")),
            "error_code": result.error[0] if result.error else None,
            "error_message": result.error[1] if result.error else None,
        }
        for sequence, result in enumerate(batch, start=settled_before + 1)
    ]
    if values:
        tx.execute(sa.insert(results).values(settled_at=now()), values)


def unwritten(tx: sa.Connection, job_id: str, batch: Sequence[RowResult]) -> Sequence[RowResult]:
    """Those of a batch that have no outcome yet. All of them, unless a commit succeeded whose answer was lost, and is tried again."""
    indexes = [result.row_index for result in batch]
    query = sa.select(results.c.row_index).where(results.c.job_id == job_id, results.c.row_index.in_(indexes))
    written = set(tx.execute(query).scalars())
    return [result for result in batch if result.row_index not in written] if written else batch


def measure(tx: sa.Connection, claim: Claim, model: str, batch: Sequence[RowResult]) -> None:
    values: list[dict[str, Any]] = []
    for result in batch:
        if (cost := result.measurement) is not None:
            values.append(
                {
                    "job_id": claim.job_id,
                    "row_index": result.row_index,
                    "model": model,
                    "mode": claim.mode,
                    "task": claim.task,
                    "prompt_tokens": cost.prompt_tokens,
                    "cached_tokens": cost.cached_tokens,
                    "generated_tokens": cost.generated_tokens,
                    "finish_reason": cost.finish_reason,
                    "load": cost.load,
                    "queue_seconds": cost.queue_seconds,
                    "ttft_seconds": cost.ttft_seconds,
                    "tpot_seconds": cost.tpot_seconds,
                    "drafted_tokens": cost.drafted_tokens,
                    "accepted_tokens": cost.accepted_tokens,
                    "mean_acceptance_length": cost.mean_acceptance_length,
                    "steps_by_accepted": cost.steps_by_accepted and list(cost.steps_by_accepted),
                }
            )
    if values:
        tx.execute(sa.insert(measurements).values(measured_at=now()), values)


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


def in_input_order(database: Database, job_id: str, *, succeeded: bool, size: int = 500) -> Iterator[Record]:
    """A job's successes, or its other outcomes, by row_index, `size` at a time, each page in a transaction of its own: constant memory."""
    kind = results.c.outcome == Outcome.SUCCEEDED if succeeded else results.c.outcome != Outcome.SUCCEEDED
    query = (
        sa.select(rows.c.custom_id, results)
        .join(rows, sa.and_(results.c.job_id == rows.c.job_id, results.c.row_index == rows.c.row_index))
        .where(results.c.job_id == job_id, kind)
        .order_by(results.c.row_index)
        .limit(size)
    )
    after = -1
    while True:
        with database.read() as tx:
            page = records(tx.execute(query.where(results.c.row_index > after)))
        yield from page
        if len(page) < size:
            return
        after = page[-1]["row_index"]


def since(tx: sa.Connection, job_id: str, sequence: int, limit: int) -> list[Record]:
    """Outcomes with their measurements in the order they were settled, from the one after `sequence`."""
    cost = [column for column in measurements.c if column.name not in {"job_id", "row_index", "task"}]
    query = (
        sa.select(rows.c.custom_id, rows.c.task, rows.c.reason, rows.c.mode.label("decided_mode"), results, *cost)
        .join(rows, sa.and_(rows.c.job_id == results.c.job_id, rows.c.row_index == results.c.row_index))
        .outerjoin(measurements, sa.and_(measurements.c.job_id == results.c.job_id, measurements.c.row_index == results.c.row_index))
    )
    page = query.where(results.c.job_id == job_id, results.c.sequence > sequence).order_by(results.c.sequence).limit(limit)
    return records(tx.execute(page))
