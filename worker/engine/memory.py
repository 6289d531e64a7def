"""Memory and processes of an engine: what started since, what it holds at most, and its end."""

from __future__ import annotations

import contextlib

import psutil

END_SECONDS = 10.0  # between asking a process to end and killing it
TRACKER = "resource_tracker"  # Python's own helper, shared by every spawn of this process: it ends with its parent


class Processes:
    """The processes that this one has started since `watch`, and their peak of resident memory over the readings taken."""

    def __init__(self) -> None:
        self._before: frozenset[int] | None = None
        self._watched: list[psutil.Process] = []
        self._peak = 0

    def begin(self) -> None:
        """Remember the children that are not ours; what starts from now on is."""
        self._before = frozenset(child.pid for child in psutil.Process().children())

    def refresh(self) -> list[psutil.Process]:
        """The engine's processes now, with their descendants. Those seen once are kept: an orphan still has to be ended."""
        if self._before is None:
            return []  # nothing was started yet: all children are others'
        own = [child for child in psutil.Process().children() if child.pid not in self._before and not _is_tracker(child)]
        seen = {process.pid: process for process in self._watched if process.is_running()}
        for child in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen |= {process.pid: process for process in (child, *child.children(recursive=True))}
        self._watched = list(seen.values())
        return self._watched

    def peak_bytes(self) -> int | None:
        """Peak resident bytes over all readings, this one included; shared pages count once a process. None before any process ran."""
        total = 0
        for process in self.refresh():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_info().rss
        self._peak = max(self._peak, total)
        return self._peak or None

    def end(self) -> None:
        """End every process of the engine: terminate, then kill what is left. Blocks for END_SECONDS at most, twice."""
        left = self.refresh()
        for signal in (psutil.Process.terminate, psutil.Process.kill):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    signal(process)
            _, left = psutil.wait_procs(left, timeout=END_SECONDS)
        self._watched = []


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any(TRACKER in part for part in process.cmdline())
    except psutil.Error:
        return False
