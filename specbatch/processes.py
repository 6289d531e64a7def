"""The processes that a command starts: the same interpreter, a log each, and an end that comes with the end of the command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import ClassVar

from specbatch.errors import EngineStartError, ServiceUnavailable
from specbatch.settings import Settings

PIPE_VARIABLE = "SPECBATCH_PARENT_PIPE"
ERROR_PREFIX = "specbatch: error: "
TOLD = (2, 3)  # exit codes of a process that has said what is wrong: starting it again would not help
KILL_SECONDS = 15.0  # beyond stop_seconds: an engine needs some to shut down
LOG_BYTES = 16 * 1024**2
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
SETTLED_SECONDS = 60.0  # a process that ran this long died of something new: the pause starts over
MOST_ACCIDENTS = 5


def exit_with_parent() -> None:
    """Called once by a child. It gets SIGTERM when its parent is gone, however the parent went, and SIGKILL when it does not obey in time.

    The parent holds the other end of a pipe, and the kernel closes that with the parent: this works on every POSIX system.
    A process that no command of ours started runs on.
    """
    told = os.environ.pop(PIPE_VARIABLE, None)
    if told is not None:
        descriptor, _, seconds = told.partition(":")
        os.set_inheritable(int(descriptor), False)
        threading.Thread(target=_outlive, args=(int(descriptor), float(seconds)), name="parent-watch", daemon=True).start()


def _outlive(descriptor: int, seconds: float) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    os.killpg(0, signal.SIGKILL)  # a child leads its own group: the engine's processes are in it


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that its children are stopped in the same way.

    Only the first raises KeyboardInterrupt. A later one kills the children, and so ends the wait for them: an exception could come
    at any point of the clean-up, and leave some of them running.
    """
    told = False

    def obey(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told and Child.living:
            for child in Child.living:
                child.kill()
        else:
            told = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, obey) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Child:
    """One process, leader of its own group: the terminal's Ctrl-C reaches only the command, which passes it on."""

    living: ClassVar[set[Child]] = set()

    def __init__(self, module: str, environment: Mapping[str, str], log: Path, stop_seconds: float) -> None:
        self.log = log
        self._rotate()
        self._said_before = log.stat().st_size if log.exists() else 0
        ours, self._pipe = os.pipe()
        told = {PIPE_VARIABLE: f"{ours}:{stop_seconds + KILL_SECONDS}", "PYTHONUNBUFFERED": "1"}
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module],  # -P: a folder "worker" where the user stands is not ours
                    env={**os.environ, **environment, **told},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(ours,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(ours)
        self.started_at = time.monotonic()
        Child.living.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def ask_to_stop(self) -> None:
        if self.poll() is None:
            self._process.terminate()

    def wait(self, seconds: float) -> bool:
        """Whether it ended within so many seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and whatever it left running, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError for a group of zombies
            os.killpg(self.pid, signal.SIGKILL)

    def bury(self) -> None:
        """Kill what is left of it. Safe to call twice."""
        self.kill()
        self._process.wait()
        Child.living.discard(self)
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def last_words(self) -> str:
        """The error it printed for people, else the last line of its log and where to read on."""
        with self.log.open("rb") as file:
            file.seek(max(self._said_before, self.log.stat().st_size - 65_536))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        told = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
        if told:
            return told[-1]
        return f"{lines[-1].strip() if lines else 'it said nothing'} (log: {self.log})"

    def _rotate(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))


class Crew:
    """The processes that a command needs, kept running until it leaves.

    A process that ends with one of its own error codes ends the command with its words; any other end is an accident, and it is
    started again, later each time.
    """

    def __init__(self, settings: Settings, redis_url: str, say: Callable[[str], None]) -> None:
        self._stop_seconds = settings.stop_seconds
        self._logs = settings.home / "logs"
        self._environment = settings.environment() | {"SPECBATCH_REDIS_URL": redis_url}
        self._say = say
        self._members: dict[str, _Member] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is KeyboardInterrupt:
            self._say("stopping: requests in flight may finish (Ctrl-C again ends at once)")
        self.stop()

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def start(self, name: str, module: str, **changes: str) -> None:
        """Start `python -m module` with this command's settings, some of them changed. `name` names its log."""
        member = _Member(module, self._environment | changes)
        member.child = self._spawn(name, member)
        self._members[name] = member

    def pid(self, name: str) -> int | None:
        child = self._members[name].child
        return None if child is None else child.pid

    def check(self) -> None:
        """Look after everyone. Raises EngineStartError or ServiceUnavailable with the words of a process that cannot go on."""
        for name, member in self._members.items():
            if member.child is None:
                if time.monotonic() >= member.start_again_at:
                    member.child = self._spawn(name, member)
            elif (code := member.child.poll()) is not None:
                self._mourn(name, member, member.child, code)

    def stop(self) -> None:
        """Ask everyone to end, wait as long as they were promised, and end who is left. An interrupt meanwhile ends them at once."""
        children = [member.child for member in self._members.values() if member.child is not None]
        try:
            for child in children:
                child.ask_to_stop()
            deadline = time.monotonic() + self._stop_seconds + KILL_SECONDS
            for child in children:
                child.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for child in children:
                child.bury()
            self._members.clear()

    def _spawn(self, name: str, member: _Member) -> Child:
        return Child(member.module, member.environment, self._logs / f"{name}.log", self._stop_seconds)

    def _mourn(self, name: str, member: _Member, child: Child, code: int) -> None:
        child.bury()
        member.child = None
        words = child.last_words()
        if code in TOLD:
            raise ServiceUnavailable(words) if code == ServiceUnavailable.exit_code else EngineStartError(words)
        settled = time.monotonic() - child.started_at > SETTLED_SECONDS
        member.accidents = 1 if settled else member.accidents + 1
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if member.accidents > MOST_ACCIDENTS:
            raise EngineStartError(f"the {name} {how}, {member.accidents} times in a row: {words}")
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** (member.accidents - 1), LONGEST_PAUSE_SECONDS)
        member.start_again_at = time.monotonic() + pause
        self._say(f"the {name} {how}; it is started again in {pause:.0f} s: {words}")


class _Member:
    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.module = module
        self.environment = environment
        self.child: Child | None = None
        self.accidents = 0
        self.start_again_at = 0.0
