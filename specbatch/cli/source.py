"""The file of requests that a command was given: checked before anything is started, and stored as a batch's input."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specbatch.context import Context
from specbatch.errors import InvalidRequest, UsageError
from specbatch.lines import ENDPOINTS, read
from specbatch.service import files
from specbatch.wire import FileObject

CHUNK_BYTES = 1024**2
FIRST_LINE_BYTES = 64 * 1024**2
DEFAULT_ENDPOINT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    name: str  # as the user wrote it

    def digest(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def endpoint(self) -> str:
        """The url of the first line, which every line must share. Raises InvalidRequest where the first line is no request of any kind."""
        holds = False
        for number, line in read(self.path, FIRST_LINE_BYTES):
            holds = True
            if len(line) > FIRST_LINE_BYTES:
                continue  # cut: whether it is a request, its validation says
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise InvalidRequest(
                    f"{self.name} is not JSONL: line {number} is not a JSON object. Write one request a line, as in examples/requests.jsonl"
                )
            url = value.get("url")
            if isinstance(url, str) and url not in ENDPOINTS:
                raise InvalidRequest(f"{self.name}: line {number} asks for {url!r}; use one of {', '.join(ENDPOINTS)}")
            return url if isinstance(url, str) else DEFAULT_ENDPOINT
        if holds:
            return DEFAULT_ENDPOINT
        raise InvalidRequest(f"{self.name} holds no requests: write one JSON object a line, as in examples/requests.jsonl")

    def upload(self, ctx: Context) -> FileObject:
        """Store the file. Whatever its name was: what makes it a batch file are its lines."""
        return files.upload(ctx, f"{Path(self.name).stem or 'requests'}.jsonl", "batch", self._chunks())

    def _chunks(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """A readable file, or standard input for `-`, kept aside for the length of the command. Raises UsageError, InvalidRequest."""
    if str(path) == "-":
        with tempfile.NamedTemporaryFile(prefix="specbatch-", suffix=".jsonl") as aside:
            shutil.copyfileobj(sys.stdin.buffer, aside)
            aside.flush()
            yield _checked(Source(Path(aside.name), "stdin"))
    else:
        yield _checked(Source(path, str(path)))


def _checked(source: Source) -> Source:
    if source.path.is_dir():
        raise UsageError(f"{source.name} is a directory: give a file with one JSON request a line")
    if not source.path.exists():
        raise UsageError(f"there is no file {source.name}: check the path, or try examples/requests.jsonl")
    if not source.path.is_file():
        raise UsageError(f"{source.name} is no regular file, and would be read more than once: pipe it in, and give - for its name")
    if source.path.stat().st_size == 0:
        raise InvalidRequest(f"{source.name} is empty: write one JSON request a line, as in examples/requests.jsonl")
    return source
