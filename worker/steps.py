"""The engine as a step of Celery's start: up before anything is consumed, down after the pool has drained."""

from __future__ import annotations

import logging
import threading
from typing import Any

from celery import bootsteps
from celery.exceptions import WorkerTerminate
from celery.worker import components

from specbatch.context import Context
from specbatch.errors import EngineStartError, ServiceUnavailable
from specbatch.service import shards as service
from specbatch.serving import served_names
from worker.host import EngineHost
from worker.supervisor import Supervisor

log = logging.getLogger(__name__)

ALIVE_SECONDS = 5.0


def engine_step(ctx: Context, host: EngineHost, supervisor: Supervisor, worker_id: str) -> type[bootsteps.StartStopStep]:
    """A step class bound to this worker's engine."""

    class EngineStep(bootsteps.StartStopStep):
        requires = ("celery.worker.components:Timer",)

        def __init__(self, worker: Any, **options: Any) -> None:
            super().__init__(worker, **options)
            self._left = threading.Event()
            self._signs = threading.Thread(target=self._give_signs, name="signs-of-life", daemon=True)

        def start(self, worker: Any) -> None:
            log.info("starting an engine for %s in mode %s", host.model, host.mode)
            self._signs.start()
            try:
                host.start()
            except EngineStartError as failure:
                raise WorkerTerminate from failure  # `work` says why: Celery would print a traceback
            supervisor.start(worker)
            log.info("ready")

        def stop(self, worker: Any) -> None:
            supervisor.stop()
            self._left.set()
            if self._signs.is_alive():
                self._signs.join()
            host.stop()

        terminate = stop

        def _give_signs(self) -> None:
            while not self._left.wait(ALIVE_SECONDS if self._told(service.alive, **self._facts()) and host.ready else 1.0):
                host.check()
            self._told(service.alive, **self._facts() | {"mode": None})  # its names are still remembered, its engine is gone

        def _facts(self) -> dict[str, Any]:
            return {
                "model": host.model,
                "names": served_names(ctx.settings),
                "modes": supervisor.modes,
                "withheld": supervisor.withheld,
                "mode": host.mode if host.ready else None,
                "endpoints": host.endpoints if host.ready else None,
            }

        def _told(self, verb: Any, **facts: Any) -> bool:
            try:
                verb(ctx, worker_id, **facts)
            except ServiceUnavailable as failure:
                log.warning("%s", failure)
                return False
            except Exception:  # a worker that gives no more signs would work on unseen
                log.exception("this sign of life failed; the next one follows")
                return False
            return True

    # The pool starts after the engine and stops before it; Celery knows no other way to say so.
    components.Pool.requires = (components.Hub, EngineStep)
    return EngineStep
