"""The commands by name."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Annotated, Any

import typer

from specbatch.cli import check, database, doctor, generate, insight, jobs, run, serve, tune, verify
from specbatch.cli.flags import SHARED, flag

app = typer.Typer(
    help="Answer files of LLM requests with vLLM and speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(version("specbatch"))
        raise typer.Exit


def _settings_before_the_command(context: typer.Context, asked: bool, **flags: Any) -> None:
    context.obj = {name: value for name, value in flags.items() if value is not None}


_parameters = [
    inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
    inspect.Parameter(
        "asked",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")],
    ),
    *map(flag, SHARED),
]
_settings_before_the_command.__signature__ = inspect.Signature(_parameters)  # type: ignore[attr-defined]
_settings_before_the_command.__annotations__ = {each.name: each.annotation for each in _parameters}
app.callback()(_settings_before_the_command)

for command in (
    run.run,
    generate.generate,
    serve.up,
    jobs.submit,
    jobs.status,
    jobs.results,
    jobs.cancel,
    jobs.retry,
    jobs.jobs,
    insight.plan,
    insight.stats,
):
    app.command()(command)
for command in (tune.tune, tune.bench):
    app.command(rich_help_panel="Speed on this machine")(command)
for command in (check.check, verify.verify):
    app.command(rich_help_panel="Proof")(command)
for command in (serve.worker, serve.reconciler, serve.api):
    app.command(rich_help_panel="Parts of a deployment")(command)
app.add_typer(database.app, name="db", rich_help_panel="Parts of a deployment")
app.command(rich_help_panel="Parts of a deployment")(doctor.doctor)
