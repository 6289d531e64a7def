"""Modes side by side, from measured points: what `bench` shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel

from specbatch.domain import Mode, TaskType
from specbatch.tuning import BULK, Speed


class ModeCost(BaseModel):
    """Memory beyond plain's. `measured`: peaks of the engines' processes; else computed from the files of target and draft."""

    mode: Mode
    k: int
    start_seconds: float | None
    added_bytes: int | None
    added_percent: float | None
    measured: bool

    @property
    def added_gb(self) -> float | None:
        return None if self.added_bytes is None else self.added_bytes / 1e9


class Line(BaseModel):
    """One point beside plain's at the same task and load."""

    task: TaskType
    load: int
    mode: Mode
    k: int
    tokens_per_second: float
    of_plain: float | None
    ttft_seconds: float | None
    tpot_seconds: float | None
    acceptance_rate: float | None


class Comparison(BaseModel):
    model: str
    device: str
    vllm: str
    lines: list[Line]
    costs: list[ModeCost]


def lines(speeds: Iterable[Speed]) -> list[Line]:
    """By task, then load, then mode, in the order of the modes' definition."""
    points = sorted(speeds, key=lambda speed: (list(TaskType).index(speed.task), speed.load, list(Mode).index(speed.mode), speed.k))
    plain = {(speed.task, speed.load): speed.tokens_per_second for speed in points if speed.mode is Mode.PLAIN}
    return [_line(speed, plain) for speed in points]


def _line(speed: Speed, plain: Mapping[tuple[TaskType, int], float]) -> Line:
    beside = plain.get((speed.task, speed.load))
    return Line(
        task=speed.task,
        load=speed.load,
        mode=speed.mode,
        k=speed.k,
        tokens_per_second=speed.tokens_per_second,
        of_plain=speed.tokens_per_second / beside if beside else None,
        ttft_seconds=speed.ttft_seconds,
        tpot_seconds=speed.tpot_seconds,
        acceptance_rate=speed.acceptance_rate,
    )


def peak_costs(speeds: Iterable[Speed]) -> list[ModeCost]:
    """What each mode's engine held at most beyond plain's."""
    engines: dict[tuple[Mode, int], list[Speed]] = {}
    for speed in speeds:
        engines.setdefault((speed.mode, speed.k), []).append(speed)
    peaks = {engine: max((speed.peak_memory_bytes or 0 for speed in points), default=0) for engine, points in engines.items()}
    plain = peaks.get((Mode.PLAIN, 0), 0)
    return [
        ModeCost(
            mode=mode,
            k=k,
            start_seconds=max((speed.start_seconds or 0.0 for speed in engines[mode, k]), default=None),
            added_bytes=peak - plain if plain and peak else None,
            added_percent=100 * (peak - plain) / plain if plain and peak else None,
            measured=True,
        )
        for (mode, k), peak in sorted(peaks.items(), key=lambda item: (list(Mode).index(item[0][0]), item[0][1]))
    ]


def markdown(comparison: Comparison) -> str:
    """Tables for a README: one for each task, and one of what each mode costs besides."""
    parts = [f"{comparison.model} on {comparison.device}, vLLM {comparison.vllm}. Latencies are medians in milliseconds."]
    for task in dict.fromkeys(line.task for line in comparison.lines):
        rows = [_cells(line) for line in comparison.lines if line.task is task]
        head = ("requests at once", "mode", "tokens/s", "of plain", "first token", "further token", "acceptance")
        parts.append(f"### {task}\n\n{_table(head, rows, left=(1,))}")
    costs = [_cost_cells(cost) for cost in comparison.costs]
    parts.append("### Start and memory\n\n" + _table(("mode", "start", "memory added", "of plain"), costs, left=(0,)))
    return "\n\n".join(parts) + "\n"


def name(mode: Mode, k: int) -> str:
    return mode.value if k == 0 else f"{mode} K={k}"


def _cells(line: Line) -> tuple[str, ...]:
    return (
        f"{line.load} (bulk)" if line.load >= BULK else str(line.load),
        name(line.mode, line.k),
        f"{line.tokens_per_second:,.0f}" if line.tokens_per_second >= 100 else f"{line.tokens_per_second:.1f}",
        "-" if line.of_plain is None else f"{line.of_plain:.2f}x",
        _milliseconds(line.ttft_seconds),
        _milliseconds(line.tpot_seconds),
        "-" if line.acceptance_rate is None else f"{line.acceptance_rate:.0%}",
    )


def _cost_cells(cost: ModeCost) -> tuple[str, ...]:
    how = "" if cost.measured else " (computed)"
    return (
        name(cost.mode, cost.k),
        "-" if cost.start_seconds is None else f"{cost.start_seconds:.0f} s",
        "-" if cost.added_gb is None else f"{cost.added_gb:.2f} GB{how}",
        "-" if cost.added_percent is None else f"{cost.added_percent:+.1f}%",
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> str:
    marks = ["---" if column in left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *rows))
