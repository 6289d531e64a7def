"""The engine's home: an event loop in a thread of its own, one engine on it, and a new one when it dies."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from specbatch.domain import Mode, Reply
from specbatch.errors import EngineStartError
from specbatch.settings import Settings
from worker.engine import build
from worker.engine.base import Engine, EngineDied, EngineStatus
from worker.gate import Gate

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


class EngineHost:
    """Thread-safe outside; everything asynchronous happens on its own loop."""

    def __init__(self, settings: Settings, mode: Mode, make: Callable[[Settings, Mode], Engine] = build) -> None:
        self.settings = settings
        self.loop = asyncio.new_event_loop()
        self._make = make
        self._engine = make(settings, mode)
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine-loop", daemon=True)
        self.gate = Gate()
        self._ready = threading.Event()
        self._up = asyncio.Event()  # the same, for the loop
        self._revival: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self.start_seconds = 0.0  # of the latest start
        self.running = 0  # requests in the engine
        self._pause = FIRST_PAUSE_SECONDS
        self._useful = False  # the engine has answered something since it started
        self.failure: EngineStartError | None = None  # why no engine runs
        self.stopping = threading.Event()
        self._stop_at = float("inf")

    @property
    def model(self) -> str:
        return self._engine.model

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What the model answers, known once an engine has started."""
        return self._engine.endpoints

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def mode(self) -> Mode:
        return self._engine.mode

    def start(self) -> None:
        """Start the loop and the engine. Raises EngineStartError."""
        self._thread.start()
        self._wait(self._start(self._engine))

    def switch(self, mode: Mode) -> None:
        """End the engine and start one of another mode. The caller is alone inside the gate. Raises EngineStartError: then none runs."""
        self._wait(self._replace(mode))

    def stop(self) -> None:
        """End the engine and the loop. Safe after a failed start."""
        self.ask_to_stop(0.0)
        self._wait(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def ask_to_stop(self, within_seconds: float) -> None:
        """From now on nothing new starts; what runs has so many seconds to finish."""
        self._stop_at = min(self._stop_at, time.monotonic() + within_seconds)
        self.stopping.set()

    @property
    def out_of_time(self) -> bool:
        """Stopping, and the time is up, or there is no engine to use it."""
        return self.stopping.is_set() and (time.monotonic() >= self._stop_at or not self.ready)

    def wait_ready(self, seconds: float = math.inf) -> bool:
        """Wait for an engine that answers. False when this worker is stopping, or the seconds are over."""
        until = time.monotonic() + seconds
        while not self.stopping.is_set() and time.monotonic() < until:
            if self._ready.wait(0.2):
                return not self.stopping.is_set()
        return False

    def status(self) -> EngineStatus:
        return self._engine.status()

    async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
        """On the loop only. Raises EngineDied when the engine dies under this request, and has then seen to it that a new one starts.

        A request that comes while no engine runs waits for the next: it has no part in the death of the last.
        """
        engine = await self._living()
        self.running += 1
        try:
            reply = await engine.answer(request_id, endpoint, body)
            self._useful = True
            return reply
        except EngineDied:
            self._bury(engine)
            raise
        finally:
            self.running -= 1

    def check(self) -> None:
        """Notice an engine that died while nobody asked it anything."""
        engine = self._engine
        if engine.dead and self._ready.is_set():
            self.loop.call_soon_threadsafe(self._bury, engine)

    async def _living(self) -> Engine:
        while True:
            await self._up.wait()
            engine = self._engine
            if not engine.dead:
                return engine
            self._bury(engine)

    def _bury(self, engine: Engine) -> None:
        if engine is self._engine and self.ready:
            self._close()
            if not self.stopping.is_set():
                self._revival = self.loop.create_task(self._revive(engine))

    async def _revive(self, dead: Engine) -> None:
        if self._useful:
            self._pause = FIRST_PAUSE_SECONDS
        lived = time.monotonic() - self._started_at
        log.error("the engine died after %.0f s; a new one starts in %.0f s", lived, self._pause)
        await _cleared(dead)
        while not self.stopping.is_set():
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            engine = self._make(self.settings, dead.mode)
            try:
                await self._start(engine)
            except EngineStartError as failure:
                log.error("the engine does not start: %s; tried again in %.0f s", failure, self._pause)
                continue
            return

    async def _replace(self, mode: Mode) -> None:
        self._close()
        if self._revival is not None:
            self._revival.cancel()
        await _cleared(self._engine)
        await self._start(self._make(self.settings, mode))

    async def _start(self, engine: Engine) -> None:
        began = time.monotonic()
        self._engine = engine
        try:
            await engine.start()
        except Exception as failure:
            said = failure if isinstance(failure, EngineStartError) else EngineStartError(f"the engine does not start: {failure!r}")
            self.failure = said
            await _cleared(engine)
            raise said from failure
        self._started_at = time.monotonic()
        self.start_seconds = self._started_at - began
        self.failure = None
        self._useful = False
        self._ready.set()
        self._up.set()

    def _close(self) -> None:
        self._ready.clear()
        self._up.clear()

    async def _stop(self) -> None:
        self._close()
        if self._revival is not None:
            self._revival.cancel()
        await _cleared(self._engine)

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result()


async def _cleared(engine: Engine) -> None:
    """The engine is done with in any case. What it left, the next one's start shows."""
    try:
        await engine.stop()
    except Exception:
        log.exception("what is left of the engine could not be cleared away")
