"""What the worker needs of an engine. One engine serves one model in one mode, and answers any number of requests at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from specbatch.domain import Mode, Reply


class EngineDied(Exception):
    """The engine can answer nothing more. Every request in flight is retryable; the engine must be started anew."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A reading taken now. Memory is the peak since start, in bytes: of the device, or of the engine's processes without one.

    Tokens and steps are counted since start. A step is one pass of the target over the requests that run.
    """

    running_requests: int
    peak_memory_bytes: int | None
    drafted_tokens: int
    accepted_tokens: int
    generated_tokens: int = 0
    steps: int = 0


class Engine(Protocol):
    model: str
    mode: Mode

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The paths that this model answers. Known once the engine has started."""

    async def start(self) -> None:
        """Load and become ready. Raises EngineStartError with words that say what to do."""

    async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
        """Answer one OpenAI body. A request at fault comes back as a 4xx Reply, never as an exception.

        Cancelling the awaiting task aborts the request. Raises EngineDied.
        """

    def status(self) -> EngineStatus: ...

    @property
    def dead(self) -> bool: ...

    async def stop(self) -> None:
        """Release device memory and end every child process. Safe to call twice, and after a failed start."""
