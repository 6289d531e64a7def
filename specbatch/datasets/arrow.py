"""Datasets with types: Parquet files, and the Arrow files that Hugging Face's `save_to_disk` leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.datasets.dataset import CHUNK_ROWS, Chunk
from specbatch.errors import InvalidRequest

HUGGING_FACE_STATE = "state.json"
HUGGING_FACE_SPLITS = "dataset_dict.json"


class Parquet:
    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or str(path)
        self.files: Sequence[Path] = (path,)
        with _told(self.name), pq.ParquetFile(path) as file:
            self.schema: pa.Schema | None = _unique(file.schema_arrow, self.name)

    def chunks(self) -> Iterator[Chunk]:
        with _told(self.name), pq.ParquetFile(self.files[0]) as file:
            for batch in file.iter_batches(CHUNK_ROWS):
                yield _chunk(batch, self.name)


class HuggingFace:
    """A folder written by `Dataset.save_to_disk`: Arrow streams, in the order that state.json names."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.name = name or str(folder)
        try:
            listed = json.loads((folder / HUGGING_FACE_STATE).read_text(encoding="utf-8"))["_data_files"]
            self.files: Sequence[Path] = tuple(folder / each["filename"] for each in listed)
        except (ValueError, KeyError, TypeError, OSError):
            raise InvalidRequest(f"{self.name}: {HUGGING_FACE_STATE} does not list data files: save the dataset again") from None
        if not self.files:
            raise InvalidRequest(f"{self.name} holds no rows")
        with self._stream(self.files[0]) as stream:
            self.schema: pa.Schema | None = _unique(stream.schema, self.name)

    def chunks(self) -> Iterator[Chunk]:
        for path in self.files:
            with self._stream(path) as stream:
                for batch in stream:
                    for start in range(0, batch.num_rows, CHUNK_ROWS):
                        yield _chunk(batch.slice(start, CHUNK_ROWS), self.name)

    @contextmanager
    def _stream(self, path: Path) -> Iterator[pa.RecordBatchReader]:
        with _told(f"{self.name}/{path.name}"), pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            yield stream


def hugging_face(folder: Path) -> HuggingFace:
    """The dataset in a folder, or the only split of a DatasetDict's folder. Raises InvalidRequest where there are several."""
    if not (folder / HUGGING_FACE_SPLITS).exists():
        return HuggingFace(folder)
    splits = json.loads((folder / HUGGING_FACE_SPLITS).read_text(encoding="utf-8")).get("splits", [])
    if len(splits) != 1:
        named = ", ".join(str(folder / split) for split in splits)
        raise InvalidRequest(f"{folder} holds {len(splits)} splits: give one of {named}")
    return HuggingFace(folder / splits[0])


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise InvalidRequest(f"there is no file {name}: check the path") from None
    except (pa.ArrowException, OSError) as wrong:
        first = str(wrong).splitlines()[0]
        raise InvalidRequest(f"{name} cannot be read; it is damaged, cut short, or of another kind than its name says: {first}") from None


def _chunk(batch: pa.RecordBatch, name: str) -> Chunk:
    table = pa.Table.from_batches([batch])
    try:
        return Chunk(table.to_pylist(), table)
    except (ValueError, OverflowError, UnicodeDecodeError):
        columns = [_values(table.column(column), f"{name}, column {column!r}") for column in table.column_names]
        return Chunk([dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)], table)


def _values(column: pa.ChunkedArray, place: str) -> list[Any]:
    """As Python values: nanoseconds, for which Python's times have no room, become microseconds. The Arrow column keeps them."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError, UnicodeDecodeError) as wrong:
        kind = column.type
        if pa.types.is_timestamp(kind):
            return list(column.cast(pa.timestamp("us", kind.tz), safe=False).to_pylist())
        if pa.types.is_duration(kind):
            return list(column.cast(pa.duration("us"), safe=False).to_pylist())
        if pa.types.is_time64(kind):
            return list(column.cast(pa.time64("us"), safe=False).to_pylist())
        raise InvalidRequest(f"{place}: a value has no form in Python: {wrong}. Cast the column, or leave it out of the file") from None


def _unique(schema: pa.Schema, name: str) -> pa.Schema:
    repeated = [column for column in schema.names if schema.names.count(column) > 1]
    if repeated:
        raise InvalidRequest(f"{name} has two columns named {repeated[0]!r}: rename one")
    return schema
