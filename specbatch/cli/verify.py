"""`verify`: does speculation change nothing, with this model, here?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from specbatch import embedded, lossless
from specbatch.cli import render
from specbatch.cli.flags import ENGINE, Call, configured
from specbatch.domain import Mode
from specbatch.errors import EngineStartError, UsageError
from specbatch.lossless import Case, Difference, Parameters, Progress, Report, Verdict
from specbatch.serving import offered_modes
from specbatch.settings import Settings

MOST_DIFFERENCES = 8  # shown of a mode; --json has them all


@configured(ENGINE)
def verify(
    call: Call,
    mode: Annotated[
        list[Mode] | None, typer.Option("--mode", help="Verify this mode only; may be repeated. All that can run by default.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, metavar="N", help="Prompts of each case.")] = 8,
    seeds: Annotated[int, typer.Option("--seeds", min=8, metavar="N", help="Samples of each prompt, where answers are sampled.")] = 64,
) -> None:
    """Ask plain decoding and then a speculative mode the same, and compare: token by token, and by frequency where answers are sampled.

    Exit code: 0 lossless, 1 a fault was found, 2 it could not be tried; nor could a mode that was asked for.
    """
    parameters = Parameters(modes=_modes(call.settings, mode or []), n=n, seeds=seeds)
    embedded.prepare(call.settings)
    report = None
    for event in lossless.run(parameters, call.settings.environment()):
        match event:
            case Progress():
                render.say(event.message)
            case Report():
                report = event
    if report is None:
        raise EngineStartError(f"the engines ended without a report: look into {call.settings.home / 'logs' / 'engine.log'}")
    if call.json:
        render.document(report.model_dump(mode="json"))
    else:
        show(report)
    if not report.lossless:
        raise typer.Exit(1)
    raise typer.Exit(2 if any(each.untried for each in report.modes if each.mode in (mode or ())) else 0)


def show(report: Report) -> None:
    for mode in report.modes:
        if mode.untried is not None:
            render.say(f"{mode.mode} was not tried: {mode.untried}")
            continue
        table = Table(box=None, pad_edge=False, title=f"{mode.mode} against plain decoding, {report.model}", title_justify="left")
        for name in ("case", "compared", "identical", "near-ties", "faults", "least p", "of at least", "accepted", "note"):
            table.add_column(name, justify="left" if name in ("case", "note") else "right", overflow="fold")
        for case in mode.cases:
            table.add_row(case.name, *_figures(case), case.note or "")
        render.tables.print(table)
        _explain([(case.name, difference) for case in mode.cases for difference in case.differences])
        render.say(f"{mode.mode} {'is lossless here' if mode.lossless else 'is NOT lossless here'}")
    noise = f"plain decoding itself moves log probabilities by {report.noise:.2g} with the batch"
    render.say(f"a near-tie is a gap of at most {report.tolerance:.2g}: {noise}")


def _figures(case: Case) -> tuple[str, ...]:
    drafts = "-" if case.drafted_tokens is None else f"{case.accepted_tokens} of {case.drafted_tokens}"
    probabilities = ("-" if value is None else f"{value:.2g}" for value in (case.p_value, case.threshold))
    return (
        str(case.compared),
        "-" if case.identical is None else str(case.identical),
        str(case.near_ties),
        str(case.faults),
        *probabilities,
        drafts,
    )


def _explain(found: list[tuple[str, Difference]]) -> None:
    """Faults first."""
    found.sort(key=lambda each: each[1].verdict is not Verdict.FAULT)
    for name, difference in found[:MOST_DIFFERENCES]:
        render.say(
            f"{'FAULT' if difference.verdict is Verdict.FAULT else 'near-tie'}, {name}, prompt {difference.prompt}: {difference.message}"
        )
    if len(found) > MOST_DIFFERENCES:
        render.say(f"... and {len(found) - MOST_DIFFERENCES} more differences: --json has them")


def _modes(settings: Settings, asked: list[Mode]) -> tuple[Mode, ...]:
    """Raises UsageError for plain decoding, a mode without its draft or head, and another engine than vLLM."""
    if settings.engine != "vllm":
        raise UsageError(f"engine {settings.engine} decodes nothing that could be verified: use engine vllm (SPECBATCH_ENGINE)")
    if Mode.PLAIN in asked:
        raise UsageError("mode plain is what the others are verified against: name another with --mode")
    chosen = settings.model_copy(update={"modes": tuple(dict.fromkeys(asked))}) if asked else settings
    modes = tuple(mode for mode in offered_modes(chosen) if mode is not Mode.PLAIN)
    if not modes:
        raise UsageError("no mode but plain is configured: name one with --mode")
    return modes
