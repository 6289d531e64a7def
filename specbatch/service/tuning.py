"""What this model and machine measured: made by `tune`, read where modes are decided and engines are started."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import sqlalchemy as sa

from specbatch import costs, trial
from specbatch.agenda import TASKS, agenda
from specbatch.context import Context
from specbatch.database import Record
from specbatch.domain import Mode, TaskType
from specbatch.errors import EngineStartError
from specbatch.machine import Machine, this_machine
from specbatch.policy import DRAFTERS
from specbatch.serving import offered_modes, resolve_model, slots
from specbatch.settings import Settings
from specbatch.store import speeds
from specbatch.trial import Point, Trial
from specbatch.tuning import BULK, DEFAULT_K, LOADS, Speed, TuningTable, schedule

WORTH_A_START = 10.0  # seconds of measuring: an engine is not started for less
K_SETTING = {Mode.NGRAM: "ngram_tokens", **dict.fromkeys(DRAFTERS, "draft_tokens")}
_FIELDS = tuple(field.name for field in fields(Speed) if field.name != "estimated")


@dataclass(frozen=True, slots=True)
class Starting:
    mode: Mode
    k: int
    points: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A mode that did not start or died; the others go on."""

    mode: Mode
    k: int
    why: str


@dataclass(frozen=True, slots=True)
class Left:
    """The end: how many points the budget left for another run."""

    points: int


Progress = Starting | trial.Started | Speed | Failed | Left


def tune(
    ctx: Context,
    *,
    seconds: float,
    again: bool = False,
    tasks: Sequence[TaskType] = TASKS,
    loads: Sequence[int] = (*LOADS, BULK),
    every_k: bool = True,
) -> Iterator[Progress]:
    """Measure for so many seconds, engine starts included, and keep each point as it comes. Points that are kept are left out, unless
    `again`. Without `every_k` each mode runs with the K of the settings alone. Raises EngineStartError where plain does not start.
    """
    model, machine, until = resolve_model(ctx.settings), this_machine(ctx.settings), time.monotonic() + seconds
    with ctx.database.read() as tx:
        kept = [] if again else _of(speeds.of_model(tx, model), machine, ctx.settings)
    done = {(each.mode, each.k, Point(task=each.task, load=each.load)) for each in kept}
    to_do = agenda(ctx.settings, offered_modes(ctx.settings), tasks=tasks, loads=loads, done=done, every_k=every_k)
    start_seconds = max((each.start_seconds or 0.0 for each in kept), default=0.0)
    left = sum(len(points) for _, _, points in to_do)
    for mode, k, points in to_do:
        remaining = until - time.monotonic()
        if remaining - start_seconds < WORTH_A_START:
            break
        yield Starting(mode, k, len(points))
        environment = {**ctx.settings.environment(), "SPECBATCH_TOKENS_BY_BATCH_SIZE": ""}
        try:
            for event in trial.run(Trial(mode=mode, k=k, points=points, seconds=remaining), environment):
                if isinstance(event, trial.Measured):
                    with ctx.database.write() as tx:
                        speeds.put(ctx.database, tx, model, draft_of(ctx.settings, mode), machine, event.speed)
                    left -= 1
                    yield event.speed
                else:
                    start_seconds = event.start_seconds
                    yield event
        except EngineStartError as failure:
            if mode is Mode.PLAIN:
                raise
            yield Failed(mode, k, failure.message)
    yield Left(left)


def draft_of(settings: Settings, mode: Mode) -> str:
    """The second model that a mode's measurements belong to."""
    second = settings.draft if mode is Mode.DRAFT_MODEL else settings.eagle if mode in DRAFTERS else None
    return second or ""


def table(tx: sa.Connection, model: str) -> TuningTable:
    """The points of the device and the release measured last, with each mode's latest draft, and those between where a fit is good."""
    return TuningTable(costs.fill(measured(tx, model)))


def measured(tx: sa.Connection, model: str) -> tuple[Speed, ...]:
    """The same, without what is filled in."""
    found = speeds.of_model(tx, model)
    if not found:
        return ()
    machine = Machine(found[0]["device"], found[0]["vllm"])
    latest: dict[str, str] = {}
    for record in found:
        if Machine(record["device"], record["vllm"]) == machine:
            latest.setdefault(record["mode"], record["draft"])
    return tuple(
        _speed(record)
        for record in found
        if Machine(record["device"], record["vllm"]) == machine and record["draft"] == latest.get(record["mode"])
    )


def here(ctx: Context) -> tuple[Speed, ...]:
    """Every point of this machine with these settings."""
    with ctx.database.read() as tx:
        return _of(speeds.of_model(tx, resolve_model(ctx.settings)), this_machine(ctx.settings), ctx.settings)


def tuned(ctx: Context, mode: Mode) -> Settings:
    """The settings for a mode's engine on this machine: K by batch size as measured, where the user has not set it.

    K itself grows to the best that was measured, where the user has not set that. Without measurements nothing changes.
    """
    settings, name = ctx.settings, K_SETTING.get(mode)
    found = here(ctx)
    if name is None or mode not in DEFAULT_K or settings.tokens_by_batch_size or not any(each.mode is mode for each in found):
        return settings
    known = TuningTable(costs.fill(found))
    largest = max(each.k for each in found if each.mode is mode)
    most = getattr(settings, name) if name in settings.model_fields_set else largest
    everything = Mode.PLAIN not in offered_modes(settings)
    steps = schedule(known, mode, most, every_task=everything)
    reached = [k for first, _, k in steps if first <= slots(settings)]
    if not any(reached):  # it never paid: whoever asks for the mode nevertheless gets it
        return settings
    if mode is Mode.DRAFT_MODEL and not everything:
        # vLLM's older runner, where it is fastest, gives up its whole CUDA graphs for a schedule. Policy sends it no overload.
        return settings.model_copy(update={name: next(k for k in reached if k)})
    return settings.model_copy(update={name: max(reached), "tokens_by_batch_size": steps if len(reached) > 1 else ()})


def start_seconds(ctx: Context) -> dict[Mode, float]:
    """What an engine's start took, the longest for each mode."""
    costs_of: dict[Mode, float] = {}
    for each in here(ctx):
        costs_of[each.mode] = max(costs_of.get(each.mode, 0.0), each.start_seconds or 0.0)
    return costs_of


def _of(found: Sequence[Record], machine: Machine, settings: Settings) -> tuple[Speed, ...]:
    every = ((_speed(record), record) for record in found if Machine(record["device"], record["vllm"]) == machine)
    return tuple(speed for speed, record in every if record["draft"] == draft_of(settings, speed.mode))


def _speed(record: Record) -> Speed:
    values = {name: record[name] for name in _FIELDS}
    return Speed(**values | {"mode": Mode(record["mode"]), "task": TaskType(record["task"])})
