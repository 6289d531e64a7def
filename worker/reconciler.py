"""`python -m worker.reconciler`: validates, publishes, sweeps and finalizes. Any number may run; each step is leased or guarded in SQL."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable

from specbatch import logs, migration
from specbatch.context import Context, opened
from specbatch.embedded import prepare, valkey
from specbatch.errors import ServiceUnavailable, SpecbatchError
from specbatch.processes import exit_with_parent
from specbatch.service import finalize, ingest, orphans, upkeep, webhooks
from specbatch.settings import load

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.25
ANNOUNCE_SECONDS = 1.0
TIDY_SECONDS = 3600.0
PAUSE_SECONDS = 2.0
RETURN_SECONDS = 3.0  # a worker tries a database that is down at least every two


class Reconciler:
    """Five loops, so that a large file being validated, or a webhook that waits for its answer, holds up nothing else."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._owner = f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}"
        self._stopped = threading.Event()
        self._outage = False
        self._to_publish = threading.Event()  # validation has left shards that no message names yet

    def run(self) -> None:
        """Work until `stop` is called."""
        idle, sweep = IDLE_SECONDS, self._ctx.settings.sweep_seconds
        loops = [
            threading.Thread(name="validate", target=self._repeat, args=(self._validate, idle, self._stopped)),
            threading.Thread(name="finalize", target=self._repeat, args=(self._finalize, idle, self._stopped)),
            threading.Thread(name="announce", target=self._repeat, args=(self._announce, ANNOUNCE_SECONDS, self._stopped)),
            threading.Thread(name="sweep", target=self._repeat, args=(self._sweep, sweep, self._to_publish)),
            threading.Thread(name="tidy", target=self._repeat, args=(self._tidy, TIDY_SECONDS, self._stopped)),
        ]
        for loop in loops:
            loop.start()
        for loop in loops:
            loop.join()

    def stop(self) -> None:
        self._stopped.set()
        self._to_publish.set()

    def _repeat(self, step: Callable[[], bool], idle_seconds: float, wake: threading.Event) -> None:
        paused = False
        while not self._stopped.is_set():
            try:
                busy = step()
                if paused:
                    log.info("resumed")
                paused = False
            except ServiceUnavailable as failure:
                if not paused:
                    log.warning("paused: %s", failure)
                busy, paused = False, True
            except Exception:
                log.exception("a step failed; it is tried again")
                busy, paused = False, True
            if not busy:
                wake.wait(PAUSE_SECONDS if paused else idle_seconds)
                if not self._stopped.is_set():
                    wake.clear()

    def _validate(self) -> bool:
        busy = ingest.ingest_next(self._ctx, self._owner)
        if busy:
            self._to_publish.set()
        return busy

    def _finalize(self) -> bool:
        return finalize.finalize_next(self._ctx, self._owner)

    def _announce(self) -> bool:
        return webhooks.deliver_next(self._ctx)

    def _tidy(self) -> bool:
        try:
            dropped = orphans.drop(self._ctx)
        except OSError as failure:
            log.warning("orphaned files are not removed: %s; it is tried again in an hour", failure)
            return False
        if dropped:
            log.info("removed %d orphaned files", dropped)
        return dropped >= orphans.MOST

    def _sweep(self) -> bool:
        if self._outage:
            upkeep.ping(self._ctx)
            self._stopped.wait(RETURN_SECONDS)  # the holders of leases that ran out meanwhile renew first
            self._outage = False
        try:
            tally = upkeep.sweep(self._ctx)
        except ServiceUnavailable as failure:
            self._outage = failure.code == "database_unavailable"
            raise
        if tally:
            log.info("swept: %s", tally)
        return False


def main() -> int:
    try:
        settings = load()
        logs.configure(settings)
        prepare(settings)
        migration.check_database(settings)
        with valkey(settings) as redis_url, opened(settings, redis_url) as ctx:
            reconciler = Reconciler(ctx)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: reconciler.stop())
            exit_with_parent()
            reconciler.run()
    except SpecbatchError as failure:
        print(f"specbatch: error: {failure.message}", file=sys.stderr)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
