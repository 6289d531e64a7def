"""`db upgrade`."""

from __future__ import annotations

import sqlalchemy as sa
import typer

from specbatch import embedded, migration
from specbatch.cli import render
from specbatch.cli.flags import Call, configured

app = typer.Typer(help="The database's tables.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """The database's tables."""


@app.command()
@configured()
def upgrade(call: Call) -> None:
    """Bring the database to this release's tables. Safe to repeat, and to run from several places at once."""
    if call.settings.database_url is None:
        embedded.prepare(call.settings)
    migration.upgrade_database(call.settings)
    url = sa.make_url(call.settings.sql_url).render_as_string()
    if call.json:
        render.document({"database_url": url, "upgraded": True})
    else:
        render.say(f"{url} is up to date")
