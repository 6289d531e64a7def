"""OpenAI's objects as the API answers them and the CLI prints them: integer Unix seconds, nulls written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field

from specbatch.domain import JobStatus, Mode, Outcome, TaskType
from specbatch.lines import answer

WINDOW_SECONDS = {"24h": 86_400}
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
PURPOSES: tuple[str, ...] = get_args(Purpose)


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> FileObject:
        return cls(
            id=row["id"],
            bytes=row["bytes"],
            created_at=int(row["created_at"]),
            expires_at=_second(row["expires_at"]),
            filename=row["filename"],
            purpose=row["purpose"],
        )


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Measured(BaseModel):
    """What a batch cost so far. Ours, beside OpenAI's fields."""

    tokens_per_second: float | None = Field(description="Generated tokens over the seconds from the first claim to the last settled row.")
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None = Field(description="Accepted over drafted tokens; null where nothing was drafted.")
    peak_memory_bytes: int | None


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: JobStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: Usage
    metadata: dict[str, str] | None
    measured: Measured

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> BatchObject:
        drafted, accepted = job["drafted_tokens"], job["accepted_tokens"]
        return cls(
            id=job["id"],
            endpoint=job["endpoint"],
            model=job["model"],
            errors=job["errors"],
            input_file_id=job["input_file_id"],
            completion_window=job["completion_window"],
            status=JobStatus(job["status"]),
            output_file_id=job["output_file_id"],
            error_file_id=job["error_file_id"],
            created_at=int(job["created_at"]),
            expires_at=int(job["expires_at"]),
            **{f"{name}_at": _second(job[f"{name}_at"]) for name in _STAMPED},
            request_counts=RequestCounts(total=job["rows"], completed=job["succeeded"], failed=job["settled"] - job["succeeded"]),
            usage=Usage(
                input_tokens=job["prompt_tokens"],
                input_tokens_details=InputDetails(cached_tokens=job["cached_tokens"]),
                output_tokens=job["generated_tokens"],
                output_tokens_details=OutputDetails(reasoning_tokens=0),
                total_tokens=job["prompt_tokens"] + job["generated_tokens"],
            ),
            metadata=job["metadata"],
            measured=Measured(
                tokens_per_second=_rate(job),
                drafted_tokens=drafted,
                accepted_tokens=accepted,
                acceptance_rate=round(accepted / drafted, 4) if drafted else None,
                peak_memory_bytes=job["peak_memory_bytes"],
            ),
        )


class RowDecision(BaseModel):
    task: TaskType
    mode: Mode
    reason: str


class RowMeasured(BaseModel):
    """What one row cost. Times are seconds; null where the engine did not say."""

    model: str
    mode: Mode
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finish_reason: str | None
    queue_seconds: float | None
    ttft_seconds: float | None
    tpot_seconds: float | None
    drafted_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float | None


class ResultObject(BaseModel):
    """How a row ended: OpenAI's output line, with its number in the order of settling, the decision, and what it cost."""

    sequence: int
    id: str
    custom_id: str | None
    outcome: Outcome
    response: dict[str, Any] | None
    error: dict[str, Any] | None
    decision: RowDecision
    measured: RowMeasured | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> ResultObject:
        return cls(
            sequence=row["sequence"],
            outcome=row["outcome"],
            decision=RowDecision(task=row["task"], mode=row["decided_mode"], reason=row["reason"]),
            measured=None if row["measured_at"] is None else RowMeasured(**{name: row[name] for name in RowMeasured.model_fields}),
            **answer(row),
        )


_STAMPED = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def _second(moment: float | None) -> int | None:
    return None if moment is None else int(moment)


def _rate(job: Mapping[str, Any]) -> float | None:
    if job["first_claim_at"] is None or job["last_settle_at"] is None:
        return None
    seconds = job["last_settle_at"] - job["first_claim_at"]
    return round(job["generated_tokens"] / seconds, 2) if seconds > 0 else None
