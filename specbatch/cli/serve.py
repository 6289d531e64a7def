"""The processes of an installation: all of them together, or one each for a deployment."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from specbatch import embedded, services
from specbatch.cli import render
from specbatch.cli.flags import ENGINE, SERVER, WORK, Call, configured
from specbatch.errors import ServiceUnavailable
from specbatch.processes import Crew, signals_interrupt
from specbatch.serving import offered_modes, resolve_model

LOOK_SECONDS = 0.2


@configured(ENGINE, SERVER, WORK)
def up(call: Call) -> None:
    """Run everything on this machine: queue, database, reconciler, API and a worker. Until Ctrl-C."""
    settings = call.settings
    model, modes = resolve_model(settings), offered_modes(settings)
    address = f"http://{settings.host}:{settings.port}"
    services.migrate(settings)
    if (why := services.bindable(settings.host, settings.port)) is not None:
        raise ServiceUnavailable(
            f"cannot listen on {settings.host}:{settings.port}: {why}. Stop what uses it, or set SPECBATCH_PORT (--port)", code="port_taken"
        )
    with (
        contextlib.suppress(KeyboardInterrupt),
        services.redis(settings) as redis_url,
        signals_interrupt(),
        Crew(settings, redis_url, render.say) as crew,
    ):
        crew.start("api", "api")
        crew.start("reconciler", "worker.reconciler")
        crew.start("worker", "worker")
        if call.json:
            render.document({"api": address, "redis_url": redis_url, "model": model, "modes": modes})
        render.say(f"{address} serves {model} in {', '.join(modes)}; Ctrl-C stops everything")
        render.say(f"logs in {settings.home / 'logs'}")
        while True:
            crew.check()
            time.sleep(LOOK_SECONDS)


@configured(ENGINE, WORK)
def worker(call: Call) -> None:
    """Run one worker in the foreground. It serves --modes, one engine at a time, as the backlog asks."""
    _become("worker", call)


@configured(ENGINE, SERVER, WORK)
def reconciler(call: Call) -> None:
    """Run the process that validates, publishes, repairs and finishes batches, in the foreground."""
    _become("worker.reconciler", call)


@configured(ENGINE, SERVER)
def api(call: Call) -> None:
    """Run the HTTP API in the foreground."""
    _become("api", call)


def _become(module: str, call: Call) -> None:
    """This process goes on as that one: signals and exit codes need no passing on."""
    embedded.prepare(call.settings)
    if call.json:
        render.document({"module": module, "pid": os.getpid()})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", module], {**os.environ, **call.settings.environment()})
