"""One pass over a batch's lines: each becomes a row with its decision and shard, or a problem with its number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specbatch.context import Context
from specbatch.domain import Decision, Mode, Outcome, RowResult, TaskType
from specbatch.lines import ENDPOINTS, Problem, Request, compact, parse, quoted
from specbatch.service import files as stored
from specbatch.service.decider import Decider
from specbatch.store import jobs, rows

SHARD_BYTES = 8 * 1024**2
MOST_PROBLEMS = 1000  # listed of one batch: they are held in memory, in one column, and shown with each batch of a page
MOST_PROBLEMS_OF_A_LINE = 20
LONE_SURROGATE = "The body holds a lone surrogate (\\ud800 to \\udfff), which is no character: write the text as UTF-8."


class Reading:
    """One pass over a file. Remembers what the lines have in common, and their problems."""

    def __init__(self, ctx: Context, job: jobs.Job, models: Mapping[str, str], answered: Mapping[str, frozenset[str]]) -> None:
        self._ctx, self._settings, self._job, self._models = ctx, ctx.settings, job, models
        self._answered = answered
        self._decide: Decider | None = None
        self._open: dict[tuple[Mode, TaskType], tuple[int, int, int]] = {}  # its open shard, the rows and the bytes in it
        self._shards = 0
        self.lenient = job["on_invalid"] == "skip"
        self.model_name = ""
        self.problems: list[Problem] = []
        self.unlisted = 0
        self.count = 0
        self.settled = 0  # rows that ended here

    def requests(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[dict[str, Any], RowResult | None]]:
        """A row for each line that has a place in the batch, and how it ended where it has ended already."""
        for number, line in lines:
            self.count += 1
            if self.count > self._settings.max_batch_rows:
                self.problems = [
                    Problem("too_many_requests", f"The batch has more than {self._settings.max_batch_rows} requests: split it.")
                ]
                return
            request, problems = parse(line, number, self._job["endpoint"], self._settings.max_line_bytes)
            del line  # of a large request no form is held longer than it is needed
            if request is not None:
                problems += self._model_problems(request, number)
            if problems and self.lenient:
                yield self._refused(request.custom_id if request else "", number), refusal(number - 1, problems)
                continue
            self.note(problems)
            if request is not None:
                row = self._row(request, number)
                del request
                yield row

    def note(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            if len(self.problems) < MOST_PROBLEMS:
                self.problems.append(problem)
            else:
                self.unlisted += 1

    def _model_problems(self, request: Request, number: int) -> Iterator[Problem]:
        if not request.model:
            return
        if request.model not in self._models:
            offered = ", ".join(sorted(self._models))
            message = f"The provided model {quoted(request.model)} is not supported by the Batch API. Workers here offer: {offered}."
            yield Problem("model_not_found", message, "body.model", number)
        elif self.model_name and self._models[request.model] != self._models[self.model_name]:
            message = f"The model {quoted(request.model)} does not match the rest of the batch, which uses '{self.model_name}'."
            yield Problem("mismatched_model", message, "body.model", number)
        elif self._job["endpoint"] not in (answered := self._answered.get(self._models[request.model], ENDPOINTS)):
            message = f"The model {quoted(request.model)} cannot answer {self._job['endpoint']}. It answers: {', '.join(sorted(answered))}."
            yield Problem("unsupported_endpoint", message, "url", number)
        self.model_name = self.model_name or (request.model if request.model in self._models else "")

    def _row(self, request: Request, number: int) -> tuple[dict[str, Any], RowResult | None]:
        decision = self._decider(request)(request.body, number - 1)
        body = compact(request.body)
        if not _is_unicode(request.body, body):
            error = {"message": LONE_SURROGATE, "type": "invalid_request_error", "param": None, "code": "invalid_unicode"}
            ended = RowResult(number - 1, Outcome.REFUSED, 400, compact({"error": error}))
            return self._refused(request.custom_id, number) | {"body": body}, ended
        return {
            "job_id": self._job["id"],
            "row_index": number - 1,
            "shard_no": self._shard_for(decision, len(body)),
            "custom_id": request.custom_id,
            "body": body,
            "task": decision.task,
            "mode": decision.mode,
            "reason": decision.reason,
        }, None

    def _refused(self, custom_id: str, number: int) -> dict[str, Any]:
        return {
            "job_id": self._job["id"],
            "row_index": number - 1,
            "shard_no": rows.NO_SHARD,
            "custom_id": custom_id,
            "body": "",
            "task": TaskType.CHAT,
            "mode": Mode.PLAIN,
            "reason": "the line was refused in validation",
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
                    self._job["endpoint"],
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
    def model(self) -> str | None:
        """None where no line named one that is served."""
        return self._models.get(self.model_name)


def _is_unicode(body: Mapping[str, Any], text: str) -> bool:
    if "\\ud" not in text:  # of an ASCII dump: beyond this, pairs of surrogates are told from lone ones by encoding them
        return True
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def refusal(row_index: int, problems: list[Problem]) -> RowResult:
    """The ending of a line that is let through as an error line: the code of its first problem, the words of all."""
    entries = [problem.entry() for problem in problems[:MOST_PROBLEMS_OF_A_LINE]]
    message = f"Line {row_index + 1}: " + " ".join(entry["message"] for entry in entries)
    return RowResult(row_index, Outcome.REFUSED, error=(entries[0]["code"], message))
