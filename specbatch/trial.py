"""A trial: one engine, in one mode with one K, and the points to measure in it. What a trial's process is told, and what it tells back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from specbatch.domain import Mode, TaskType
from specbatch.errors import EngineStartError
from specbatch.processes import ERROR_PREFIX
from specbatch.tuning import Speed
from specbatch.workload import MAX_TOKENS

POINT_SECONDS = 20.0  # the longest window of one point: a slow machine answers fewer requests in it
STOP_SECONDS = 30.0


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True)


class Point(_Value):
    task: TaskType
    load: int = Field(ge=1, description="Requests at once. Those of a load beyond LOADS are handed over together, and not replaced.")


class Trial(_Value):
    """K is the mode's: 0 in plain. `seconds` bounds the measuring, without the start; points that did not fit are left out."""

    mode: Mode
    k: int = Field(ge=0)
    points: tuple[Point, ...]
    seconds: float = Field(gt=0)
    point_seconds: float = Field(POINT_SECONDS, gt=0)
    max_tokens: int = Field(MAX_TOKENS, ge=1)


class Started(_Value):
    event: Literal["started"] = "started"
    start_seconds: float
    vllm: str
    device: str


class Measured(_Value):
    event: Literal["measured"] = "measured"
    speed: Speed


Event = Annotated[Started | Measured, Field(discriminator="event")]
_EVENTS: TypeAdapter[Started | Measured] = TypeAdapter(Event)


def run(trial: Trial, environment: Mapping[str, str]) -> Iterator[Started | Measured]:
    """The trial in a process of its own, `python -m worker.tune`: an engine that dies takes nothing with it, and memory comes back whole.

    `environment` carries the settings. Yields what the process tells, as it comes. Raises EngineStartError with the process's last words.
    Leaving the iteration ends the process and its engine.
    """
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker.tune"],
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
                process.stdin.write(trial.model_dump_json() + "\n")
                process.stdin.flush()
            for line in process.stdout:
                if line.startswith('{"event":'):
                    yield _EVENTS.validate_python(json.loads(line))
            if process.wait() != 0:
                words.seek(0)
                raise EngineStartError(_last_words(words.read(), process.returncode))
        finally:
            _end(process)


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
    return f"the measuring process ended with exit code {code}: {lines[-1].strip() if lines else 'it said nothing'}"
