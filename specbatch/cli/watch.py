"""Following a batch until it ends: polls of one row of SQL, and what a person sees of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from specbatch.cli import render
from specbatch.context import Context
from specbatch.following import readings
from specbatch.service import batches
from specbatch.wire import BatchObject

WINDOW_SECONDS = 20.0
LINE_SECONDS = 15.0  # between lines where there is no terminal


def follow(ctx: Context, job_id: str) -> Iterator[BatchObject]:
    """A reading now and then, the last one of the ended batch. Raises NotFound, and ServiceUnavailable when the database stays away."""
    return readings(lambda: batches.get(ctx, job_id))


class Meter:
    """Speed over the last seconds: a batch that was interrupted has an average that includes its pause."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int, int]] = deque()

    def read(self, batch: BatchObject) -> None:
        now = time.monotonic()
        self._readings.append((now, _settled(batch), batch.usage.output_tokens))
        while now - self._readings[0][0] > WINDOW_SECONDS and len(self._readings) > 2:
            self._readings.popleft()

    def tokens_per_second(self) -> float | None:
        return self._rate(2)

    def seconds_left(self, batch: BatchObject) -> float | None:
        rows = self._rate(1)
        return None if not rows else (batch.request_counts.total - _settled(batch)) / rows

    def _rate(self, column: int) -> float | None:
        first, last = self._readings[0], self._readings[-1]
        seconds, amount = last[0] - first[0], last[column] - first[column]
        return amount / seconds if seconds > 0 and amount > 0 else None


class Display(Protocol):
    def show(self, batch: BatchObject, note: str = "") -> None:
        """`note` says what is waited for, where nothing is generated yet."""


@contextmanager
def display() -> Iterator[Display]:
    """A bar on a terminal; elsewhere a line now and then."""
    if not render.messages.is_terminal:
        yield _Lines()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, console=render.messages, transient=True) as progress:
        yield _Bar(progress)


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, facts="")
        self._meter = Meter()

    def show(self, batch: BatchObject, note: str = "") -> None:
        self._meter.read(batch)
        total = batch.request_counts.total or None
        facts = _facts(batch, self._meter)
        self._progress.update(self._task, description=note or batch.status, completed=_settled(batch), total=total, facts=facts)


class _Lines:
    def __init__(self) -> None:
        self._meter = Meter()
        self._said = ""
        self._said_at = 0.0

    def show(self, batch: BatchObject, note: str = "") -> None:
        self._meter.read(batch)
        stage = note or batch.status
        if stage != self._said or time.monotonic() - self._said_at > LINE_SECONDS:
            self._said, self._said_at = stage, time.monotonic()
            known = batch.request_counts.total > 0
            facts = [f"{_settled(batch)}/{batch.request_counts.total} rows", _facts(batch, self._meter)] if known else []
            render.say(", ".join([f"{batch.id}: {stage}", *facts]))


def _facts(batch: BatchObject, meter: Meter) -> str:
    facts = [f"{render.number(meter.tokens_per_second())} tokens/s"]
    if batch.measured.acceptance_rate is not None:
        facts.append(f"{render.percent(batch.measured.acceptance_rate)} accepted")
    return ", ".join([*facts, f"{render.span(meter.seconds_left(batch))} left"])


def _settled(batch: BatchObject) -> int:
    return batch.request_counts.completed + batch.request_counts.failed
