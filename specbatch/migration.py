"""Brings a database to this release's tables, and refuses to work on one that is not there yet."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from filelock import FileLock
from sqlalchemy.exc import DBAPIError

from specbatch.errors import ServiceUnavailable
from specbatch.settings import Settings

LOCK_KEY = 0x73706563  # "spec": the advisory lock that upgrades of one PostgreSQL database queue for
WAIT_SECONDS = 60


def upgrade_database(settings: Settings) -> None:
    """Migrate to the newest revision, in one transaction. Safe when several processes do it at once: they queue, and the later find
    nothing left to do. Raises ServiceUnavailable when the database does not answer, or belongs to a newer release."""
    config = _config()
    with transaction(settings) as connection:
        _refuse_newer(connection, ScriptDirectory.from_config(config))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def check_database(settings: Settings) -> None:
    """Raises ServiceUnavailable, with what to run, unless the database answers and stands at this release's revision."""
    url = sa.make_url(settings.sql_url)
    if url.get_backend_name() == "sqlite" and url.database and not Path(url.database).exists():
        raise ServiceUnavailable(f"there is no database at {url.database}: run `specbatch db upgrade`", code="database_not_migrated")
    script = ScriptDirectory.from_config(_config())
    with _translated(url), _engine(url, begin="DEFERRED").connect() as connection:  # only looks: it waits for no writer
        _refuse_newer(connection, script)
        current = set(MigrationContext.configure(connection).get_current_heads())
    if current != set(script.get_heads()):
        state = f"at revision {', '.join(sorted(current))}" if current else "without specbatch's tables"
        wanted = ", ".join(script.get_heads())
        raise ServiceUnavailable(
            f"the database {url.render_as_string()} is {state}, and this release needs {wanted}: run `specbatch db upgrade`",
            code="database_not_migrated",
        )


@contextmanager
def transaction(settings: Settings) -> Iterator[sa.Connection]:
    """A transaction in which this process alone migrates this database. Raises ServiceUnavailable."""
    url = sa.make_url(settings.sql_url)
    with _translated(url):
        if url.get_backend_name() == "sqlite" and url.database:
            with FileLock(f"{url.database}.lock", timeout=WAIT_SECONDS), _engine(url).begin() as connection:
                yield connection
        else:
            with _engine(url).begin() as connection:
                if url.get_backend_name() == "postgresql":
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK_KEY)))
                yield connection


def _engine(url: sa.URL, begin: str = "IMMEDIATE") -> sa.Engine:
    """Without a pool, so that nothing stays open, and without SQLite's foreign keys: altering a table there drops and copies it, and
    the drop would cascade."""
    if url.get_backend_name() != "sqlite":
        return sa.create_engine(url, poolclass=sa.NullPool, connect_args={"connect_timeout": 5})
    engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args={"timeout": WAIT_SECONDS})
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(f"BEGIN {begin}"))
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # the driver would begin no transaction before DDL
    connection.execute("PRAGMA journal_mode=WAL")


def _config() -> Config:
    """The migrations inside the wheel, or those of the repository in an editable install."""
    package = Path(__file__).parent
    inside = package / "_migrations"
    config = Config()
    config.set_main_option("script_location", str(inside if inside.is_dir() else package.parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _refuse_newer(connection: sa.Connection, script: ScriptDirectory) -> None:
    known = {revision.revision for revision in script.walk_revisions()}
    unknown = sorted(set(MigrationContext.configure(connection).get_current_heads()) - known)
    if unknown:
        raise ServiceUnavailable(
            f"the database is at revision {', '.join(unknown)}, which this release does not know: upgrade specbatch here",
            code="database_newer",
        )


@contextmanager
def _translated(url: sa.URL) -> Iterator[None]:
    try:
        yield
    except DBAPIError as failure:
        raise ServiceUnavailable(
            f"the database {url.render_as_string()} does not answer: {str(failure.orig).strip()}. "
            "Start it, or correct SPECBATCH_DATABASE_URL, and try again",
            code="database_unavailable",
        ) from failure
