"""Validation: a file's lines become rows and shards, or a list of everything that is wrong with them. Resumable, in constant memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specbatch.context import Context
from specbatch.domain import Decision, Mode, TaskType
from specbatch.lines import Problem, Request, parse, read
from specbatch.service import files as stored
from specbatch.service import offers
from specbatch.service.decider import Decider
from specbatch.service.leases import kept
from specbatch.store import files, jobs, rows, shards

CHUNK_ROWS = 500
SHARD_BYTES = 8 * 1024**2


def ingest_next(ctx: Context, owner: str) -> bool:
    """Validate the oldest waiting batch. False when none waits."""
    with ctx.database.write() as tx:
        job = jobs.lease_next(tx, owner, ctx.settings.lease_seconds, jobs.to_validate())
        if job is None:
            return False
        rows.drop(tx, job["id"])
        jobs.renew(tx, job, ctx.settings.lease_seconds)  # many rows take long to drop
        known = files.get(tx, job["input_file_id"]) is not None
        models = offers.models(ctx, tx)
    path = stored.path(ctx, job["input_file_id"])
    if not known or not path.exists():
        _fail(ctx, job, [Problem("invalid_request", f"Cannot find file {job['input_file_id']}, or it is not accessible", "file_id")])
        return True
    reading = _Reading(ctx, job, models)
    with kept(ctx, job):
        for chunk in _chunks(reading.requests(read(path, ctx.settings.max_line_bytes))):
            with ctx.database.write() as tx:
                if not jobs.renew(tx, job, ctx.settings.lease_seconds):
                    return True
                rows.add(tx, chunk)
        _conclude(ctx, job, reading)
    return True


class _Reading:
    """One pass over a file. Remembers what the lines have in common, and their problems."""

    def __init__(self, ctx: Context, job: jobs.Job, models: Mapping[str, str]) -> None:
        self._ctx, self._settings, self._job, self._models = ctx, ctx.settings, job, models
        self._decide: Decider | None = None
        self._open: dict[tuple[Mode, TaskType], tuple[int, int, int]] = {}  # its open shard, the rows and the bytes in it
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
        decision = self._decider(request)(request.body, number - 1)
        yield {
            "job_id": self._job["id"],
            "row_index": number - 1,
            "shard_no": self._shard_for(decision, len(body)),
            "custom_id": request.custom_id,
            "body": body,
            "task": decision.task,
            "mode": decision.mode,
            "reason": decision.reason,
        }

    def _decider(self, request: Request) -> Decider:
        """Made for the first row: only then is the model known."""
        if self._decide is None:
            task, mode = self._job["named_task"], self._job["named_mode"]
            with self._ctx.database.read() as tx:
                self._decide = Decider.for_file(
                    self._ctx,
                    tx,
                    self._models.get(request.model, ""),
                    stored.path(self._ctx, self._job["input_file_id"]),
                    task=TaskType(task) if task else None,
                    mode=Mode(mode) if mode else None,
                )
        return self._decide

    def _shard_for(self, decision: Decision, size: int) -> int:
        kind = decision.mode, decision.task
        shard_no, count, total = self._open.get(kind, (-1, 0, 0))
        if shard_no < 0 or count >= self._settings.shard_rows or total + size > SHARD_BYTES:
            shard_no, count, total = self._shards, 0, 0
            self._shards += 1
        self._open[kind] = (shard_no, count + 1, total + size)
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
