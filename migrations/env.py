"""Alembic's entry. specbatch.migration hands a connection over; the alembic command takes one from the settings."""

from __future__ import annotations

import logging.config
from typing import Any

from alembic import context
from sqlalchemy import Connection

from specbatch import migration
from specbatch.models import metadata
from specbatch.settings import load

OPTIONS: dict[str, Any] = {
    "target_metadata": metadata,
    "render_as_batch": True,  # SQLite alters a table by copying it
    "compare_type": True,
    "compare_server_default": True,
}


def migrate(connection: Connection) -> None:
    context.configure(connection=connection, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


def write_sql() -> None:
    """`alembic upgrade head --sql`, for those who let a database administrator run it."""
    context.configure(url=load().sql_url, literal_binds=True, dialect_opts={"paramstyle": "named"}, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


def main() -> None:
    if context.config.config_file_name:
        logging.config.fileConfig(context.config.config_file_name, disable_existing_loggers=False)
    given = context.config.attributes.get("connection")
    if context.is_offline_mode():
        write_sql()
    elif given is not None:
        migrate(given)
    else:
        with migration.transaction(load()) as connection:
            migrate(connection)


main()
