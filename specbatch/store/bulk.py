"""Many rows in one statement: COPY on PostgreSQL, one INSERT of many VALUES on SQLite.

Drivers give up the interpreter's lock at every statement, and a thread beside a busy engine loop waits milliseconds to have it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import sqlalchemy as sa

MOST_VARIABLES = 32_766  # of one statement in SQLite


def insert(tx: sa.Connection, table: sa.Table, columns: Sequence[str], values: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows as they are: neither types nor defaults of the table are applied."""
    names = ", ".join(columns)
    if tx.dialect.name == "postgresql":
        if values:
            tx.exec_driver_sql(f"COPY {table.name} ({names}) FROM STDIN", (values,))
        return
    most = MOST_VARIABLES // len(columns)
    for start in range(0, len(values), most):
        some = values[start : start + most]
        tx.exec_driver_sql(_insert(table.name, names, len(columns), len(some)), tuple(chain.from_iterable(some)))


@lru_cache(maxsize=512)
def _insert(table: str, names: str, width: int, many: int) -> str:
    one = f"({', '.join('?' * width)})"
    return f"INSERT INTO {table} ({names}) VALUES {', '.join([one] * many)}"
