"""Sees to it that an engine's processes end with the process that started them, even when that is killed.

vLLM's engine process does not notice the death of its parent: it would keep the GPU for nobody. A watchdog, a small process of its own,
remembers its parent's descendants and holds the other end of a pipe that the kernel closes with the parent; then it kills them. Those too
young to be remembered carry a mark in their environment. The mark alone would not do: vLLM soon overwrites it with the process's title.
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
from contextlib import suppress
from functools import cache

import psutil

MARK_VARIABLE = "SPECBATCH_ENGINE_OF"
LOOK_SECONDS = 0.5
WAIT_SECONDS = 10.0


@cache
def guard_children() -> None:
    """From now on every process that this one starts ends with it. Started once a process, before the engine."""
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    ours, theirs = os.pipe()
    try:
        words = [sys.executable, "-P", "-m", "worker.engine.watchdog", str(os.getpid()), mark]
        # In a session of its own: the terminal's Ctrl-C is not meant for it.
        watchdog = subprocess.Popen(words, stdin=ours, stdout=subprocess.PIPE, start_new_session=True)
        assert watchdog.stdout is not None
        with watchdog.stdout as said:
            said.readline()  # until it watches: what starts before that, and whose parent is killed, would be nobody's
    finally:
        os.close(ours)
    os.environ[MARK_VARIABLE] = mark
    _held.append((watchdog, theirs))  # the pipe is open as long as this process lives; children do not inherit it


_held: list[tuple[subprocess.Popen[bytes], int]] = []


def descendants(parents: set[psutil.Process]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for parent in parents:
        with suppress(psutil.Error):
            found |= set(parent.children(recursive=True))
    return found


def marked(mark: str) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK_VARIABLE) == mark:
                found.add(process)
    return found


def main() -> None:
    try:
        parent, myself = psutil.Process(int(sys.argv[1])), psutil.Process()
    except psutil.NoSuchProcess:
        return  # killed before it had children
    known: set[psutil.Process] = set()
    print("watching", flush=True)
    while _lives(parent):
        known = descendants({parent}) - {myself}
        if select.select([0], [], [], LOOK_SECONDS)[0]:
            break
    known |= marked(sys.argv[2])
    known |= descendants(known)
    for process in known:
        with suppress(psutil.Error):  # psutil knows a process from a later one with its number
            process.kill()
    psutil.wait_procs(known, timeout=WAIT_SECONDS)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
