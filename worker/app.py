"""A worker process: one engine, one Celery consumer for its queue, and a bounded stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import uuid
from types import FrameType

import psutil
from celery.worker import WorkController, state

from specbatch.context import Context
from specbatch.errors import EngineStartError
from specbatch.queue import celery_app, queue_name
from specbatch.service import shards, tuning
from specbatch.serving import offered_modes, resolve_model
from worker.engine import build
from worker.fitness import unfit
from worker.host import EngineHost
from worker.pool import pool_for
from worker.runner import Runner
from worker.steps import engine_step
from worker.supervisor import Supervisor
from worker.tasks import register

log = logging.getLogger(__name__)


def work(ctx: Context, redis_url: str) -> None:
    """Serve until asked to stop. Raises EngineStartError when the engine does not start at all."""
    worker_id = f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}"  # fresh for each process: an owner is never mistaken for its successor
    offered = offered_modes(ctx.settings)
    withheld = unfit(ctx.settings, offered)
    modes = [mode for mode in offered if mode not in withheld]
    if not modes:
        raise EngineStartError("; ".join(f"mode {mode} cannot be served: {why}" for mode, why in withheld.items()))
    tuned = {mode: tuning.tuned(ctx, mode) for mode in modes}
    waiting = {mode: rows for mode, rows, _ in shards.backlog(ctx, resolve_model(ctx.settings)) if mode in modes}
    first = max(waiting, key=lambda mode: waiting[mode], default=modes[0])  # else its first act would be a second start
    host = EngineHost(ctx.settings, first, lambda _, mode: build(tuned[mode], mode))
    supervisor = Supervisor(ctx, host, modes, withheld, tuning.start_seconds(ctx))
    app = celery_app(redis_url)
    register(app, Runner(ctx, host, worker_id))
    app.steps["worker"].add(engine_step(ctx, host, supervisor, worker_id))
    queue = queue_name(host.model, host.mode)
    controller = WorkController(
        app=app,
        hostname=worker_id,
        pool_cls=pool_for(host),
        concurrency=ctx.settings.shards_in_flight,
        queues=[queue],
        loglevel=ctx.settings.log_level.upper(),
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    _stop_on_signals(host, ctx.settings.stop_seconds)
    controller.start()
    if host.failure is not None:
        raise host.failure


def _stop_on_signals(host: EngineHost, within_seconds: float) -> None:
    """The first signal asks: rows in flight may finish within the bound, the rest is handed back. The second is obeyed at once."""

    def obey(number: int, _: FrameType | None) -> None:
        if host.stopping.is_set():
            for child in psutil.Process().children(recursive=True):
                child.kill()
            os._exit(128 + number)
        host.ask_to_stop(within_seconds)
        state.should_stop = 0

    signal.signal(signal.SIGTERM, obey)
    signal.signal(signal.SIGINT, obey)
