"""Rows as lines of batch files. Lines that begin alike stand together, so that one prefix in the engine's cache serves them all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from specbatch.datasets.dataset import Dataset, Values
from specbatch.generation.recipe import Recipe
from specbatch.generation.rows import Unit, selected
from specbatch.generation.spool import Spool

ENDPOINT = "/v1/chat/completions"
WINDOW_ROWS = 8192  # lines that are sorted together; 1 leaves the input's order
WINDOW_BYTES = 32 * 1024**2
PART_ROWS = 1_000_000
PART_BYTES = 1024**3
Line = tuple[str, int]  # the body, which sorts lines by their beginnings, and the position


class Parts:
    """The files of a step, each as chunks of bytes, to be read one after the other. Holds one window of lines at a time."""

    def __init__(self, lines: Iterable[Line], window_rows: int = WINDOW_ROWS, part_rows: int = PART_ROWS) -> None:
        self._windows = _windows(lines, min(window_rows, part_rows))
        self._part_rows = part_rows
        self._next: list[Line] | None = None

    def __iter__(self) -> Iterator[Iterator[bytes]]:
        self._next = next(self._windows, None)
        while self._next is not None:
            yield self._part()

    def _part(self) -> Iterator[bytes]:
        rows = size = 0
        while self._next is not None and (rows == 0 or (rows + len(self._next) <= self._part_rows and size < PART_BYTES)):
            chunk = b"".join(_line(body, position) for body, position in sorted(self._next))
            rows, size = rows + len(self._next), size + len(chunk)
            self._next = None
            yield chunk
            self._next = next(self._windows, None)


def owed(dataset: Dataset, recipe: Recipe, step_no: int, spool: Spool, model: str) -> Iterator[Line]:
    """The request of every row that has an answer of the step before, and none of this one. Raises InvalidRequest naming row and column."""
    step = recipe.steps[step_no]
    fixed: dict[str, Any] = {"model": model}
    later = dict(recipe.sampling)
    if step.schema is not None:
        later["response_format"] = step.schema.response_format()
    for selection in selected(dataset, recipe):
        first, last = selection.units[0].position, selection.units[-1].position
        done = spool.between(step_no, first, last)
        earlier = [(each.name, spool.between(number, first, last)) for number, each in enumerate(recipe.steps[:step_no])]
        for unit in selection.units:
            values = _with_answers(unit, earlier)
            if values is None or unit.position in done:
                continue
            body = fixed | {"messages": step.chat.render(values, unit.place)} | later
            if (seed := recipe.row_seed(unit.row_index, unit.sample, step_no)) is not None:
                body["seed"] = seed
            yield json.dumps(body, separators=(",", ":"), allow_nan=False), unit.position


def _with_answers(unit: Unit, earlier: list[tuple[str, Any]]) -> Values | None:
    """A row with the answers of earlier steps; None where one of them has none."""
    values = unit.values
    for name, answers in earlier:
        answer = answers.get(unit.position)
        if answer is None or answer.text is None:
            return None
        values = {**values, name: answer.text}
    return values


def _windows(lines: Iterable[Line], rows: int) -> Iterator[list[Line]]:
    window: list[Line] = []
    size = 0
    for line in lines:
        window.append(line)
        size += len(line[0])
        if len(window) >= rows or size >= WINDOW_BYTES:
            yield window
            window, size = [], 0
    if window:
        yield window


def _line(body: str, position: int) -> bytes:
    return f'{{"custom_id":"{position}","method":"POST","url":"{ENDPOINT}","body":{body}}}\n'.encode()
