"""Validation: a file's lines become rows and shards, or a list of everything that is wrong with them. Resumable, in constant memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from specbatch.classify import classify
from specbatch.context import Context
from specbatch.domain import Decision, Mode, TaskType
from specbatch.lines import Problem, Request, parse, read
from specbatch.service import files as stored
from specbatch.serving import offered_modes, resolve_model, served_names
from specbatch.store import files, jobs, rows, shards, workers

CHUNK_ROWS = 500
SHARD_BYTES = 8 * 1024**2
LEASE_SECONDS = 60.0
REMEMBER_WORKERS_SECONDS = 86_400.0


def ingest_next(ctx: Context, owner: str) -> bool:
    """Validate the oldest waiting batch. False when none waits."""
    with ctx.database.write() as tx:
        job = jobs.lease_next(tx, owner, LEASE_SECONDS, jobs.to_validate())
        if job is None:
            return False
        rows.drop(tx, job["id"])
        known = files.get(tx, job["input_file_id"]) is not None
        models = offered(ctx, tx)
    path = stored.path(ctx, job["input_file_id"])
    if not known or not path.exists():
        _fail(ctx, job, [Problem("invalid_request", f"Cannot find file {job['input_file_id']}, or it is not accessible", "file_id")])
        return True
    reading = _Reading(ctx, job, models)
    for chunk in _chunks(reading.requests(read(path, ctx.settings.max_line_bytes))):
        with ctx.database.write() as tx:
            if not jobs.renew(tx, job, LEASE_SECONDS):
                return True
            rows.add(tx, chunk)
    _conclude(ctx, job, reading)
    return True


class _Reading:
    """One pass over a file. Remembers what the lines have in common, and their problems."""

    def __init__(self, ctx: Context, job: jobs.Job, models: Mapping[str, str]) -> None:
        self._settings, self._job, self._models = ctx.settings, job, models
        self._task = TaskType(job["named_task"]) if job["named_task"] else None
        self._mode = Mode(job["named_mode"]) if job["named_mode"] else offered_modes(ctx.settings)[0]
        self._open: dict[Mode, tuple[int, int, int]] = {}  # mode -> its open shard, the rows and the bytes in it
        self._shards = 0
        self.model_name = ""
        self.problems: list[Problem] = []
        self.count = 0

    def requests(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
        for number, line in lines:
            self.count += 1
            request, problems = parse(line, number, self._job["endpoint"], self._settings.max_line_bytes)
            self.problems += problems
            if self.count == self._settings.max_batch_rows + 1:
                self.problems.append(
                    Problem("too_many_requests", f"The batch has more than {self._settings.max_batch_rows} requests: split it.")
                )
                return
            if request is not None:
                self.problems += self._model_problems(request, number)
                yield from self._row(request, number)

    def _model_problems(self, request: Request, number: int) -> Iterator[Problem]:
        if not request.model:
            return
        if request.model not in self._models:
            offered = ", ".join(sorted(self._models))
            message = f"The provided model '{request.model}' is not supported by the Batch API. Workers here offer: {offered}."
            yield Problem("model_not_found", message, "body.model", number)
        elif self.model_name and self._models[request.model] != self._models[self.model_name]:
            message = f"The model '{request.model}' does not match the rest of the batch, which uses '{self.model_name}'."
            yield Problem("mismatched_model", message, "body.model", number)
        self.model_name = self.model_name or (request.model if request.model in self._models else "")

    def _row(self, request: Request, number: int) -> Iterator[dict[str, Any]]:
        try:
            body = json.dumps(request.body, allow_nan=False, separators=(",", ":"))
        except ValueError:
            self.problems.append(
                Problem("invalid_json_line", "A number in this line is too large for JSON (it reads as infinity).", "body", number)
            )
            return
        decision = self._decide(request.body)
        yield {
            "job_id": self._job["id"],
            "row_index": number - 1,
            "shard_no": self._shard_for(decision.mode, len(body)),
            "custom_id": request.custom_id,
            "body": body,
            "task": decision.task,
            "mode": decision.mode,
            "reason": decision.reason,
        }

    def _decide(self, body: Mapping[str, Any]) -> Decision:
        return Decision(classify(body, self._task).task, self._mode, "the mode was named by hand")

    def _shard_for(self, mode: Mode, size: int) -> int:
        shard_no, count, total = self._open.get(mode, (-1, 0, 0))
        if shard_no < 0 or count >= self._settings.shard_rows or total + size > SHARD_BYTES:
            shard_no, count, total = self._shards, 0, 0
            self._shards += 1
        self._open[mode] = (shard_no, count + 1, total + size)
        return shard_no

    @property
    def model(self) -> str:
        return self._models[self.model_name]


def _conclude(ctx: Context, job: jobs.Job, reading: _Reading) -> None:
    with ctx.database.read() as tx:
        for row_index, custom_id, first in rows.duplicates(tx, job["id"]):
            message = f"The custom_id '{custom_id}' is a duplicate of the request on line {first + 1}."
            reading.problems.append(Problem("duplicate_custom_id", message, "custom_id", row_index + 1))
    if reading.count == 0:
        reading.problems.append(Problem("empty_file", "The input file holds no requests."))
    if reading.problems:
        _fail(ctx, job, sorted(reading.problems, key=lambda problem: problem.line or 0))
        return
    with ctx.database.write() as tx:
        if jobs.renew(tx, job, 0.0):
            shards.add_all(tx, job["id"], reading.model)
            jobs.validated(tx, job, model=reading.model, rows=reading.count)


def _fail(ctx: Context, job: jobs.Job, problems: list[Problem]) -> None:
    with ctx.database.write() as tx:
        if jobs.renew(tx, job, 0.0):
            rows.drop(tx, job["id"])
            jobs.invalid(tx, job, {"object": "list", "data": [problem.entry() for problem in problems]})


def offered(ctx: Context, tx: sa.Connection) -> dict[str, str]:
    """Every name a request may use -> the model behind it: this machine's own, and that of each worker seen within a day."""
    names = dict.fromkeys(served_names(ctx.settings), resolve_model(ctx.settings))
    for worker in workers.alive(tx, REMEMBER_WORKERS_SECONDS):
        names |= dict.fromkeys(worker["names"], worker["model"])
    return names


def _chunks(values: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    size = 0
    for value in values:
        chunk.append(value)
        size += len(value["body"])
        if len(chunk) >= CHUNK_ROWS or size >= SHARD_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
