"""A dataset as generation sees it: rows in a fixed order, a chunk at a time, read as often as needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from specbatch.errors import InvalidRequest

CHUNK_ROWS = 1000
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows as Python values, and as Arrow where the file itself has types: those survive into Parquet."""

    rows: Sequence[Values]
    table: pa.Table | None = None


class Dataset(Protocol):
    """`name` is what messages call it; `schema` is None where the file has no types of its own (JSONL)."""

    name: str
    files: Sequence[Path]
    schema: pa.Schema | None

    def chunks(self) -> Iterator[Chunk]:
        """Every row, in order; the same at every call. Raises InvalidRequest naming the row that cannot be read."""


def digest(dataset: Dataset) -> str:
    """A hash of the names and bytes of a dataset's files: the same content is the same dataset, whenever it was written."""
    total = hashlib.sha256()
    for path in dataset.files:
        with path.open("rb") as file:
            total.update(f"{path.suffix}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def infer_schema(dataset: Dataset, columns: Sequence[str] | None = None) -> pa.Schema:
    """The types of a dataset: its own, or those that hold every value of an untyped one, found in one pass.

    Raises InvalidRequest for a column whose values have no type in common. `columns` limits the search.
    """
    if dataset.schema is not None:
        return dataset.schema
    found, first = pa.schema([]), 0
    for chunk in dataset.chunks():
        for name in dict.fromkeys(name for row in chunk.rows for name in row if columns is None or name in columns):
            place = f"{dataset.name}, rows {first + 1} to {first + len(chunk.rows)}"
            found = _widened(found, name, [row.get(name) for row in chunk.rows], place)
        first += len(chunk.rows)
    return found


def _widened(schema: pa.Schema, name: str, values: list[Any], place: str) -> pa.Schema:
    try:
        here = pa.schema([pa.field(name, pa.array(values).type)])
    except UnicodeEncodeError:
        raise InvalidRequest(f"{place}: column {name!r} holds half of a character (a lone surrogate). {_NO_UTF8}") from None
    except (pa.ArrowException, OverflowError) as mixed:
        raise InvalidRequest(f"{place}: column {name!r} holds values of several types ({mixed}). {_MIXED}") from None
    try:
        return pa.unify_schemas([schema, here], promote_options="permissive")
    except pa.ArrowException:
        before, now = schema.field(name).type, here.field(name).type
        raise InvalidRequest(f"{place}: column {name!r} is {now}, and {before} in the rows before. {_MIXED}") from None


_MIXED = "Parquet needs one type a column: leave it out with --keep, or write JSONL"
_NO_UTF8 = "Parquet has no form for it: correct it, leave it out with --keep, or write JSONL"
