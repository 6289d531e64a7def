"""`python -m api`: serve until SIGTERM. Exit code 3, with one line that says what to do, when a service it needs is not there."""

from __future__ import annotations

import errno
import socket
import sys
import tempfile

import uvicorn

from api.app import create_app
from specbatch import context, embedded, logs
from specbatch.errors import ServiceUnavailable, SpecbatchError
from specbatch.migration import check_database
from specbatch.processes import exit_with_parent, signals_interrupt
from specbatch.settings import Settings, load

STOP_SECONDS = 5  # for requests that run; a stream of results has no end of its own


def main() -> int:
    try:
        with signals_interrupt():
            serve(load())
    except KeyboardInterrupt:
        return 0  # uvicorn has stopped in good order, and raised the signal again
    except SpecbatchError as failure:
        print(f"specbatch: error: {failure.message}", file=sys.stderr)
        return failure.exit_code
    return 0


def serve(settings: Settings) -> None:
    """Raises ServiceUnavailable before the first request: no migrated database, no disk, no port."""
    logs.configure(settings)
    exit_with_parent()
    embedded.prepare(settings)
    check_database(settings)
    spool = settings.home / "spool"
    spool.mkdir(exist_ok=True)
    tempfile.tempdir = str(spool)  # where Starlette lays uploads while they arrive: /tmp is often small, or memory
    with listening(settings) as listener, context.opened(settings, settings.redis_url) as ctx:
        config = uvicorn.Config(create_app(ctx), log_level=settings.log_level, timeout_graceful_shutdown=STOP_SECONDS)
        uvicorn.Server(config).run(sockets=[listener])


def listening(settings: Settings) -> socket.socket:
    """The bound socket. Raises ServiceUnavailable naming the setting to change."""
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as failure:
        if failure.errno == errno.EADDRINUSE:
            advice = f"port {port} of {host} is taken: stop what listens there, or choose another with SPECBATCH_PORT (--port)"
            raise ServiceUnavailable(advice, code="port_taken") from failure
        advice = f"cannot listen on {host}:{port}: {failure.strerror}. Change SPECBATCH_HOST (--host) or SPECBATCH_PORT (--port)"
        raise ServiceUnavailable(advice, code="cannot_listen") from failure
    return listener


if __name__ == "__main__":
    sys.exit(main())
