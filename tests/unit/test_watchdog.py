"""Whoever starts an engine's processes may be killed: they end all the same, and nobody else does."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from tests.faults.waiting import gone, until
from worker.engine import watchdog

ROOT = Path(__file__).parents[2]
PARENT = """
import subprocess, sys, time
from worker.engine.watchdog import guard_children
{guard}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def started(guard: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(guard=guard)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def kill(parent: subprocess.Popen[str]) -> None:
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    if parent.stdout is not None:
        parent.stdout.close()


def test_children_end_with_a_parent_that_is_killed() -> None:
    guarded, child = started("guard_children()")
    other, bystander = started("")
    try:
        assert not gone(child)
        kill(guarded)
        until(lambda: gone(child), "the child ends")
        kill(other)
        assert not gone(bystander), "nobody guards this one: the watchdog is what ended the other"
    finally:
        for each in (guarded, other):
            kill(each)
        for process in (child, bystander):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_a_child_is_guarded_from_its_first_moment() -> None:
    """The parent is killed as soon as it has a child, however long the watchdog took to start."""
    for _ in range(3):
        guarded, child = started("guard_children()")
        kill(guarded)
        until(lambda child=child: gone(child), "the child ends")  # type: ignore[misc]


def test_a_parent_without_children_may_be_gone_before_the_watchdog_looks() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait()
    ended = subprocess.run([sys.executable, "-m", watchdog.__name__, str(parent.pid), "mark"], cwd=ROOT, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
