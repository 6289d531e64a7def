"""The services under a command or a client: found where the settings say, or embedded and started here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from specbatch import embedded, migration
from specbatch.context import Context, opened
from specbatch.errors import ServiceUnavailable
from specbatch.queue import Queue
from specbatch.settings import Settings


@contextmanager
def redis(settings: Settings) -> Iterator[str]:
    """The URL of a Redis that answers. Raises ServiceUnavailable."""
    with embedded.valkey(settings) as url:
        if settings.redis_url is not None:
            answers(url)
        yield url


def answers(redis_url: str) -> None:
    """Raises ServiceUnavailable, with what to do, for a Redis that does not."""
    queue = Queue(redis_url)
    try:
        queue.ping()
    except ServiceUnavailable as failure:
        raise ServiceUnavailable(
            f"{failure.message}. Start it, correct SPECBATCH_REDIS_URL (--redis-url), or unset it for an embedded one", code=failure.code
        ) from failure
    finally:
        queue.close()


def migrate(settings: Settings) -> None:
    """Bring the embedded database up to date; a database of the user's is only looked at. Raises ServiceUnavailable."""
    embedded.prepare(settings)
    if settings.database_url is None:
        migration.upgrade_database(settings)
    else:
        migration.check_database(settings)


@contextmanager
def database(settings: Settings) -> Iterator[Context]:
    """A context for commands that submit and read: they need no Redis. Raises ServiceUnavailable for a database that is not ready."""
    migration.check_database(settings)
    with opened(settings) as ctx:
        yield ctx


def bindable(host: str, port: int) -> str | None:
    """Why a server could not listen there, or None."""
    try:
        with socket.create_server((host, port)):
            return None
    except OSError as failure:
        return failure.strerror or str(failure)
