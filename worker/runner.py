"""A shard's way through a worker: claim, feed, settle in chunks, and hand back or close what cannot be finished here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from specbatch.context import Context
from specbatch.domain import Claim, Outcome, RowResult
from specbatch.errors import ServiceUnavailable
from specbatch.service import shards as service
from specbatch.service.shards import Standing, Taken
from worker.engine.base import EngineDied
from worker.feed import Feed
from worker.host import EngineHost

log = logging.getLogger(__name__)
T = TypeVar("T")


class Lasting(Protocol):
    """Does a piece of work once the database answers again."""

    def __call__(self, work: Callable[[], T]) -> T: ...


CHUNK_ROWS = 256  # as many as a shard has by default: rows that end together are settled together
CHUNK_SECONDS = 0.5  # from the first row that waits to be settled
LONGEST_PAUSE_SECONDS = 2.0  # between two tries to reach the database; the reconciler waits for it after an outage
WAIT_SECONDS = 0.5  # at the gate, between two looks at whether this worker stops
LONGEST_WAIT_SECONDS = 0.5  # so that a stop is noticed
LOST_DELAY_SECONDS = 1.0
STOPS = {Standing.CANCELLED: Outcome.CANCELLED, Standing.EXPIRED: Outcome.EXPIRED}


class Runner:
    def __init__(self, ctx: Context, host: EngineHost, owner: str) -> None:
        self._ctx = ctx
        self._host = host
        self._owner = owner

    def run(self, job_id: str, shard_no: int) -> bool:
        """Serve a shard, if it is to be had. Whatever happens here, the shard stays somebody's: ours, the queue's or the reconciler's.

        False when this worker stops before it could ask: the message is still good.
        """
        while self._host.wait_ready():
            suspect = self._lasting(partial(service.suspect, self._ctx, job_id, shard_no))
            with self._host.gate.alone(WAIT_SECONDS, self._goes_on) if suspect else self._host.gate.together() as entered:
                if entered and self._host.ready:  # else the engine died, or was exchanged, while we waited at the gate
                    self._serve(job_id, shard_no, alone=suspect)
                    return True
        return False

    def _serve(self, job_id: str, shard_no: int, *, alone: bool) -> None:
        claim = partial(service.claim, self._ctx, job_id, shard_no, model=self._host.model, mode=self._host.mode, owner=self._owner)
        taken = self._lasting(claim)
        if taken is None:
            log.info("%s/%d: not to be had; the message is dropped", job_id, shard_no)
        elif taken.suspect and not alone:
            service.hand_back(self._ctx, taken.claim, lost=False)  # it was lost since we asked
        else:
            _Serving(self._ctx, self._host, taken, self._lasting).serve()

    def _goes_on(self) -> bool:
        return not self._host.stopping.is_set()

    def _lasting(self, work: Callable[[], T]) -> T:
        """Do it once the database answers again, however long that takes; a worker whose time is up leaves it to others."""

        def log_pause(state: RetryCallState) -> None:
            log.warning("paused: %s", state.outcome and state.outcome.exception())

        patiently = Retrying(
            retry=retry_if_exception_type(ServiceUnavailable),
            wait=wait_random_exponential(multiplier=0.2, max=LONGEST_PAUSE_SECONDS),
            stop=lambda _: self._host.out_of_time,
            before_sleep=log_pause,
            reraise=True,
        )
        return patiently(work)


class _Serving:
    """One claimed shard while it runs."""

    def __init__(self, ctx: Context, host: EngineHost, taken: Taken, lasting: Lasting) -> None:
        self._ctx = ctx
        self._host = host
        self._taken = taken
        self._lasting = lasting
        self._feed = Feed(host, taken.claim)
        self._left = len(taken.owed)
        self._ready: list[RowResult] = []
        self._write_at = self._next_renewal()

    def serve(self) -> None:
        try:
            self._push()
            self._collect()
        except BaseException as failure:
            self._feed.cancel()
            self._hand_back(lost=not isinstance(failure, ServiceUnavailable))
            raise

    @property
    def _claim(self) -> Claim:
        return self._taken.claim

    def _push(self) -> None:
        owed = self._taken.owed
        for start in range(0, len(owed), service.WINDOW_ROWS):
            window = owed[start : start + service.WINDOW_ROWS]
            self._feed.push(self._lasting(partial(service.read_rows, self._ctx, self._claim, window)))

    def _collect(self) -> None:
        while self._left:
            if self._host.out_of_time:
                return self._give_up(lost=False)
            if not self._take():
                return self._give_up(lost=True)
            due = len(self._ready) >= min(CHUNK_ROWS, self._left) or time.monotonic() >= self._write_at
            if due and not self._goes_on(self._write()):
                return None
        return None

    def _take(self) -> bool:
        """Wait for a row to end, and take all that have. False when the engine died."""
        arrival = self._feed.next(max(0.0, min(self._write_at - time.monotonic(), LONGEST_WAIT_SECONDS)))
        if arrival is not None and not self._ready:
            self._write_at = min(self._write_at, time.monotonic() + CHUNK_SECONDS)
        while arrival is not None:
            if isinstance(arrival, EngineDied):
                return False
            self._ready.append(arrival)
            arrival = self._feed.next(0.0)
        return True

    def _next_renewal(self) -> float:
        return time.monotonic() + self._ctx.settings.lease_seconds / 3

    def _write(self) -> Standing:
        """Settle what is ready, which renews the lease too."""
        batch, self._ready = self._ready, []
        peak = self._host.status().peak_memory_bytes if len(batch) == self._left else None
        settle = partial(service.settle, self._ctx, self._claim, batch, owed=self._left, peak_memory_bytes=peak)
        standing = self._lasting(settle if batch else partial(service.renew, self._ctx, self._claim))
        self._left -= len(batch)
        self._write_at = self._next_renewal()
        return standing

    def _goes_on(self, standing: Standing) -> bool:
        """Whether the shard is still to be run. If its job was stopped, its remaining rows end here."""
        if standing is Standing.HELD:
            return True
        self._feed.cancel()
        if standing is Standing.FENCED:
            log.info("%s/%d: a newer attempt has this shard; nothing more is written", self._claim.job_id, self._claim.shard_no)
        else:
            self._lasting(lambda: service.close(self._ctx, self._claim, STOPS[standing]))
        return False

    def _give_up(self, *, lost: bool) -> None:
        """Keep what is finished, and let somebody else have the rest."""
        self._feed.cancel()
        self._ready += self._feed.arrived()
        if not self._ready or (self._goes_on(self._write()) and self._left):
            self._hand_back(lost=lost)

    def _hand_back(self, *, lost: bool) -> None:
        try:
            service.hand_back(self._ctx, self._claim, lost=lost, delay=LOST_DELAY_SECONDS if lost else 0.0)
        except ServiceUnavailable as failure:
            log.warning("%s/%d is left to its lease: %s", self._claim.job_id, self._claim.shard_no, failure)
