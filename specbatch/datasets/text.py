"""Datasets in text: JSONL, whose rows may differ in columns, and CSV, whose values are the text that the file holds."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from specbatch import lines
from specbatch.datasets.dataset import CHUNK_ROWS, Chunk, Values
from specbatch.errors import InvalidRequest

MOST_LINE_BYTES = 64 * 1024**2
csv.field_size_limit(MOST_LINE_BYTES)


class Jsonl:
    schema: pa.Schema | None = None

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or str(path)
        self.files: Sequence[Path] = (path,)

    def chunks(self) -> Iterator[Chunk]:
        return _chunks(self._rows())

    def _rows(self) -> Iterator[Values]:
        for number, line in lines.read(self.files[0], MOST_LINE_BYTES):
            if len(line) > MOST_LINE_BYTES:
                raise InvalidRequest(f"{self.name}, row {number}: the line is longer than {MOST_LINE_BYTES} bytes")
            row = lines.load(line, number)
            if isinstance(row, lines.Problem):
                raise InvalidRequest(f"{self.name}, row {number}: {row.message} Write one JSON object a line")
            yield row


class Csv:
    """Comma-separated, with a header. No type is guessed: 007 stays 007."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or str(path)
        self.files: Sequence[Path] = (path,)
        self.schema: pa.Schema | None = pa.schema([(column, pa.string()) for column in self._header()])

    def chunks(self) -> Iterator[Chunk]:
        for chunk in _chunks(self._rows()):
            yield Chunk(chunk.rows, pa.Table.from_pylist(chunk.rows, schema=self.schema))

    def _header(self) -> list[str]:
        header = next(self._records(), None)
        if header is None:
            raise InvalidRequest(f"{self.name} is empty: its first line must name the columns")
        repeated = [column for column in dict.fromkeys(header) if header.count(column) > 1]
        if repeated:
            raise InvalidRequest(f"{self.name}: the header names column {repeated[0]!r} twice: rename one")
        return header

    def _rows(self) -> Iterator[Values]:
        records = self._records()
        header = next(records)
        for number, record in enumerate(records, start=1):
            if len(record) != len(header):
                missing = f"column {header[len(record)]!r} is missing" if len(record) < len(header) else "a comma or a quote too many"
                raise InvalidRequest(
                    f"{self.name}, row {number}: {len(record)} values for {len(header)} columns ({missing}). Quote values that hold commas"
                )
            yield dict(zip(header, record, strict=True))

    def _records(self) -> Iterator[list[str]]:
        """Records without blank lines. Text with a NUL, or that is no UTF-8, is binary."""
        number = -1
        try:
            with self.files[0].open(encoding="utf-8-sig", newline="") as file:
                for record in csv.reader(file, strict=True):
                    if not record:
                        continue
                    number += 1
                    for place, value in enumerate(record, start=1):
                        if "\0" in value:
                            raise InvalidRequest(f"{self.name}, row {number}, column {place}: a NUL byte. {_BINARY}")
                    yield record
        except UnicodeDecodeError as wrong:
            raise InvalidRequest(
                f"{self.name}, about row {number + 1}: byte 0x{wrong.object[wrong.start]:02x} is not UTF-8. {_BINARY}"
            ) from None
        except csv.Error as wrong:
            raise InvalidRequest(f"{self.name}, row {number + 1}: {wrong}. Close every quote, and double quotes inside quotes") from None


def write_jsonl(path: Path, rows: Iterable[Values]) -> None:
    """Rows that a program hands over, as a file that can be read more than once."""
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, start=1):
            try:
                file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            except (TypeError, ValueError) as wrong:
                raise InvalidRequest(f"row {number} cannot be written as JSON: {wrong}") from None


def _chunks(rows: Iterator[Values]) -> Iterator[Chunk]:
    while some := list(itertools.islice(rows, CHUNK_ROWS)):
        yield Chunk(some)


_BINARY = "Save the file as CSV in UTF-8, or convert it to Parquet"
