"""The services that a generation talks to, in memory: they answer at once, and can be told to fail at any call."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specbatch.domain import TERMINAL, JobStatus, Mode, Outcome, TaskType
from specbatch.errors import Conflict, NotFound
from specbatch.service.batches import NewBatch
from specbatch.wire import (
    BatchObject,
    FileObject,
    InputDetails,
    Measured,
    OutputDetails,
    RequestCounts,
    ResultObject,
    RowDecision,
    RowMeasured,
    Usage,
)


@dataclass
class MemoryBatch:
    state: BatchObject
    results: list[ResultObject]
    answered: list[str] = field(default_factory=list)


class Services:
    """A Transport. `cut_at`: the call, counted in `calls`, that raises `cut` after it has done its work, as a kill between two steps."""

    model = "memory"

    def __init__(self) -> None:
        self.reset()

    def reset(self, cut_at: int = 0, cut: type[BaseException] = KeyboardInterrupt) -> None:
        self.files: dict[str, list[dict[str, Any]]] = {}
        self.batches: dict[str, MemoryBatch] = {}
        self.keys: dict[str, str] = {}
        self.calls, self.cut_at, self.cut = 0, cut_at, cut
        self.hold = False
        self.cut_short: JobStatus | None = None  # how the next batch ends, with half of its rows answered
        self.fail = self.refuse = ""
        self.answers: dict[str, str] = {}  # by prompt; others are answered with themselves in angle brackets
        self._numbers = itertools.count()

    def upload(self, name: str, chunks: Iterable[bytes]) -> FileObject:
        assert name.endswith(".jsonl")
        lines = [json.loads(line) for line in b"".join(chunks).decode().split("\n") if line]
        file_id = f"file-{next(self._numbers)}"
        self.files[file_id] = lines
        self._called()
        return FileObject(id=file_id, bytes=1, created_at=0, expires_at=None, filename=name, purpose="batch")

    def delete(self, file_id: str) -> None:
        del self.files[file_id]

    def create(self, new: NewBatch, run_key: str | None) -> BatchObject:
        batch_id = f"batch_{next(self._numbers)}"
        lines = self.files[new.input_file_id]
        status = JobStatus.IN_PROGRESS if self.hold else JobStatus.FAILED if self.refuse else JobStatus.COMPLETED
        short, self.cut_short = self.cut_short, None
        status = short or status
        state = _state(batch_id, new.input_file_id, status, len(lines), self.refuse)
        found = MemoryBatch(state, [])
        for number, line in enumerate(reversed(lines)):  # settled in another order than they were given
            if self.refuse or self.hold or (short and number % 2):
                continue
            found.results.append(self._result(line, len(found.results) + 1))
            found.answered.append(line["custom_id"])
        self.batches[batch_id] = found
        if run_key is not None:
            self.keys[run_key] = batch_id
        self._called()
        return state

    def find(self, run_key: str) -> BatchObject | None:
        self._called()
        found = self.keys.get(run_key)
        return None if found is None else self.batches[found].state

    def let_go(self, batch_id: str) -> None:
        self.keys = {key: value for key, value in self.keys.items() if value != batch_id}
        self._called()

    def get(self, batch_id: str) -> BatchObject:
        self._called()
        if batch_id not in self.batches:
            raise NotFound(f"No batch found with id '{batch_id}'.")
        return self.batches[batch_id].state

    def cancel(self, batch_id: str) -> BatchObject:
        batch = self.batches[batch_id]
        if batch.state.status in TERMINAL:
            raise Conflict("it has ended")
        batch.state = batch.state.model_copy(update={"status": JobStatus.CANCELLED})
        return batch.state

    def outcomes(self, batch_id: str, after: int, limit: int) -> list[ResultObject]:
        self._called()
        return self.batches[batch_id].results[after : after + limit]

    def attend(self, batch: BatchObject) -> str:
        return ""

    def close(self) -> None: ...

    def _called(self) -> None:
        self.calls += 1
        if self.calls == self.cut_at:
            raise self.cut

    def _result(self, line: dict[str, Any], sequence: int) -> ResultObject:
        prompt = line["body"]["messages"][-1]["content"]
        text = self.answers.get(prompt, f"<{prompt}>")
        failed = bool(self.fail) and text == self.fail
        body: dict[str, Any] = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
        if failed:
            body = {"error": {"message": "it was told to fail"}}
        return ResultObject(
            sequence=sequence,
            id=f"batch_req_{sequence}",
            custom_id=line["custom_id"],
            outcome=Outcome.REFUSED if failed else Outcome.SUCCEEDED,
            response={"status_code": 400 if failed else 200, "request_id": "r", "body": body},
            error=None,
            decision=RowDecision(task=TaskType.CHAT, mode=Mode.PLAIN, reason="as told"),
            measured=None if failed else _MEASURED,
        )


_MEASURED = RowMeasured(
    model="memory",
    mode=Mode.PLAIN,
    prompt_tokens=3,
    cached_tokens=1,
    generated_tokens=2,
    finish_reason="stop",
    queue_seconds=None,
    ttft_seconds=None,
    tpot_seconds=None,
    drafted_tokens=0,
    accepted_tokens=0,
    mean_acceptance_length=None,
)


def _state(batch_id: str, file_id: str, status: JobStatus, rows: int, refused: str) -> BatchObject:
    stamps = dict.fromkeys(("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"))
    problem = {"code": "model_not_found", "message": refused, "param": None, "line": 1}
    return BatchObject(
        id=batch_id,
        endpoint="/v1/chat/completions",
        model="memory",
        errors={"object": "list", "data": [problem]} if refused else None,
        input_file_id=file_id,
        completion_window="24h",
        status=status,
        output_file_id=None,
        error_file_id=None,
        created_at=int(time.time()),
        expires_at=int(time.time()) + 86_400,
        **{f"{name}_at": stamp for name, stamp in stamps.items()},
        request_counts=RequestCounts(total=rows, completed=rows, failed=0),
        usage=Usage(
            input_tokens=0,
            input_tokens_details=InputDetails(cached_tokens=0),
            output_tokens=0,
            output_tokens_details=OutputDetails(reasoning_tokens=0),
            total_tokens=0,
        ),
        metadata=None,
        measured=Measured(tokens_per_second=None, drafted_tokens=0, accepted_tokens=0, acceptance_rate=None, peak_memory_bytes=None),
    )
