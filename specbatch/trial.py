"""A trial: one engine, in one mode with one K, and the points to measure in it. What a trial's process is told, and what it tells back."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from specbatch import errand
from specbatch.domain import Mode, TaskType
from specbatch.tuning import Speed
from specbatch.workload import MAX_TOKENS

POINT_SECONDS = 20.0  # the longest window of one point: a slow machine answers fewer requests in it


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True)


class Point(_Value):
    task: TaskType
    load: int = Field(ge=1, description="Requests at once. Those of a load beyond LOADS are handed over together, and not replaced.")


class Trial(_Value):
    """K is the mode's: 0 in plain. `seconds` bounds the engine's start and the measuring; points that did not fit are left out."""

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


def run(trial: Trial, environment: Mapping[str, str], module: str = "worker.tune") -> Generator[Started | Measured, None, None]:
    """The trial in a process of its own, `python -m MODULE`: an engine that dies takes nothing with it, and memory comes back whole.

    `environment` carries the settings. Yields what the process tells, as it comes. Raises EngineStartError with the process's last words.
    Leaving the iteration ends the process and its engine.
    """
    for line in errand.send(module, trial.model_dump_json(), environment):
        if line.startswith('{"event":'):
            yield _EVENTS.validate_python(json.loads(line))
