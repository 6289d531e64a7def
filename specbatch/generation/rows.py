"""The rows to generate for: selected, with their rendered columns, in the input's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from specbatch.datasets.dataset import Dataset, Values
from specbatch.errors import InvalidRequest
from specbatch.generation.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Unit:
    """One sample of one row. `position` orders the output, and names the request: row_index * samples + sample."""

    position: int
    row_index: int
    sample: int
    values: Values
    place: str  # as messages call the row


@dataclass(frozen=True, slots=True)
class Selection:
    """Units of consecutive rows, and for each unit its place in the chunk's Arrow table, where the dataset has types."""

    units: Sequence[Unit]
    table: pa.Table | None
    indices: Sequence[int]


def selected(dataset: Dataset, recipe: Recipe) -> Iterator[Selection]:
    """Every selected row, the same at every call. Raises InvalidRequest naming row and column."""
    first, left = 0, recipe.limit
    taken = {each.name for each in recipe.added_fields()}
    for chunk in dataset.chunks():
        units: list[Unit] = []
        indices: list[int] = []
        for offset, row in enumerate(chunk.rows):
            if left == 0:
                break
            place = f"{dataset.name}, row {first + offset + 1}"
            if recipe.where is not None and not recipe.where.holds(row, place):
                continue
            left = None if left is None else left - 1
            values = _with_columns(row, recipe, place, taken)
            for sample in range(recipe.samples):
                position = (first + offset) * recipe.samples + sample
                units.append(Unit(position, first + offset, sample, values, place))
                indices.append(offset)
        first += len(chunk.rows)
        if units:
            yield Selection(units, chunk.table, indices)
        if left == 0:
            return


def _with_columns(row: Values, recipe: Recipe, place: str, taken: set[str]) -> Values:
    clash = next((name for name in row if name in taken and (recipe.keep is None or name in recipe.keep or name in recipe.columns)), None)
    if clash is not None:
        raise InvalidRequest(
            f"{place}: the input has a column {clash!r}, and the output would get another: rename that with --name, or choose with --keep",
            param=clash,
        )
    if recipe.keep is not None and (absent := [name for name in recipe.keep if name not in row]):
        raise InvalidRequest(f"{place}: --keep: there is no column {absent[0]!r} (its columns: {', '.join(row)})", param=absent[0])
    values: dict[str, Any] = dict(row)
    for name, template in recipe.columns.items():
        values[name] = template.render(values, place)
    return values
