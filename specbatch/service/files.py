"""Files: streamed to disk under their id, known to SQL once they are whole."""

from __future__ import annotations

import codecs
import errno
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from specbatch import lines
from specbatch.context import Context
from specbatch.errors import InvalidRequest, NotFound, ServiceUnavailable, TooLarge
from specbatch.store import files
from specbatch.wire import PURPOSES, FileObject

FIRST_LINE_BYTES = 1024**2  # a longer one is left to the batch's validation


def upload(ctx: Context, filename: str, purpose: str, chunks: Iterable[bytes], expires_seconds: float | None = None) -> FileObject:
    """Store a file. Raises InvalidRequest for a name, purpose or content that is of no use, TooLarge, ServiceUnavailable (disk full)."""
    if purpose not in PURPOSES:
        raise InvalidRequest(f"Invalid purpose {purpose!r}: use one of {', '.join(PURPOSES)}.", code="invalid_value", param="purpose")
    if purpose == "batch" and not filename.endswith(".jsonl"):
        raise InvalidRequest(f"A batch input file must be named *.jsonl, not {filename!r}.", code="invalid_file_format", param="file")
    if not filename.isprintable() or len(filename) > 1024:
        raise InvalidRequest("A file's name has at most 1024 characters, all of them printable.", code="invalid_value", param="file")
    file_id = f"file-{secrets.token_hex(12)}"
    with _written_whole(path(ctx, file_id)) as file:
        size = _copy(file, chunks, ctx.settings.max_file_bytes, text=purpose == "batch")
        if purpose == "batch":
            file.flush()
            _check_first_line(Path(file.name))
    try:
        with ctx.database.write() as tx:
            row = files.add(tx, file_id, purpose=purpose, filename=filename, size=size, expires_seconds=expires_seconds)
    except BaseException:
        path(ctx, file_id).unlink(missing_ok=True)  # a file that SQL does not know is nobody's
        raise
    return FileObject.of(row)


def get(ctx: Context, file_id: str) -> FileObject:
    with ctx.database.read() as tx:
        return FileObject.of(_existing(files.get(tx, file_id), file_id))


def page(
    ctx: Context, *, purpose: str | None = None, after: str | None = None, limit: int = 10_000, newest_first: bool = True
) -> list[FileObject]:
    with ctx.database.read() as tx:
        behind = None if after is None else _existing(files.get(tx, after), after)
        return [FileObject.of(row) for row in files.page(tx, purpose=purpose, after=behind, limit=limit, newest_first=newest_first)]


def delete(ctx: Context, file_id: str) -> None:
    with ctx.database.write() as tx:
        if not files.delete(tx, file_id):
            raise _unknown(file_id)
    path(ctx, file_id).unlink(missing_ok=True)


def content(ctx: Context, file_id: str) -> Path:
    """Where the bytes of a known file lie."""
    get(ctx, file_id)
    return path(ctx, file_id)


def path(ctx: Context, file_id: str) -> Path:
    return ctx.settings.files_dir / file_id


def output_id(job_id: str, kind: str) -> str:
    """The same id at every attempt to finalize a job, so that a second attempt replaces the file of the first."""
    return f"file-{hashlib.sha256(f'{job_id}/{kind}'.encode()).hexdigest()[:24]}"


def write_output(ctx: Context, file_id: str, text: Iterable[bytes]) -> int:
    """Write a file aside, then put it in place whole. Answers its size in bytes."""
    with _written_whole(path(ctx, file_id)) as file:
        for line in text:
            file.write(line)
        return file.tell()


def _copy(file: BinaryIO, chunks: Iterable[bytes], most: int, *, text: bool) -> int:
    size = 0
    decode = _Utf8()
    for chunk in chunks:
        size += len(chunk)
        if size > most:
            raise TooLarge(
                f"The file is larger than {most} bytes: split it, or raise SPECBATCH_MAX_FILE_BYTES.", code="file_too_large", param="file"
            )
        if text:
            decode(chunk)
        file.write(chunk)
    if size == 0:
        raise InvalidRequest("The file is empty.", code="empty_file", param="file")
    if text:
        decode(b"", final=True)
    return size


def _check_first_line(written: Path) -> None:
    """Later lines are validated with the batch; a file that already begins wrongly is most often not meant for one."""
    with written.open("rb") as file:
        starts = bool(file.read(FIRST_LINE_BYTES).strip())
    if not starts and written.stat().st_size > FIRST_LINE_BYTES:
        return
    number, line = next(lines.read(written, FIRST_LINE_BYTES), (0, b""))
    if number == 0:
        raise InvalidRequest("The file holds blank lines only.", code="empty_file", param="file")
    if len(line) > FIRST_LINE_BYTES:
        return
    problem = lines.load(line, number)
    if isinstance(problem, lines.Problem):
        message = f"Line 1 of the file is not a request: {problem.message} Each line must hold one JSON object."
        raise InvalidRequest(message, code=problem.code, param="file")


class _Utf8:
    """Refuses bytes that are not UTF-8 as they pass."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def __call__(self, chunk: bytes, *, final: bool = False) -> None:
        try:
            self._decoder.decode(chunk, final)
        except UnicodeDecodeError as wrong:
            message = f"The file is not UTF-8 ({wrong.reason}): save it as UTF-8 without changing its lines."
            raise InvalidRequest(message, code="invalid_file_format", param="file") from None


@contextmanager
def _written_whole(target: Path) -> Iterator[BinaryIO]:
    aside = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    except OSError as failure:
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ServiceUnavailable(
                f"No room left on the disk of {target.parent}: free some and try again.", code="disk_full"
            ) from failure
        raise
    finally:
        aside.unlink(missing_ok=True)


def _existing(row: files.File | None, file_id: str) -> files.File:
    if row is None:
        raise _unknown(file_id)
    return row


def _unknown(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id}", param="id")
