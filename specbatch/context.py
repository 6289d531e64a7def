"""What every use case needs: the settings, the database and the queue. Made once by each process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specbatch.database import Database
from specbatch.queue import Queue
from specbatch.settings import Settings


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    database: Database
    queue: Queue | None  # a process that only submits and reads needs none: the reconciler publishes


@contextmanager
def opened(settings: Settings, redis_url: str | None = None) -> Iterator[Context]:
    """A context whose connections close with it."""
    database = Database(settings.sql_url)
    queue = None if redis_url is None else Queue(redis_url)
    try:
        yield Context(settings, database, queue)
    finally:
        if queue is not None:
            queue.close()
        database.close()
