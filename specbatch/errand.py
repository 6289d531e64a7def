"""A process that is sent on one errand: it gets a line, tells lines back, and is gone with its engine when it, or whoever sent it, ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping

from specbatch.errors import EngineStartError
from specbatch.processes import ERROR_PREFIX

STOP_SECONDS = 30.0


def send(module: str, message: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Run `python -m module`; yields the lines of its standard output as they come. `environment` carries the settings.

    An engine that dies takes nothing else with it, and its memory comes back whole. Raises EngineStartError with the process's last words.
    Leaving the iteration ends the process and its engine.
    """
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,  # the engine's processes are in its group
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(message + "\n")
                process.stdin.flush()
            yield from process.stdout
            if process.wait() != 0:
                words.seek(0)
                raise EngineStartError(_last_words(words.read(), process.returncode))
        finally:
            _end(process)


def receive() -> str:
    """In the process: the message. From here on it gets SIGINT when nobody is left to tell."""
    message = sys.stdin.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return message


def _end_with_parent() -> None:
    """Whoever sent this process holds the other end of standard input."""
    while sys.stdin.readline():
        pass
    os.kill(os.getpid(), signal.SIGINT)


def _end(process: subprocess.Popen[str]) -> None:
    """Its standard input closes first: the process takes that as the wish to end, also when this one is killed."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(said: str, code: int) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    if told:
        return told[-1]
    return f"the process ended with exit code {code}: {lines[-1].strip() if lines else 'it said nothing'}"
