"""Following a batch until it ends: readings now and then, patient with a service that is away for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from specbatch.domain import TERMINAL
from specbatch.errors import ServiceUnavailable
from specbatch.wire import BatchObject

POLL_SECONDS = 0.25
PATIENCE_SECONDS = 60.0  # for a database or a server that is away; nothing is lost meanwhile


def readings(look: Callable[[], BatchObject]) -> Iterator[BatchObject]:
    """What `look` finds, the last time of the ended batch. Raises what `look` raises; ServiceUnavailable only when it stays."""
    seen_at = time.monotonic()
    while True:
        try:
            batch = look()
        except ServiceUnavailable:
            if time.monotonic() - seen_at > PATIENCE_SECONDS:
                raise
        else:
            seen_at = time.monotonic()
            yield batch
            if batch.status in TERMINAL:
                return
        time.sleep(POLL_SECONDS)
