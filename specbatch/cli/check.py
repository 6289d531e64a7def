"""`check`: can this draft, or this head, speculate for this target? Told from the files of both, before an engine is started."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer
from rich.table import Table

from specbatch import gpus, pairing
from specbatch.cli import render
from specbatch.cli.flags import ENGINE, Call, configured
from specbatch.compat import Memory, Report, Severity, require_drafting
from specbatch.compat.checkpoint import locate
from specbatch.domain import Mode
from specbatch.errors import EngineStartError, UsageError
from specbatch.processes import ERROR_PREFIX
from specbatch.serving import resolve_model, suffix_missing
from specbatch.settings import BUILTIN_MODEL, Settings

LABELS = {Severity.OK: "ok", Severity.WARNING: "WARNING", Severity.FAILURE: "FAILS"}


@configured(ENGINE)
def check(
    call: Call,
    mode: Annotated[Mode | None, typer.Option("--mode", help="draft_model, eagle or eagle3; told from what is given by default.")] = None,
) -> None:
    """Compare a target (--model) and its draft (--draft) or head (--eagle), without loading weights.

    Exit code: 0 compatible, 2 not, or not readable.
    """
    settings = call.settings
    chosen, second = _second(settings, mode)
    model = resolve_model(settings)
    report = pairing.check(settings, _folder(settings, model), _folder(settings, second), chosen, device_memory_bytes=gpus.memory_bytes())
    report = report.model_copy(update={"target": model, "draft": second})
    if call.json:
        render.document(report.model_dump(mode="json"))
    else:
        show(report)
    raise typer.Exit(0 if report.compatible else 2)


def show(report: Report) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("", "check", "target", "draft", "finding"):
        table.add_column(name, overflow="fold", no_wrap=name in ("", "check"))
    for found in report.findings:
        values = ("-" if value is None else str(value) for value in (found.target_value, found.draft_value))
        table.add_row(LABELS[found.severity], found.check.replace("_", " "), *values, found.message)
    render.tables.print(table)
    render.say(_memory(report.memory))
    verdict = "compatible" if report.compatible else f"NOT compatible: {len(report.failures)} of {len(report.findings)} checks fail"
    render.say(f"mode {report.mode}: {verdict}")


def _memory(memory: Memory) -> str:
    if memory.added_bytes is None:
        return "memory added: unknown"
    share = "" if memory.added_percent is None else f" ({memory.added_percent}% of what the target takes)"
    return f"memory added to each device: {memory.added_bytes / 1e9:.3g} GB{share}, with a KV cache for {memory.kv_tokens} tokens"


def _second(settings: Settings, mode: Mode | None) -> tuple[Mode, str]:
    """The mode, and the model that it drafts with. Raises UsageError where that is not given."""
    if mode is None and settings.draft is None and settings.eagle is not None:
        mode = locate(_folder(settings, settings.eagle)).head_mode or Mode.EAGLE3
    mode = mode or Mode.DRAFT_MODEL
    if mode is Mode.SUFFIX and (missing := suffix_missing()) is not None:
        raise UsageError(missing, param="mode")
    require_drafting(mode)
    name = "draft" if mode is Mode.DRAFT_MODEL else "eagle"
    second: str | None = getattr(settings, name)
    if second is None:
        raise UsageError(f"mode {mode} is checked with a second model: give it with --{name} (SPECBATCH_{name.upper()})", param="mode")
    return mode, second


def _folder(settings: Settings, model: str) -> str:
    """The built-in model's folder, made now if it is not there; any other model as it is named."""
    if model != BUILTIN_MODEL:
        return model
    made = subprocess.run(
        [sys.executable, "-P", "-m", "worker.builtin", str(settings.cache_dir)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        lines = made.stderr.strip().splitlines()
        raise EngineStartError(lines[-1].removeprefix(ERROR_PREFIX) if lines else "the built-in model cannot be made")
    return made.stdout.strip()
