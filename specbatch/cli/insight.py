"""Speculation explained: what a file would become, and what drafting has achieved."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from specbatch import services
from specbatch.cli import render, source
from specbatch.cli.flags import ENGINE, SERVER, Call, configured
from specbatch.cli.jobs import NamedMode, NamedTask, Requests
from specbatch.domain import Mode, TaskType
from specbatch.errors import InvalidRequest
from specbatch.service.plan import Plan
from specbatch.service.plan import plan as make_plan
from specbatch.service.speculation import Speculation, speculation


@configured(ENGINE, SERVER)
def plan(call: Call, requests: Requests, mode: NamedMode = None, task: NamedTask = None) -> None:
    """Show in which mode each row of a file would run, and why, without running it."""
    services.migrate(call.settings)
    with source.opened(requests) as given, services.database(call.settings) as ctx:
        planned = make_plan(ctx, given.path, given.endpoint(), task=task, mode=mode)
    if call.json:
        render.document(planned.model_dump(mode="json"))
    else:
        _show_plan(planned)
    if planned.problem_count and call.json:
        raise typer.Exit(InvalidRequest.exit_code)  # the document tells them
    if planned.problem_count:
        raise InvalidRequest(f"{given.name}: {planned.problem_count} problems; a batch with them would fail validation")


@configured()
def stats(
    call: Call,
    hours: Annotated[float, typer.Option(min=0.01, help="How far to look back.")] = 24.0,
    model: Annotated[str | None, typer.Option(help="Of this model only.", show_default=False)] = None,
    mode: Annotated[Mode | None, typer.Option(help="Of this mode only.", show_default=False)] = None,
    task: Annotated[TaskType | None, typer.Option(help="Of this task type only.", show_default=False)] = None,
    batch: Annotated[str | None, typer.Option(metavar="BATCH", help="Of this batch only.", show_default=False)] = None,
) -> None:
    """Show how much of what was drafted the model accepted: by model, mode and task over time, and by draft position."""
    with services.database(call.settings) as ctx:
        found = speculation(ctx, hours=hours, model=model, mode=mode, task=task, job_id=batch)
    if call.json:
        render.document(found.model_dump(mode="json"))
    else:
        _show_stats(found)


def _show_plan(planned: Plan) -> None:
    render.tables.print(render.decisions(planned.groups))
    for mode, needed in planned.memory.items():
        weights, cache = render.size(needed.weights_bytes), render.size(needed.kv_bytes_per_request)
        render.tables.print(f"memory, {mode}: {weights} of weights, and {cache} of KV cache for a request of {needed.context} tokens")
    for problem in planned.problems[: render.MOST_PROBLEMS]:
        render.say(f"line {problem.line}: {problem.message}")


def _show_stats(found: Speculation) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("since", "model", "mode", "task", "rows", "acceptance", "tokens/step", "first token", "per token", "load"):
        table.add_column(name, justify="left" if name in ("since", "model", "mode", "task") else "right", no_wrap=True)
    for point in found.points:
        table.add_row(
            render.moment(point.since),
            point.model,
            point.mode,
            point.task,
            str(point.rows),
            render.percent(point.acceptance_rate),
            render.number(point.mean_acceptance_length),
            _time(point.ttft_seconds),
            _time(point.tpot_seconds),
            f"{point.load:.0f}",
        )
    render.tables.print(table)
    if found.acceptance_by_position:
        shares = ", ".join(f"{position}: {share:.0%}" for position, share in enumerate(found.acceptance_by_position, start=1))
        render.tables.print(f"steps that accepted the draft up to position {shares}")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else render.milliseconds(seconds)
