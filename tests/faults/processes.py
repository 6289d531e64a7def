"""The product's processes, started for real and in a blink: forked from a server that has imported everything, then killed at will."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.faults.waiting import until

Seam = tuple[str, str]  # a function of tests.faults.seams, and its argument

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["api.__main__", "worker.__main__", "worker.reconciler", "worker.engine.scripted", "tests.faults.seams"])


class Process:
    """`python -m MODULE` with an environment of its own; its output goes to a log."""

    def __init__(self, name: str, module: str, environment: Mapping[str, str], log: Path, seams: Sequence[Seam] = ()) -> None:
        self.name, self.log = name, log
        named = (("call_host", name), *seams)
        self._process = _FORKS.Process(target=_run, args=(module, dict(environment), str(log), named), name=name)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def send(self, number: int) -> None:
        if self._process.is_alive():
            with suppress(ProcessLookupError):  # it ended since
                os.kill(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until each thread has stopped: the signal reaches them one after another."""
        self.send(signal.SIGSTOP)
        threads = [int(task.name) for task in Path(f"/proc/{self.pid}/task").iterdir()]
        until(lambda: all(psutil.Process(thread).status() == psutil.STATUS_STOPPED for thread in threads), f"{self.name} stands still")

    def pending(self) -> bool:
        """Whether a signal waits to be taken."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except FileNotFoundError:
            return False
        return any(line.startswith(("SigPnd", "ShdPnd")) and int(line.split()[1], 16) for line in status.splitlines())

    def kill(self) -> None:
        """kill -9, and wait until the kernel has done it."""
        self.send(signal.SIGKILL)
        self.wait(10)

    def wait(self, seconds: float) -> int:
        """The exit code. Raises AssertionError when it does not end in so many seconds."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"{self.name} runs on after {seconds} s:\n{self.text()[-2000:]}"
        return self._process.exitcode

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def says(self, words: str, seconds: float = 30.0) -> None:
        """Wait until its log holds these words. Raises AssertionError when it ends without them."""

        def said() -> bool:
            ended = self.exit_code
            told = words in self.text()
            assert told or ended is None, f"{self.name} ended with {ended} and did not say {words!r}:\n{self.text()[-2000:]}"
            return told

        until(said, f"{self.name} says {words!r}", seconds, explain=self.stacks)

    def stacks(self) -> str:
        """The end of its log, and what its threads do now: for the message of a test that waited in vain."""
        before = len(self.text())
        self.send(signal.SIGUSR1)
        self._process.join(1.0)
        return self.text()[max(0, before - 2000) :]


def _die_with_parent() -> None:
    """A test that was killed leaves nothing running."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _run(module: str, environment: dict[str, str], log: str, seams: Sequence[Seam]) -> None:
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    faulthandler.register(signal.SIGUSR1)  # for who debugs a process that hangs
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    os.chdir(Path(log).parent)
    for name, argument in seams:
        getattr(importlib.import_module("tests.faults.seams"), name)(argument)
    sys.exit(importlib.import_module(module).main())
