"""Sees to it that an engine's processes end with the process that started them, even when that is killed.

vLLM's engine process does not notice the death of its parent: it would keep the GPU for nobody. A watchdog, a small process of its own,
holds the other end of a pipe that the kernel closes with the parent, and then kills whoever carries the parent's mark in its environment.
"""

from __future__ import annotations

import atexit
import os
import secrets
import subprocess
import sys
from contextlib import suppress
from functools import cache

import psutil

MARK_VARIABLE = "SPECBATCH_ENGINE_OF"


@cache
def guard_children() -> None:
    """From now on every process that this one starts ends with it. Started once a process, before the engine."""
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    ours, theirs = os.pipe()
    try:
        # Without the mark, in a session of its own: neither the kill nor the terminal's Ctrl-C is meant for it.
        words = [sys.executable, "-P", "-m", "worker.engine.watchdog", mark]
        watchdog = subprocess.Popen(words, stdin=ours, stdout=subprocess.DEVNULL, start_new_session=True)
    finally:
        os.close(ours)
    os.environ[MARK_VARIABLE] = mark
    atexit.register(_release, watchdog, theirs)  # until then the pipe is open as long as this process lives; children do not inherit it


def _release(watchdog: subprocess.Popen[bytes], pipe: int) -> None:
    os.close(pipe)
    watchdog.wait()


def marked(mark: str) -> list[psutil.Process]:
    """The processes of this user that carry the mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK_VARIABLE) == mark:
                found.append(process)
    return found


def main() -> None:
    mark = sys.argv[1]
    while os.read(0, 1):
        pass
    while left := marked(mark):  # one may start another while we look
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)
        if all(_ended(process) for process in left):
            return


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


if __name__ == "__main__":
    main()
