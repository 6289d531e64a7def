"""The rows of one shard on their way through the engine: pushed from the shard's thread, answered on the engine's loop."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Sequence

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt, wait_random_exponential

from specbatch.domain import Claim, Outcome, Reply, Row, RowResult
from specbatch.lines import compact
from specbatch.serving import slots
from worker.engine.base import EngineDied
from worker.host import EngineHost

log = logging.getLogger(__name__)

TRIES = 3
Arrival = RowResult | EngineDied
Answer = tuple[int, Reply | Exception, int]  # a row's index, what came of it, and the requests that ran beside it


class Feed:
    def __init__(self, host: EngineHost, claim: Claim) -> None:
        self._host = host
        self._claim = claim
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._tasks: list[asyncio.Task[None]] = []

    def push(self, rows: Sequence[Row]) -> None:
        self._host.loop.call_soon_threadsafe(self._start, rows)

    def next(self, timeout: float) -> Arrival | None:
        """The next row that ended, or the engine's death; None when `timeout` seconds pass without either."""
        try:
            row_index, answer, load = self._answers.get(timeout=timeout) if timeout > 0 else self._answers.get_nowait()
        except queue.Empty:
            return None
        if isinstance(answer, EngineDied):
            return answer
        try:
            return _result(row_index, answer, load)
        except Exception as failure:
            log.exception("%s: the engine's answer is unusable", self._request_id(row_index))
            message = f"The server failed to answer this request: {type(failure).__name__}: {failure}"
            return RowResult(row_index, Outcome.FAILED, error=("internal_error", message))

    def arrived(self) -> list[RowResult]:
        """Every row that has ended and was not taken yet."""
        arrivals = iter(lambda: self.next(0.0), None)
        return [arrival for arrival in arrivals if isinstance(arrival, RowResult)]

    def cancel(self) -> None:
        """Abort what is still in the engine."""
        self._host.loop.call_soon_threadsafe(self._cancel)

    def _start(self, rows: Sequence[Row]) -> None:
        self._tasks += [self._host.loop.create_task(self._answer(row)) for row in rows]

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _answer(self, row: Row) -> None:
        """On the engine's loop, where every millisecond is the engine's: what a reply means is seen to by the shard's thread."""
        request_id = self._request_id(row.row_index)
        answer: Reply | Exception
        try:
            answer = await self._host.answer(request_id, self._claim.endpoint, row.body)
            if _server_failed(answer):  # asked first: the machinery of retries costs more than all else a worker does for a row
                answer = await _patiently()(self._host.answer, request_id, self._claim.endpoint, row.body)
        except Exception as failure:
            answer = failure
        self._answers.put((row.row_index, answer, min(self._host.running + 1, slots(self._host.settings))))

    def _request_id(self, row_index: int) -> str:
        return f"{self._claim.job_id}-{row_index}-{self._claim.attempt}"


def _server_failed(reply: Reply) -> bool:
    return reply.status_code == 429 or reply.status_code >= 500


def _patiently() -> AsyncRetrying:
    """The server's own failures are tried again; after the last try the failure is the answer."""
    return AsyncRetrying(
        retry=retry_if_result(_server_failed),
        stop=stop_after_attempt(TRIES - 1),
        wait=wait_random_exponential(multiplier=0.2, max=5),
        retry_error_callback=_last_reply,
    )


def _last_reply(state: RetryCallState) -> Reply:
    assert state.outcome is not None
    reply = state.outcome.result()
    assert isinstance(reply, Reply)
    return reply


def _result(row_index: int, answer: Reply | Exception, load: int) -> RowResult:
    """Raises what the engine raised, and ValueError or TypeError for a body that cannot be stored."""
    if isinstance(answer, Exception):
        raise answer
    status, body = int(answer.status_code), compact(answer.body)
    if status < 400:
        return RowResult(row_index, Outcome.SUCCEEDED, status, body, None, answer.measurement, load)
    return RowResult(row_index, Outcome.FAILED if _server_failed(answer) else Outcome.REFUSED, status, body)
