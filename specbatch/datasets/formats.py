"""The two kinds of file that rows are written to, and what each has no form for."""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.errors import InvalidRequest

GROUP_ROWS = 20_000  # rows of a Parquet row group
GROUP_BYTES = 64 * 1024**2
ADVICE = "Leave it out with --keep, or write JSONL"


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
        try:
            self._writer = pq.ParquetWriter(self._file, schema)
        except BaseException:
            self._file.close()
            raise
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


def check_parquet(schema: pa.Schema) -> None:
    """Raises InvalidRequest for the first column whose type Parquet has no form for, as an object without fields."""
    for field in schema:
        one = pa.schema([field])
        try:
            with pq.ParquetWriter(io.BytesIO(), one) as writer:
                writer.write_table(one.empty_table())
        except pa.ArrowException as wrong:
            raise InvalidRequest(
                f"column {field.name!r} cannot be in Parquet: {str(wrong).rstrip('.')}. {ADVICE}", param=field.name
            ) from None


def dump(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


def _column(field: pa.Field, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values, type=field.type)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as wrong:
        raise InvalidRequest(f"column {field.name!r} of the output: {wrong}. {ADVICE}") from None


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
