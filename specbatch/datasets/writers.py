"""The file of a generated dataset: written aside, part by part, and put under its name when it is whole."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from specbatch.datasets.formats import Jsonl, Parquet
from specbatch.errors import UsageError

SUFFIXES = (".jsonl", ".parquet")
PART_BYTES = 2 * 1024**3


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
            if inside or same(path, source):
                raise UsageError(f"the output {path} is{' inside' if inside else ''} the input {source}: choose another output")
            if same(self.invalid, source):
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

    def remove_leftovers(self) -> None:
        """What a command that was killed while it wrote left beside OUT. Only for who holds OUT's lock: it would take another's work."""
        for place in {self.path, self.path.resolve()}:
            for left in place.parent.glob(f".{glob.escape(place.name)}.{'[0-9a-f]' * 8}.part"):
                with suppress(OSError):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()


def aside(place: Path) -> Path:
    """Where something is written until it is whole, beside the output at `place`."""
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")


def same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


class Writer:
    """Takes tables of one schema. A part that grows above `part_bytes` is followed by another; several parts become a folder named OUT."""

    def __init__(self, destination: Destination, schema: pa.Schema | None, part_bytes: int = PART_BYTES) -> None:
        self._place = destination.path.resolve()  # a link stays a link
        self._parquet, self._schema, self._part_bytes = destination.is_parquet, schema, part_bytes
        self._aside = aside(self._place)
        self._parts: list[Path] = []
        self._open: Jsonl | Parquet | None = None

    def __enter__(self) -> Writer:
        self._aside.mkdir()
        try:
            self._next_part()
        except BaseException:
            shutil.rmtree(self._aside, ignore_errors=True)
            raise
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
