"""`tune` and `bench`: measure the modes on this machine, for policy and for people."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from specbatch import charts, comparison, services, trial
from specbatch.agenda import TASKS
from specbatch.cli import render
from specbatch.cli.flags import ENGINE, Call, configured
from specbatch.domain import TaskType
from specbatch.errors import EngineStartError, UsageError
from specbatch.service import findings, tuning
from specbatch.tuning import BULK, LARGEST_BATCH, LOADS, Speed

ALL_TASKS = ",".join(TASKS)
TUNE_LOADS = ",".join(map(str, (*LOADS, BULK)))
BENCH_LOADS = "1,2,4,16,64"
TOO_SHORT = "the budget was too small for a single point: raise --budget"
Budget = Annotated[float, typer.Option("--budget", min=0.05, metavar="MINUTES", help="How long to measure, engine starts included.")]
Again = Annotated[bool, typer.Option("--again", help="Measure again what was measured already.")]
Tasks = Annotated[str, typer.Option("--tasks", metavar="LIST", help="Task types to measure, separated by commas.")]
Loads = Annotated[str, typer.Option("--loads", metavar="LIST", help=f"Requests at once, separated by commas; {BULK} is a bulk run.")]


@configured(ENGINE)
def tune(
    call: Call,
    budget: Budget = 30.0,
    again: Again = False,
    tasks: Tasks = ALL_TASKS,
    loads: Loads = TUNE_LOADS,
    show: Annotated[bool, typer.Option("--show", help="Only show what was measured before.")] = False,
) -> None:
    """Measure every mode on this machine: the most useful points first. The results decide in which mode rows run, and with which K."""
    chosen, at = _tasks(tasks), _loads(loads)
    services.migrate(call.settings)
    with services.database(call.settings) as ctx:
        if not show:
            _follow(tuning.tune(ctx, seconds=60 * budget, again=again, tasks=chosen, loads=at))
        found = findings.findings(ctx)
    if not found.speeds:
        raise EngineStartError(f"nothing was measured for {found.model} yet: leave out --show" if show else TOO_SHORT)
    if call.json:
        render.document(found.model_dump(mode="json"))
    else:
        _show(found)


@configured(ENGINE)
def bench(
    call: Call,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write bench.md, bench.json and bench.png there.")
    ] = None,
    budget: Budget = 30.0,
    again: Again = False,
    tasks: Tasks = ALL_TASKS,
    loads: Loads = BENCH_LOADS,
) -> None:
    """Show the modes side by side: speed, latency, acceptance and memory. What was measured before is not measured again."""
    chosen, at = _tasks(tasks), _loads(loads)
    services.migrate(call.settings)
    with services.database(call.settings) as ctx:
        _follow(tuning.tune(ctx, seconds=60 * budget, again=again, tasks=chosen, loads=at, every_k=False))
        compared = findings.comparison(ctx, chosen, at)
    if not compared.lines:
        raise EngineStartError(TOO_SHORT)
    if output is not None:
        _write(compared, output)
    if call.json:
        render.document(compared.model_dump(mode="json"))
    else:
        typer.echo(comparison.markdown(compared), nl=False)


def _follow(progress: Iterable[tuning.Progress]) -> None:
    for event in progress:
        match event:
            case tuning.Starting():
                render.say(f"{comparison.name(event.mode, event.k)}: starting an engine for {event.points} points")
            case trial.Started():
                render.say(f"started in {event.start_seconds:.0f} s")
            case Speed():
                rate = "" if event.acceptance_rate is None else f", acceptance {event.acceptance_rate:.0%}"
                speed = f"{event.tokens_per_second:,.1f} tokens/s{rate}"
                render.say(f"{comparison.name(event.mode, event.k)}: {event.task}, {event.load} at once: {speed}")
            case tuning.Failed():
                render.say(f"{comparison.name(event.mode, event.k)} was left out: {event.why}")
            case tuning.Left() if event.points:
                render.say(f"{event.points} points are left: run the command again to go on")


def _show(found: findings.Findings) -> None:
    table = Table(box=None, pad_edge=False)
    tasks = list(dict.fromkeys(task for by_task in found.crossovers.values() for task in by_task))
    for title in ("mode", *(f"{task} pays to" for task in tasks), "K by requests in a step", "start"):
        table.add_column(title, justify="left" if title in ("mode", "K by requests in a step") else "right")
    for mode, by_task in found.crossovers.items():
        steps = ", ".join(f"{first}-{'' if last >= LARGEST_BATCH else last}: {k}" for first, last, k in found.schedules.get(mode, ()))
        limits = (str(by_task.get(task, "-")) for task in tasks)
        table.add_row(mode, *limits, steps or "-", f"{found.start_seconds.get(mode, 0):.0f} s")
    render.tables.print(table)
    for fit in found.fits:
        said = "unknown" if fit.error is None else f"{fit.error:.0%} on loads left out"
        render.say(f"cost model of {fit.mode} on {fit.task}: error {said}{'' if fit.used else ', not used'}")


def _write(compared: comparison.Comparison, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.md").write_text(comparison.markdown(compared), encoding="utf-8")
    (folder / "bench.json").write_text(compared.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if charts.can_draw():
        charts.draw(compared, folder / "bench.png")
    else:
        render.say("no chart: pip install 'specbatch[bench]' for one")


def _tasks(words: str) -> list[TaskType]:
    try:
        return [TaskType(word.strip()) for word in words.split(",") if word.strip()]
    except ValueError as unknown:
        raise UsageError(f"--tasks: {unknown}; choose from {', '.join(TaskType)}") from None


def _loads(words: str) -> list[int]:
    try:
        loads = sorted({int(word) for word in words.split(",")})
    except ValueError:
        loads = []
    if not loads or loads[0] < 1:
        raise UsageError(f"--loads: write numbers from 1 up, separated by commas, for example {BENCH_LOADS}; got {words!r}")
    return loads
