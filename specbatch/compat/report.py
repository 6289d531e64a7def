"""What a comparison of target and draft found: values that the CLI renders, the API returns and the worker obeys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, computed_field

from specbatch.domain import Mode
from specbatch.errors import EngineStartError

Value = str | int | float | None


class Severity(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it runs, and probably gains less
    FAILURE = "failure"  # vLLM refuses it, or its drafts cannot mean what the target means


class Finding(BaseModel):
    """One point of comparison. A message of a warning or a failure names both values and what to do."""

    model_config = ConfigDict(frozen=True)

    check: str
    severity: Severity
    target_value: Value
    draft_value: Value
    message: str


@dataclass(frozen=True, slots=True)
class Point:
    """What is compared, and both values, before it is judged."""

    check: str
    target: Value
    draft: Value

    def ok(self, message: str) -> Finding:
        return self._judge(Severity.OK, message)

    def warning(self, message: str) -> Finding:
        return self._judge(Severity.WARNING, message)

    def failure(self, message: str) -> Finding:
        return self._judge(Severity.FAILURE, message)

    def _judge(self, severity: Severity, message: str) -> Finding:
        return Finding(check=self.check, severity=severity, target_value=self.target, draft_value=self.draft, message=message)


class Memory(BaseModel):
    """Bytes on each device, activations and captured graphs left out. None where a checkpoint does not say.

    `added_bytes` is the draft's weights and its KV cache for `kv_tokens` tokens; `added_percent` is that share of what the target alone
    takes for the same tokens. `kv_tokens` is what fits on the device beside both models, at most max_num_seqs full contexts;
    without a known device it is one full context. `kv_tokens_plain` is what would fit without the draft.
    """

    model_config = ConfigDict(frozen=True)

    target_weights_bytes: int | None
    draft_weights_bytes: int | None
    target_kv_bytes_per_token: int | None
    draft_kv_bytes_per_token: int | None
    device_memory_bytes: int | None = None
    kv_tokens: int | None = None
    kv_tokens_plain: int | None = None
    added_bytes: int | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def added_gb(self) -> float | None:
        return None if self.added_bytes is None else round(self.added_bytes / 1e9, 3)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def added_percent(self) -> float | None:
        if self.added_bytes is None or not self.target_weights_bytes or self.target_kv_bytes_per_token is None or self.kv_tokens is None:
            return None
        return round(100 * self.added_bytes / (self.target_weights_bytes + self.target_kv_bytes_per_token * self.kv_tokens), 1)


class Report(BaseModel):
    """What else tells the engine to set vLLM's options of these names.

    `use_heterogeneous_vocab`: same tokens, embeddings padded to different sizes. `parallel_drafting`: the draft was trained to draft all K
    tokens in one pass (PARD, arXiv 2504.18583).
    """

    model_config = ConfigDict(frozen=True)

    target: str
    draft: str
    mode: Mode
    findings: tuple[Finding, ...]
    memory: Memory
    use_heterogeneous_vocab: bool = False
    parallel_drafting: bool = False

    @computed_field  # type: ignore[prop-decorator]
    @property
    def compatible(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.FAILURE)

    @property
    def refusal(self) -> str:
        """What differs, point by point, in words that follow "but"; empty where nothing does."""
        messages = (failure.message.removesuffix(".") for failure in self.failures)
        return "; ".join(message[0].lower() + message[1:] if message.startswith("The ") else message for message in messages)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.WARNING)

    def require(self) -> None:
        """Raises EngineStartError with every failing point, before an engine is started in vain."""
        if self.failures:
            reasons = " ".join(f"[{finding.check}] {finding.message}" for finding in self.failures)
            raise EngineStartError(f"draft {self.draft} cannot speculate for {self.target} in mode {self.mode}: {reasons}")
