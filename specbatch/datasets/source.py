"""Where a dataset lies: one file, a folder of files, a Hugging Face folder, or standard input."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from specbatch.datasets.arrow import HUGGING_FACE_SPLITS, HUGGING_FACE_STATE, Parquet, hugging_face
from specbatch.datasets.dataset import Chunk, Dataset
from specbatch.datasets.text import Csv, Jsonl
from specbatch.errors import InvalidRequest, UsageError

KINDS: dict[str, type[Jsonl] | type[Csv] | type[Parquet]] = {
    ".jsonl": Jsonl,
    ".ndjson": Jsonl,
    ".csv": Csv,
    ".parquet": Parquet,
}


@contextmanager
def opened(path: Path) -> Iterator[Dataset]:
    """A dataset, checked as far as that is possible without reading it. `-` is JSONL on standard input, kept aside for the while.

    Raises UsageError for a path that is no dataset, InvalidRequest for one that is damaged.
    """
    if str(path) != "-":
        yield at(path)
        return
    with tempfile.NamedTemporaryFile(prefix="specbatch-", suffix=".jsonl") as aside:
        shutil.copyfileobj(sys.stdin.buffer, aside)
        aside.flush()
        yield Jsonl(Path(aside.name), "stdin")


def at(path: Path) -> Dataset:
    if not path.exists():
        raise UsageError(f"there is no file or folder {path}: check the path")
    if path.is_dir():
        if (path / HUGGING_FACE_STATE).exists() or (path / HUGGING_FACE_SPLITS).exists():
            return hugging_face(path)
        return Folder(path)
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"{path}: the suffix tells the kind of a dataset, and {path.suffix or 'none'} is not one of {', '.join(KINDS)}")
    return kind(path)


class Folder:
    """The files of a folder by name, one after the other. All are of one kind, and typed ones have the same columns."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() in KINDS and not path.name.startswith((".", "_")))
        if not found:
            raise UsageError(f"{folder} holds no dataset: no {', '.join(KINDS)} file, and no {HUGGING_FACE_STATE} of Hugging Face")
        kinds = {KINDS[path.suffix.lower()] for path in found}
        if len(kinds) > 1:
            raise UsageError(f"{folder} holds datasets of several kinds ({', '.join(path.name for path in found[:5])}): separate them")
        self._parts = [KINDS[path.suffix.lower()](path) for path in found]
        self.files: Sequence[Path] = tuple(found)
        self.schema: pa.Schema | None = self._parts[0].schema
        for part in self._parts:
            if part.schema is not None and self.schema is not None and not part.schema.equals(self.schema):
                raise InvalidRequest(
                    f"{part.name} has other columns or types than {self._parts[0].name}: {_difference(self.schema, part.schema)}"
                )

    def chunks(self) -> Iterator[Chunk]:
        for part in self._parts:
            yield from part.chunks()


def _difference(one: pa.Schema, other: pa.Schema) -> str:
    fields = [{field.name: str(field.type) for field in schema} for schema in (one, other)]
    differing = sorted({name for name in fields[0] | fields[1] if fields[0].get(name) != fields[1].get(name)})
    if not differing:
        return "the same columns in another order"
    return "; ".join(
        f"{name!r} is {fields[0].get(name, 'absent')} there and {fields[1].get(name, 'absent')} here" for name in differing[:5]
    )
