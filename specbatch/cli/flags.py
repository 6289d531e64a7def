"""Flags that become settings: every setting has one, named and described in settings.py, and checked there."""

from __future__ import annotations

import errno
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from specbatch.cli import render
from specbatch.errors import ServiceUnavailable, SpecbatchError, UsageError
from specbatch.settings import Settings, load

SHARED = ("data_dir", "database_url", "redis_url", "log_level")
SERVER = ("host", "port", "max_file_bytes", "max_batch_rows", "max_line_bytes")
WORK = ("shard_rows", "shards_in_flight", "lease_seconds", "max_attempts", "sweep_seconds", "stop_seconds", "scripted_delay_ms")
ENGINE = tuple(name for name in Settings.model_fields if name not in SHARED + SERVER + WORK)
PANELS = dict.fromkeys(ENGINE, "Engine") | dict.fromkeys(SERVER, "Server and limits") | dict.fromkeys(WORK, "Work")


@dataclass(frozen=True, slots=True)
class Call:
    """What every command gets beside its own arguments."""

    settings: Settings
    json: bool
    given: frozenset[str]  # the settings that came as flags


def configured(*groups: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose first parameter is a Call: it gains --json and a flag for each setting of SHARED and `groups`.

    An error of ours becomes one line on stderr (with --json also a document on stdout) and its exit code.
    """
    names = [*SHARED, *(name for group in groups for name in group)]

    def make(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        @functools.wraps(function)
        def command(context: typer.Context, as_json: bool, **arguments: Any) -> None:
            flags: dict[str, Any] = dict(context.obj or {})
            flags |= {name: value for name in names if (value := arguments.pop(name)) is not None}
            with _errors_said(as_json):
                function(Call(load(**flags), as_json, frozenset(flags)), **arguments)

        parameters = [
            _keyword("context", typer.Context, inspect.Parameter.empty),
            *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own),
            _keyword("as_json", Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")], False),
            *map(flag, names),
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return make


def flag(name: str) -> inspect.Parameter:
    """A setting as an option that stays None, and leaves the setting alone, unless it is given."""
    field = Settings.model_fields[name]
    words = name.replace("_", "-")
    shown = f"{(field.description or '').rstrip('.')} (SPECBATCH_{name.upper()})".strip()
    panel = PANELS.get(name, "Services")
    if field.annotation is bool:
        return _keyword(name, Annotated[bool | None, typer.Option(f"--{words}/--no-{words}", help=shown, rich_help_panel=panel)], None)
    option = typer.Option(f"--{words}", help=shown, rich_help_panel=panel, metavar=words.split("-")[-1].upper())
    return _keyword(name, Annotated[str | None, option], None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextmanager
def _errors_said(as_json: bool) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output left: typer ends quietly
    except (SpecbatchError, OSError) as failure:
        error = failure if isinstance(failure, SpecbatchError) else _of_the_system(failure)
        render.fail(error, as_json=as_json)
        raise typer.Exit(error.exit_code) from failure


def _of_the_system(failure: OSError) -> SpecbatchError:
    where = f": {failure.filename}" if failure.filename else ""
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return ServiceUnavailable(f"no room left on the disk{where}: free some and try again", code="disk_full")
    return UsageError(f"{failure.strerror or failure}{where}")
