"""The rows of a job as it was submitted, and the errors its validation found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from specbatch.database import Database, Record
from specbatch.domain import Outcome
from specbatch.models import results, rows
from specbatch.store import bulk

NO_SHARD = -1  # of rows that ended in validation
_COLUMNS = rows.c.keys()
_values = itemgetter(*_COLUMNS)


def add(tx: sa.Connection, batch: Sequence[Mapping[str, Any]]) -> None:
    bulk.insert(tx, rows, _COLUMNS, [_values(row) for row in batch])


def drop(tx: sa.Connection, job_id: str, limit: int) -> bool:
    """Forget the first `limit` rows that an unfinished validation wrote, and what became of them. False when there are none."""
    first = tx.execute(sa.select(sa.func.min(rows.c.row_index)).where(rows.c.job_id == job_id)).scalar_one()
    if first is None:
        return False
    for table in (results, rows):
        tx.execute(sa.delete(table).where(table.c.job_id == job_id, table.c.row_index < first + limit))
    return True


def duplicates(tx: sa.Connection, job_id: str) -> Iterator[tuple[int, str, int]]:
    """(row_index, custom_id, index of the first row with that id) of every repeated custom_id, found by the database in constant memory."""
    first = sa.func.min(rows.c.row_index)
    repeated = (
        sa.select(rows.c.custom_id, first.label("first"))
        .where(rows.c.job_id == job_id, rows.c.custom_id != "")
        .group_by(rows.c.custom_id)
        .having(sa.func.count() > 1)
    )
    twice = repeated.subquery()
    query = (
        sa.select(rows.c.row_index, rows.c.custom_id, twice.c.first)
        .join(twice, sa.and_(rows.c.job_id == job_id, rows.c.custom_id == twice.c.custom_id, rows.c.row_index != twice.c.first))
        .order_by(rows.c.row_index)
    )
    for row in tx.execute(query.execution_options(yield_per=500)):
        yield row.row_index, row.custom_id, row.first


def unsuccessful(database: Database, job_id: str, count: int, size: int = 500) -> Iterator[Record]:
    """(custom_id, body) of each of a job's `count` rows that ran and did not succeed, in input order, page by page as
    `results.in_input_order` reads."""
    query = (
        sa.select(rows.c.custom_id, rows.c.body)
        .join(results, sa.and_(results.c.job_id == rows.c.job_id, results.c.row_index == rows.c.row_index))
        .where(rows.c.job_id == job_id, rows.c.shard_no != NO_SHARD, results.c.outcome != Outcome.SUCCEEDED)
        .order_by(rows.c.row_index)
    )
    for start in range(0, count, size):
        page = (column.between(start, start + size - 1) for column in (rows.c.row_index, results.c.row_index))
        with database.read() as tx:
            for row in tx.execute(query.where(*page).execution_options(yield_per=1)):  # a page of large bodies would fill the memory
                yield row._asdict()


def let_through(tx: sa.Connection, job_id: str, indexes: Sequence[int]) -> None:
    """Take rows out of their shards: they ended in validation."""
    tx.execute(sa.update(rows).where(rows.c.job_id == job_id, rows.c.row_index.in_(indexes)).values(shard_no=NO_SHARD))


def decisions(tx: sa.Connection, job_id: str) -> list[tuple[str, str, str, int]]:
    """(task, mode, reason, rows), the largest group first."""
    query = sa.select(rows.c.task, rows.c.mode, rows.c.reason, sa.func.count()).where(rows.c.job_id == job_id, rows.c.shard_no != NO_SHARD)
    return [tuple(row) for row in tx.execute(query.group_by(rows.c.task, rows.c.mode, rows.c.reason).order_by(sa.func.count().desc()))]
