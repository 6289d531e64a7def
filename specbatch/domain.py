"""The vocabulary: statuses, their legal transitions, and the values that travel between the layers. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class JobStatus(StrEnum):
    """OpenAI's batch statuses, in the order in which a batch passes through them."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


JOB_TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.VALIDATING: frozenset({JobStatus.FAILED, JobStatus.IN_PROGRESS, JobStatus.CANCELLING}),
    JobStatus.IN_PROGRESS: frozenset({JobStatus.FINALIZING, JobStatus.CANCELLING}),
    JobStatus.FINALIZING: frozenset({JobStatus.COMPLETED, JobStatus.EXPIRED, JobStatus.CANCELLING}),
    JobStatus.CANCELLING: frozenset({JobStatus.CANCELLED}),
    JobStatus.FAILED: frozenset(),
    JobStatus.COMPLETED: frozenset(),
    JobStatus.EXPIRED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}
TERMINAL = frozenset(status for status, following in JOB_TRANSITIONS.items() if not following)


class ShardStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class Outcome(StrEnum):
    """How a row ended. A row without an outcome is still owed."""

    SUCCEEDED = "succeeded"
    REFUSED = "refused"  # the request itself is at fault: a 4xx answer
    FAILED = "failed"  # the server is at fault, and retries are spent
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class TaskType(StrEnum):
    CODE = "code"
    JSON = "json"
    EXTRACTION = "extraction"
    SUMMARY = "summary"
    CHAT = "chat"
    CREATIVE = "creative"


class Mode(StrEnum):
    """How an engine decodes. vLLM cannot change it in a running engine: one engine a mode."""

    PLAIN = "plain"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    SUFFIX = "suffix"


@dataclass(frozen=True, slots=True)
class Decision:
    """Which mode a row runs in, and why, in words that a user reads."""

    task: TaskType
    mode: Mode
    reason: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one row cost. Tokens are counts, times are seconds; None means that the engine did not say."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finish_reason: str | None = None
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    mean_acceptance_length: float | None = None
    steps_by_accepted: tuple[int, ...] | None = None  # how many steps accepted 0, 1, 2, ... drafted tokens


@dataclass(frozen=True, slots=True)
class Reply:
    """An engine's answer to one request: an HTTP status, an OpenAI body, and what it cost."""

    status_code: int
    body: dict[str, Any]
    measurement: Measurement = field(default_factory=Measurement)


@dataclass(frozen=True, slots=True)
class Row:
    """A request as a worker receives it."""

    row_index: int
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row's ending, ready to be settled. `body` is the response body as compact ASCII JSON (`lines.compact`), written as it is from
    here on; `error` is (code, message) where there was no response."""

    row_index: int
    outcome: Outcome
    status_code: int | None = None
    body: str | None = None
    error: tuple[str, str] | None = None
    measurement: Measurement | None = None
    load: int = 0  # requests that ran in the engine when this one ended


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write a shard's results, until a newer attempt takes it away."""

    job_id: str
    shard_no: int
    attempt: int
    endpoint: str
    mode: Mode
    task: TaskType
