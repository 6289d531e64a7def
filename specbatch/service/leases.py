"""A batch in the hands of one reconciler: validating or finalizing it may take minutes, and a dead one shall be missed in seconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from specbatch.context import Context
from specbatch.errors import ServiceUnavailable
from specbatch.store import jobs

log = logging.getLogger(__name__)


@contextmanager
def kept(ctx: Context, job: jobs.Job) -> Iterator[None]:
    """Renew the lease of a job in the background. That proves nothing: whoever writes asks `jobs.renew` in the same transaction."""
    done = threading.Event()
    keeper = threading.Thread(name=f"keep-{job['id']}", target=_renew, args=(ctx, job, done), daemon=True)
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()


def _renew(ctx: Context, job: jobs.Job, done: threading.Event) -> None:
    while not done.wait(ctx.settings.lease_seconds / 3):
        try:
            with ctx.database.write() as tx:
                if not jobs.renew(tx, job, ctx.settings.lease_seconds):
                    return
        except ServiceUnavailable as failure:
            log.warning("%s: the lease could not be renewed: %s", job["id"], failure)
