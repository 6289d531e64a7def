"""One engine at a time, several modes: which mode a worker serves next, and how it gets there without leaving anything behind."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery.platforms import EX_FAILURE
from celery.worker import state

from specbatch.context import Context
from specbatch.domain import Mode
from specbatch.errors import EngineStartError, ServiceUnavailable
from specbatch.queue import queue_name
from specbatch.service import shards as service
from worker.host import EngineHost

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
IDLE_LOOKS = 2  # in a row without work for the mode that runs, before its engine is given up for another's rows
SHARE = 10  # an engine serves at least so many times as long as it took to start: switching costs a tenth at most
PATIENCE_SECONDS = 60.0  # a mode's oldest row waits this long, or SHARE starts, before it may interrupt another mode's work


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for one mode: rows still owed, and how long the oldest has waited since the mode was last served."""

    rows: int
    seconds: float


def choose(current: Mode, busy: bool, waiting: Mapping[Mode, Waiting], *, served_seconds: float, start_seconds: float) -> Mode:
    """The mode to serve now. `busy`: the current mode has rows in the engine or in its queue.

    An idle engine goes to the mode with the most rows. A busy one is taken away only for rows that have waited out their patience,
    and only after it has served long enough to be worth its start: the longest-waiting mode then wins, so that none starves.
    """
    others = {mode: rows for mode, rows in waiting.items() if mode is not current and rows.rows > 0}
    if not others:
        return current
    if not busy:
        return max(others, key=lambda mode: (others[mode].rows, others[mode].seconds))
    patience = max(PATIENCE_SECONDS, SHARE * start_seconds)
    starving = {mode: rows.seconds for mode, rows in others.items() if rows.seconds >= patience}
    if starving and served_seconds >= SHARE * start_seconds:
        return max(starving, key=lambda mode: starving[mode])
    return current


class Supervisor:
    """Watches the backlog and switches the host's engine, and the queue that Celery consumes, together."""

    def __init__(
        self,
        ctx: Context,
        host: EngineHost,
        modes: Sequence[Mode],
        withheld: Mapping[Mode, str],
        starts: Mapping[Mode, float] | None = None,
    ) -> None:
        """`starts`: the seconds that each mode's engine took to start when it was measured."""
        self._ctx = ctx
        self._host = host
        self._modes = list(modes)
        self._starts = starts or {}
        self.withheld = dict(withheld)  # mode -> why it is configured and not served
        self._worker: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._since = time.monotonic()
        self._left = dict.fromkeys(modes, self._since)  # when each mode was last served
        self._idle = 0

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that this worker can still serve: one whose engine does not start is struck off."""
        return tuple(self._modes)

    def start(self, worker: Any) -> None:
        """`worker`: Celery's controller, whose consumer connects after this."""
        self._worker = worker
        if len(self._modes) > 1:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS) and not self._host.stopping.is_set():
            if getattr(self._worker.consumer, "task_consumer", None) is None:
                continue
            try:
                wanted = self._wanted()
                if wanted is not self._host.mode:
                    self._switch(wanted)
            except ServiceUnavailable:
                continue  # the sign of life says so
            except Exception:
                log.exception("this worker cannot switch its engine; it stops")
                self._give_up()

    def _wanted(self) -> Mode:
        now = time.monotonic()
        current = self._host.mode
        waiting = {
            mode: Waiting(rows, min(seconds, now - self._left[mode]))
            for mode, rows, seconds in service.backlog(self._ctx, self._host.model)
            if mode in self._modes
        }
        busy = self._host.gate.inside > 0 or current in waiting
        self._idle = 0 if busy else self._idle + 1
        served = now - self._since
        start = max([self._host.start_seconds, *(self._starts.get(mode, 0.0) for mode in waiting if mode is not current)])
        return choose(current, busy or self._idle < IDLE_LOOKS, waiting, served_seconds=served, start_seconds=start)

    def _switch(self, mode: Mode) -> None:
        before = self._host.mode
        log.info("switching from %s to %s", before, mode)
        self._on_consumer("cancel_task_queue", queue_name(self._host.model, before))
        with self._host.gate.alone(1.0, lambda: not self._host.stopping.is_set()) as entered:
            if not entered:
                return
            self._left[before] = time.monotonic()
            self._start_first_of([mode, before, *self._modes])
        self._since = time.monotonic()
        self._idle = 0
        self._on_consumer("add_task_queue", queue_name(self._host.model, self._host.mode))

    def _start_first_of(self, candidates: Sequence[Mode]) -> None:
        for mode in candidates:
            if mode in self._modes:
                try:
                    self._host.switch(mode)
                    return
                except EngineStartError as failure:
                    log.error("mode %s is no longer offered: its engine does not start: %s", mode, failure)
                    self._modes.remove(mode)
                    self.withheld[mode] = failure.message
        self._give_up()

    def _give_up(self) -> None:
        """A worker that serves nothing is replaced by whoever started it."""
        self._host.ask_to_stop(0.0)
        state.should_stop = EX_FAILURE

    def _on_consumer(self, verb: str, queue: str) -> None:
        """Celery's consumer belongs to its own loop: wait until that has obeyed."""
        obeyed = threading.Event()

        def obey() -> None:
            try:
                getattr(self._worker.consumer, verb)(queue)
            finally:
                obeyed.set()

        self._worker.consumer.call_soon(obey)
        while not obeyed.wait(0.2) and not self._host.stopping.is_set():
            pass
