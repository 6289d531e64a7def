"""Where the answers go: OUT, and beside it OUT.errors.jsonl for the rows that got none. Both appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from specbatch.context import Context
from specbatch.datasets.writers import aside as place_aside
from specbatch.datasets.writers import same
from specbatch.errors import NotFound, UsageError
from specbatch.service import files
from specbatch.wire import BatchObject


class Target:
    """Raises UsageError at once for a place that could not be written to at the end."""

    def __init__(self, path: Path, source: Path | None = None) -> None:
        self.path = path
        self.is_stdout = str(path) == "-"
        if self.is_stdout:
            return
        if path.is_dir():
            raise UsageError(f"{path} is a directory: name the output file, for example {path / 'output.jsonl'}")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file: name another output file, or - for standard output")
        if not path.parent.is_dir():
            raise UsageError(f"there is no directory {path.parent}: make it, or choose another output file")
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"{path.parent} cannot be written to: choose another output file")
        if len(os.fsencode(place_aside(self.errors).name)) > os.pathconf(path.parent, "PC_NAME_MAX"):
            raise UsageError(f"the name {path.name[:40]}... is too long for this folder's disk: choose a shorter one")
        for place, what in ((path, "the output"), (self.errors, "the rows without an answer")):
            if source is not None and same(place, source):
                raise UsageError(f"{place}, where {what} would go, is the input file: choose another output file")

    @property
    def errors(self) -> Path:
        """OUT's name says only by .jsonl what kind it is: what follows another dot may be all that tells two outputs apart."""
        return self.path.with_name(self.path.name.removesuffix(".jsonl") + ".errors.jsonl")

    def deliver(self, ctx: Context, batch: BatchObject) -> str:
        """Write the outcomes of a batch that ended, and say where they are.

        Without answers OUT is empty; without error lines there is no error file.

        Raises NotFound when an output file was deleted meanwhile.
        """
        if self.is_stdout:
            for file_id in (batch.output_file_id, batch.error_file_id):
                if file_id is not None:
                    with self._content(ctx, file_id).open("rb") as lines:
                        shutil.copyfileobj(lines, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return "stdout"
        if batch.error_file_id is not None:
            _put(self.errors, self._content(ctx, batch.error_file_id))
        _put(self.path, None if batch.output_file_id is None else self._content(ctx, batch.output_file_id))
        if batch.error_file_id is None:
            self.errors.unlink(missing_ok=True)  # of an earlier run: it would belie this one
            return str(self.path)
        return f"{self.path}, and {batch.request_counts.failed} error lines in {self.errors}"

    def document(self, batch: BatchObject) -> dict[str, str | None]:
        """Where `deliver` wrote, for programs."""
        return {"output": str(self.path), "errors": str(self.errors) if batch.error_file_id is not None else None}

    def refuse_json(self) -> None:
        """Raises UsageError: answers and the document of --json would both go to stdout."""
        if self.is_stdout:
            raise UsageError("-o - and --json both write to stdout: name an output file")

    def _content(self, ctx: Context, file_id: str) -> Path:
        path = files.content(ctx, file_id)
        if not path.exists():
            raise NotFound(f"the file {file_id} is not under {path.parent}: run this where the batch's data directory is (--data-dir)")
        return path


def _put(place: Path, content: Path | None) -> None:
    place = place.resolve()  # a link stays a link
    aside = place_aside(place)
    try:
        with aside.open("xb") as file:
            if content is not None:
                with content.open("rb") as lines:
                    shutil.copyfileobj(lines, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(place)
    finally:
        aside.unlink(missing_ok=True)
