"""What a person sees, and what a program reads: tables and JSON on stdout, messages on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from specbatch.errors import SpecbatchError
from specbatch.service.plan import Group
from specbatch.service.reports import Quantiles, Report
from specbatch.wire import BatchObject

MOST_PROBLEMS = 20  # shown; --json has them all
PIPED_COLUMNS = 1000  # a file has no width to fit into

messages = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, width=None if sys.stderr.isatty() else PIPED_COLUMNS)
tables = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPED_COLUMNS)


def say(message: str) -> None:
    messages.print(message)


def document(value: dict[str, Any]) -> None:
    """The one JSON document of a command, or one line of its event stream."""
    sys.stdout.write(json.dumps(value, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def fail(error: SpecbatchError, *, as_json: bool) -> None:
    if as_json:
        document({"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}})
    say(f"specbatch: error: {' '.join(error.message.split())}")  # one line, also where a driver said more


def problems(batch: BatchObject) -> None:
    """Why a batch failed validation, line by line."""
    found = (batch.errors or {}).get("data", [])
    for problem in found[:MOST_PROBLEMS]:
        place = f"line {problem['line']}: " if problem["line"] is not None else ""
        param = f" ({problem['param']})" if problem["param"] else ""
        say(f"{place}{problem['message']}{param}")
    if len(found) > MOST_PROBLEMS:
        say(f"... and {len(found) - MOST_PROBLEMS} more problems")


def batch(found: BatchObject, decided: Sequence[Group]) -> None:
    table = _pairs()
    for name, value in _facts(found):
        table.add_row(name, value)
    tables.print(table)
    if decided:
        tables.print(decisions(decided))


def decisions(groups: Sequence[Group]) -> Table:
    """How many rows in which mode, and why."""
    table = Table(box=None, pad_edge=False)
    for name in ("rows", "task", "mode", "reason"):
        table.add_column(name, justify="right" if name == "rows" else "left", no_wrap=name != "reason")
    for group in groups:
        table.add_row(str(group.rows), group.task, group.mode, group.reason)
    return table


def batches(page: Sequence[BatchObject]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("id", "status", "rows", "failed", "model", "tokens/s", "acceptance", "created"):
        table.add_column(name, justify="right" if name in ("rows", "failed", "tokens/s", "acceptance") else "left", no_wrap=name != "model")
    for each in page:
        counts, measured = each.request_counts, each.measured
        rows = f"{counts.completed + counts.failed}/{counts.total}"
        speed, rate = number(measured.tokens_per_second), percent(measured.acceptance_rate)
        table.add_row(each.id, each.status, rows, str(counts.failed), each.model or "-", speed, rate, moment(each.created_at))
    tables.print(table)


def report(summary: Report, destination: str) -> None:
    """The table at the end of `run`."""
    table = _pairs()
    counts = summary.batch.request_counts
    table.add_row("batch", summary.batch.id)
    table.add_row("model", summary.batch.model or "-")
    table.add_row("rows", f"{counts.completed + counts.failed} of {counts.total}, {counts.failed} failed")
    table.add_row("tokens", f"{summary.batch.usage.input_tokens} in, {summary.batch.usage.output_tokens} out")
    table.add_row("tokens/s", number(summary.batch.measured.tokens_per_second))
    table.add_row("first token", _quantiles(summary.ttft))
    table.add_row("each further token", _quantiles(summary.tpot))
    for mode in summary.modes:
        table.add_row(f"acceptance, {mode.mode}", _acceptance(mode.acceptance_rate, mode.accepted_tokens, mode.drafted_tokens))
    table.add_row("peak memory", size(summary.batch.measured.peak_memory_bytes))
    table.add_row("output", destination)
    messages.print(table)
    messages.print(decisions(summary.decisions))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def size(value: int | None) -> str:
    return "-" if value is None else f"{value / 1024**3:.2f} GiB"


def span(seconds: float | None) -> str:
    """Time left, as people say it: 1:02:03, or 2:03."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _facts(found: BatchObject) -> list[tuple[str, str]]:
    counts, measured = found.request_counts, found.measured
    facts = [
        ("batch", found.id),
        ("status", found.status.value),
        ("endpoint", found.endpoint),
        ("model", found.model or "-"),
        ("rows", f"{counts.completed + counts.failed} of {counts.total}, {counts.failed} failed"),
        ("tokens", f"{found.usage.input_tokens} in, {found.usage.output_tokens} out"),
        ("tokens/s", number(measured.tokens_per_second)),
        ("acceptance", _acceptance(measured.acceptance_rate, measured.accepted_tokens, measured.drafted_tokens)),
        ("peak memory", size(measured.peak_memory_bytes)),
        ("created", moment(found.created_at)),
        ("expires", moment(found.expires_at)),
        ("input file", found.input_file_id),
    ]
    return facts + [(name, value) for name, value in (("output file", found.output_file_id), ("error file", found.error_file_id)) if value]


def _acceptance(rate: float | None, accepted: int, drafted: int) -> str:
    return "nothing drafted" if rate is None else f"{percent(rate)} ({accepted} of {drafted} drafted tokens)"


def _quantiles(value: Quantiles) -> str:
    if value.p50 is None or value.p95 is None:
        return "-"
    return f"{milliseconds(value.p50)} median, {milliseconds(value.p95)} at the 95th percentile"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.2f} ms"


def moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _pairs() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table
