"""Celery's thread pool, made whole: stock threads can neither be terminated nor asked to give a task up."""

from __future__ import annotations

from typing import Any

from celery.concurrency.thread import TaskPool

from worker.host import EngineHost


class ShardPool(TaskPool):
    """A thread a shard. The threads only wait: the engine's loop does the work. Terminating hands every shard back at once."""

    host: EngineHost

    def on_terminate(self) -> None:
        self.host.ask_to_stop(0.0)
        self.executor.shutdown(wait=True, cancel_futures=True)

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """A single revoked shard runs on: its job's stop flag in SQL is what ends it."""


def pool_for(engine_host: EngineHost) -> type[ShardPool]:
    """Celery makes the pool itself, from a class: so the host travels on the class."""
    return type("ShardPool", (ShardPool,), {"host": engine_host, "__module__": __name__})
