"""The rows of one shard on their way through the engine: pushed from the shard's thread, answered on the engine's loop."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
from collections.abc import Sequence
from dataclasses import replace

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt, wait_random_exponential

from specbatch.domain import Claim, Outcome, Reply, Row, RowResult
from worker.engine.base import EngineDied
from worker.host import EngineHost

log = logging.getLogger(__name__)

TRIES = 3
Arrival = RowResult | EngineDied


class Feed:
    def __init__(self, host: EngineHost, claim: Claim) -> None:
        self._host = host
        self._claim = claim
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()

    def push(self, rows: Sequence[Row]) -> None:
        self._host.loop.call_soon_threadsafe(self._start, rows)

    def next(self, timeout: float) -> Arrival | None:
        """The next row that ended, or the engine's death; None when `timeout` seconds pass without either."""
        try:
            return self._arrivals.get(timeout=timeout) if timeout > 0 else self._arrivals.get_nowait()
        except queue.Empty:
            return None

    def arrived(self) -> list[RowResult]:
        """Every row that has ended and was not taken yet."""
        arrivals = iter(lambda: self.next(0.0), None)
        return [arrival for arrival in arrivals if isinstance(arrival, RowResult)]

    def cancel(self) -> None:
        """Abort what is still in the engine."""
        self._host.loop.call_soon_threadsafe(self._cancel)

    def _start(self, rows: Sequence[Row]) -> None:
        for row in rows:
            task = self._host.loop.create_task(self._answer(row))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _answer(self, row: Row) -> None:
        request_id = f"{self._claim.job_id}-{row.row_index}-{self._claim.attempt}"
        arrival: Arrival
        try:
            reply = await self._host.answer(request_id, self._claim.endpoint, row.body)
            if _server_failed(reply):  # asked first: the machinery of retries costs more than all else a worker does for a row
                reply = await _patiently()(self._host.answer, request_id, self._claim.endpoint, row.body)
            json.dumps(reply.body, allow_nan=False)  # what could not be stored must not spoil the rows that are stored with it
            arrival = _result(row, reply, self._host.running + 1)
        except EngineDied as death:
            arrival = death
        except Exception as failure:
            log.exception("%s: the engine's answer is unusable", request_id)
            message = f"The server failed to answer this request: {type(failure).__name__}: {failure}"
            arrival = RowResult(row.row_index, Outcome.FAILED, error=("internal_error", message))
        self._arrivals.put(arrival)


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


def _result(row: Row, reply: Reply, load: int) -> RowResult:
    if reply.status_code < 400:
        return RowResult(row.row_index, Outcome.SUCCEEDED, reply.status_code, reply.body, None, replace(reply.measurement, load=load))
    outcome = Outcome.FAILED if _server_failed(reply) else Outcome.REFUSED
    return RowResult(row.row_index, outcome, reply.status_code, reply.body)
