"""Waiting for conditions, never for time."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

LOOK_SECONDS = 0.03
PATIENCE_SECONDS = 45.0


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS, explain: Callable[[], object] = lambda: "") -> None:
    """Raises AssertionError when the condition does not come true in time; the deadline only bounds a test that fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain until {what}: {explain()}"
        time.sleep(LOOK_SECONDS)


def gone(process: psutil.Process) -> bool:
    """Whether it has ended. A zombie has: in a container nobody may ever reap it."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
