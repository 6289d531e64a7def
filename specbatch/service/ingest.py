"""Validation: a file's lines become rows and shards, or a list of everything that is wrong with them. Resumable, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa

from specbatch.context import Context
from specbatch.database import moment
from specbatch.domain import RowResult
from specbatch.lines import Problem, read
from specbatch.service import files as stored
from specbatch.service import offers, webhooks
from specbatch.service.leases import kept
from specbatch.service.reading import Reading, refusal
from specbatch.store import files, jobs, results, rows, shards

T = TypeVar("T")
CHUNK_ROWS = 500
CHUNK_BYTES = 8 * 1024**2
DROPPED_AT_ONCE = 10_000


def ingest_next(ctx: Context, owner: str) -> bool:
    """Validate the oldest waiting batch. False when none waits."""
    with ctx.database.write() as tx:
        job = jobs.lease_next(tx, owner, ctx.settings.lease_seconds, jobs.to_validate())
        if job is None:
            return False
        known = files.get(tx, job["input_file_id"]) is not None
        models, answered = offers.models(ctx, tx, job["model"]), offers.endpoints(tx)
    path = stored.path(ctx, job["input_file_id"])
    reading = Reading(ctx, job, models, answered)
    with kept(ctx, job):
        if not _drop(ctx, job):
            return True
        if not known or not path.exists():
            reading.note([Problem("invalid_request", f"Cannot find file {job['input_file_id']}, or it is not accessible", "file_id")])
            _fail(ctx, job, reading)
            return True
        for chunk in _chunks(reading.requests(read(path, ctx.settings.max_line_bytes))):
            with ctx.database.write() as tx:
                if not jobs.renew(tx, job, ctx.settings.lease_seconds):
                    return True
                rows.add(tx, [row for row, _ in chunk])
                reading.settled += _settle(tx, job, reading.settled, [result for _, result in chunk if result is not None])
        _conclude(ctx, job, reading)
    return True


def _settle(tx: sa.Connection, job: jobs.Job, before: int, ended: list[RowResult]) -> int:
    """Rows that end in validation. They are counted into the job when its rows are complete."""
    if ended:
        results.add(tx, job["id"], 0, before, ended, moment(tx))
    return len(ended)


def _conclude(ctx: Context, job: jobs.Job, reading: Reading) -> None:
    with ctx.database.read() as tx:
        duplicates = rows.duplicates(tx, job["id"])
        while some := list(islice(duplicates, CHUNK_ROWS)):
            repeated = [
                Problem(
                    "duplicate_custom_id",
                    f"The custom_id '{custom_id}' is a duplicate of the request on line {first + 1}.",
                    "custom_id",
                    index + 1,
                )
                for index, custom_id, first in some
            ]
            if not reading.lenient:
                reading.note(repeated)
            elif not _let_through(ctx, job, reading, repeated):
                return
    if reading.count == 0:
        reading.problems.append(Problem("empty_file", "The input file holds no requests."))
    if reading.problems:
        _fail(ctx, job, reading)
        return
    with ctx.database.write() as tx:
        if jobs.renew(tx, job, 0.0):
            if reading.model is not None:
                shards.add_all(tx, job["id"], reading.model)
            jobs.validated(tx, job, model=reading.model, rows=reading.count)
            jobs.add_settled(tx, job["id"], {"settled": reading.settled}, None)


def _let_through(ctx: Context, job: jobs.Job, reading: Reading, repeated: list[Problem]) -> bool:
    """End rows whose custom_id an earlier row has. False when a newer attempt validates the job."""
    with ctx.database.write() as tx:
        if not jobs.renew(tx, job, ctx.settings.lease_seconds):
            return False
        ended = results.unwritten(tx, job["id"], [refusal((problem.line or 0) - 1, [problem]) for problem in repeated])
        rows.let_through(tx, job["id"], [result.row_index for result in ended])
        reading.settled += _settle(tx, job, reading.settled, list(ended))
    return True


def _fail(ctx: Context, job: jobs.Job, reading: Reading) -> None:
    listed = sorted(reading.problems, key=lambda problem: problem.line or 0)
    if reading.unlisted:
        listed.append(Problem("too_many_errors", f"{reading.unlisted} more problems are not listed: correct these first."))
    if not _drop(ctx, job):
        return
    with ctx.database.write() as tx:
        if jobs.renew(tx, job, 0.0):
            jobs.invalid(tx, job, {"object": "list", "data": [problem.entry() for problem in listed]})
            webhooks.announce(ctx, tx, job["id"])


def _drop(ctx: Context, job: jobs.Job) -> bool:
    """Forget the rows that were written, in steps: everybody waits for SQLite's one writer. False when a newer attempt has the job."""
    while True:
        with ctx.database.write() as tx:
            if not jobs.renew(tx, job, ctx.settings.lease_seconds):
                return False
            if not rows.drop(tx, job["id"], DROPPED_AT_ONCE):
                return True


def _chunks(values: Iterable[tuple[dict[str, Any], T]]) -> Iterator[list[tuple[dict[str, Any], T]]]:
    chunk: list[tuple[dict[str, Any], T]] = []
    size = 0
    for value in values:
        chunk.append(value)
        size += len(value[0]["body"])
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
