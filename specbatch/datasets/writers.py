"""The file of a generated dataset: written aside, part by part, and put under its name when it is whole."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.errors import InvalidRequest, UsageError

SUFFIXES = (".jsonl", ".parquet")
PART_BYTES = 2 * 1024**3
GROUP_ROWS = 20_000  # rows of a Parquet row group
GROUP_BYTES = 64 * 1024**2


class Destination:
    """OUT, and beside it OUT.invalid.jsonl for the rows that are kept aside. Raises UsageError at once for a place that will not do."""

    def __init__(self, path: Path, sources: Sequence[Path] = ()) -> None:
        self.path = path
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(f"{path}: name the output *{' or *'.join(SUFFIXES)}: the suffix chooses its kind")
        if not path.parent.is_dir():
            raise UsageError(f"there is no directory {path.parent}: make it, or choose another output")
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"{path.parent} cannot be written to: choose another output")
        if self.invalid.is_dir():
            raise UsageError(f"rows that are kept aside go to {self.invalid}, which is a folder: move it, or choose another output")
        for source in sources:
            inside = source.is_dir() and path.resolve().is_relative_to(source.resolve())
            if inside or _same(path, source):
                raise UsageError(f"the output {path} is{' inside' if inside else ''} the input {source}: choose another output")
            if _same(self.invalid, source):
                raise UsageError(
                    f"rows that are kept aside go to {self.invalid}, beside the output, and that is the input: choose another output"
                )

    @property
    def is_parquet(self) -> bool:
        return self.path.suffix.lower() == ".parquet"

    @property
    def invalid(self) -> Path:
        return self.path.with_suffix(".invalid.jsonl")

    @property
    def taken(self) -> bool:
        return self.path.exists()


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


class Writer:
    """Takes tables of one schema. A part that grows above `part_bytes` is followed by another; several parts become a folder named OUT."""

    def __init__(self, destination: Destination, schema: pa.Schema | None, part_bytes: int = PART_BYTES) -> None:
        self._place = destination.path.resolve()  # a link stays a link
        self._parquet, self._schema, self._part_bytes = destination.is_parquet, schema, part_bytes
        self._aside = self._place.with_name(f".{self._place.name}.{secrets.token_hex(4)}.part")
        self._parts: list[Path] = []
        self._open: Jsonl | Parquet | None = None

    def __enter__(self) -> Writer:
        self._aside.mkdir()
        self._next_part()
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._open is not None:
                self._open.close()
            if failure is None:
                self._publish()
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)

    def write(self, rows: Sequence[dict[str, Any]], table: pa.Table | None = None) -> None:
        """Rows as Python values; `table` has those of their columns whose Arrow types are to survive.

        Raises InvalidRequest for a value that its column cannot hold: none of the rows is written then.
        """
        assert self._open is not None
        if self._open.bytes() >= self._part_bytes:
            self._open.close()
            self._next_part()
        self._open.write(rows, table)

    def _next_part(self) -> None:
        path = self._aside / f"part-{len(self._parts):05d}{self._place.suffix}"
        self._parts.append(path)
        self._open = Parquet(path, self._schema) if self._parquet and self._schema is not None else Jsonl(path)

    def _publish(self) -> None:
        if self._place.is_dir():
            shutil.rmtree(self._place)  # the parts of an earlier run: a folder is not replaced by a rename
        if len(self._parts) == 1:
            self._parts[0].replace(self._place)
        else:
            if self._place.exists():
                self._place.unlink()
            self._aside.replace(self._place)


class Jsonl:
    """A row a line. Times become ISO 8601, decimals and UUIDs text, bytes base64, NaN and infinities null: JSON has no form for them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")  # a lone surrogate becomes its JSON escape

    def write(self, rows: Sequence[dict[str, Any]], table: pa.Table | None = None) -> None:
        self._file.writelines(f"{dump(row)}\n" for row in rows)

    def bytes(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        """Safe to call twice."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


class Parquet:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._file = path.open("wb")
        self._writer = pq.ParquetWriter(self._file, schema)
        self._start = self._file.tell()
        self._group: list[pa.Table] = []

    def write(self, rows: Sequence[dict[str, Any]], table: pa.Table | None = None) -> None:
        columns = [
            table.column(field.name).cast(field.type)
            if table is not None and field.name in table.column_names
            else _column(field, [row.get(field.name) for row in rows])
            for field in self._schema
        ]
        self._group.append(pa.Table.from_arrays(columns, schema=self._schema))
        if sum(each.num_rows for each in self._group) >= GROUP_ROWS or sum(each.nbytes for each in self._group) >= GROUP_BYTES:
            self._flush()

    def bytes(self) -> int:
        return self._file.tell() - self._start

    def close(self) -> None:
        self._flush()
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _flush(self) -> None:
        if self._group:
            self._writer.write_table(pa.concat_tables(self._group))
            self._group = []


def dump(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


def _column(field: pa.Field, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values, type=field.type)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as wrong:
        raise InvalidRequest(f"column {field.name!r} of the output: {wrong}. Leave it out with --keep, or write JSONL") from None


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time | datetime.datetime):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal | UUID):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value
