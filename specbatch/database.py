"""A database by its URL: short transactions, its own clock, and the same upsert on PostgreSQL and SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from specbatch.errors import ServiceUnavailable

if TYPE_CHECKING:
    import psycopg

BUSY_SECONDS = 30
FROZEN_SECONDS = 10  # a process that stops in the middle of a transaction gives its locks up: the whole batch would wait for it

READ_ONLY = "25006"  # PostgreSQL's SQLSTATE of a write to a standby: the primary is being replaced


class now(FunctionElement[float]):
    """Seconds since the epoch by the database's clock: the one clock that workers on machines with wrong clocks agree on."""

    type = sa.Double()
    inherit_cache = True


@compiles(now, "postgresql")
def _now_on_postgresql(*_: Any, **__: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


@compiles(now, "sqlite")
def _now_on_sqlite(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"  # unixepoch('subsec') needs SQLite 3.42


def moment(tx: sa.Connection) -> float:
    """The time now, for rows that are written as plain values."""
    return tx.execute(sa.select(now())).scalar_one()


Record = dict[str, Any]


def records(found: sa.Result[Any]) -> list[Record]:
    """Rows by column name."""
    return [row._asdict() for row in found]


def record(found: sa.Result[Any]) -> Record | None:
    """The only row, or None where there is none."""
    row = found.one_or_none()
    return None if row is None else row._asdict()


def unlocked(tx: sa.Connection, query: sa.Select[Any]) -> sa.Select[Any]:
    """Pass over rows that another transaction holds. Who writes several rows of a table that others write too picks them so: two that
    wait for each other's rows are a deadlock."""
    return query.with_for_update(skip_locked=True) if tx.dialect.name == "postgresql" else query  # SQLite has one writer at a time


class Database:
    """Raises ServiceUnavailable from both kinds of transaction when the database does not answer."""

    def __init__(self, url: str) -> None:
        self.url = sa.make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            self._engine = sa.create_engine(self.url, connect_args={"timeout": BUSY_SECONDS})
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
        else:
            self._engine = sa.create_engine(
                self.url, pool_pre_ping=True, pool_size=10, max_overflow=20, connect_args={"connect_timeout": 5}
            )
            event.listen(self._engine, "connect", _prepare_postgresql)
            event.listen(self._engine, "do_execute", _copy)
        self._reader = self._engine.execution_options(begin="DEFERRED")

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One transaction. On SQLite it takes the write lock at once, so that two writers queue instead of failing half-way."""
        with _translated(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        with _translated(), self._reader.begin() as connection:
            yield connection

    def insert(self, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
        """An INSERT that knows ON CONFLICT."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    def close(self) -> None:
        self._engine.dispose()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError) as failure:
        raise ServiceUnavailable(
            f"the database does not answer as it should: {failure.orig}; it is tried again", code="database_unavailable"
        ) from failure
    except PoolTimeout as failure:
        raise ServiceUnavailable(
            "the database is slow: every connection to it is in use; it is tried again", code="database_unavailable"
        ) from failure
    except DBAPIError as failure:
        if getattr(failure.orig, "sqlstate", None) == READ_ONLY:
            raise ServiceUnavailable("the database takes no writes now; it is tried again", code="database_unavailable") from failure
        if failure.connection_invalidated:
            raise ServiceUnavailable(f"the connection to the database was lost: {failure.orig}", code="database_unavailable") from failure
        raise


def _prepare_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves: the driver's own would always be DEFERRED
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_SECONDS * 1000}", "cache_size=-32000"):
        connection.execute(f"PRAGMA {pragma}")


def _prepare_postgresql(connection: psycopg.Connection[Any], _: object) -> None:
    connection.autocommit = True
    connection.execute(f"SET idle_in_transaction_session_timeout = '{FROZEN_SECONDS}s'")
    connection.autocommit = False


def _copy(cursor: psycopg.Cursor[Any], statement: str, parameters: Any, _: object) -> bool:
    """COPY as a statement among others, its rows as the one parameter: its errors are then translated as theirs are."""
    if not statement.startswith("COPY "):
        return False
    with cursor.copy(statement) as copy:
        for row in parameters[0]:
            copy.write_row(row)
    return True


def _begin_sqlite(connection: sa.Connection) -> None:
    connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('begin', 'IMMEDIATE')}")
