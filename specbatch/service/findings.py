"""What the measured points of this machine say, for people: crossovers, K by batch size, the cost of a start, the fit; and a comparison."""

from __future__ import annotations

from pydantic import BaseModel, Field

from specbatch import costs, pairing
from specbatch.agenda import default_k
from specbatch.comparison import Comparison, ModeCost, lines, peak_costs
from specbatch.context import Context
from specbatch.domain import Mode, TaskType
from specbatch.errors import UsageError
from specbatch.gpus import has_gpu
from specbatch.machine import this_machine
from specbatch.policy import DRAFTERS
from specbatch.service.tuning import draft_of, here
from specbatch.serving import offered_modes, resolve_model
from specbatch.settings import Settings
from specbatch.tuning import Speed, TuningTable, schedule


class Fit(BaseModel):
    """The cost model of a mode on a task: see specbatch.costs. `error` is the mean relative error on points left out of the fit."""

    mode: Mode
    task: TaskType
    constants: tuple[float, ...] = Field(description="c0, c1, c2, d0, d1 in seconds")
    accepted: float
    error: float | None
    used: bool = Field(description="Whether the error is small enough to fill the points between.")


class Findings(BaseModel):
    model: str
    device: str
    vllm: str
    speeds: list[Speed]
    crossovers: dict[Mode, dict[TaskType, int]] = Field(description="The most requests at once for which a mode pays; 0: never.")
    schedules: dict[Mode, tuple[tuple[int, int, int], ...]] = Field(description="K by requests in a step: first, last, K.")
    start_seconds: dict[Mode, float]
    fits: list[Fit]


def findings(ctx: Context) -> Findings:
    found = here(ctx)
    table = TuningTable(costs.fill(found))
    machine = this_machine(ctx.settings)
    modes = [mode for mode in Mode if mode is not Mode.PLAIN and any(speed.mode is mode for speed in found)]
    tasks = [task for task in TaskType if any(speed.task is task for speed in found)]
    largest = {mode: max(speed.k for speed in found if speed.mode is mode) for mode in modes}
    starts: dict[Mode, float] = {}
    for speed in found:
        starts[speed.mode] = max(starts.get(speed.mode, 0.0), speed.start_seconds or 0.0)
    every_task = Mode.PLAIN not in offered_modes(ctx.settings)
    fitted = (costs.fit(found, mode, task) for mode in modes for task in tasks)
    return Findings(
        model=resolve_model(ctx.settings),
        device=machine.device,
        vllm=machine.vllm,
        speeds=list(found),
        crossovers={mode: {task: table.crossover(mode, task) for task in tasks} for mode in modes},
        schedules={mode: steps for mode in modes if (steps := schedule(table, mode, largest[mode], every_task=every_task))},
        start_seconds=starts,
        fits=[_fit(model) for model in fitted if model is not None],
    )


def comparison(ctx: Context, tasks: list[TaskType], loads: list[int]) -> Comparison:
    """The modes of the settings with their own K, at these loads."""
    wanted = [
        speed for speed in here(ctx) if speed.task in tasks and speed.load in loads and speed.k == default_k(ctx.settings, speed.mode)
    ]
    machine = this_machine(ctx.settings)
    memory = peak_costs(wanted)
    if has_gpu():  # vLLM takes its whole share of a GPU in every mode: peaks are alike, and what a draft takes is missing from the KV cache
        memory = [_computed(ctx.settings, cost) for cost in memory]
    return Comparison(model=resolve_model(ctx.settings), device=machine.device, vllm=machine.vllm, lines=lines(wanted), costs=memory)


def _computed(settings: Settings, cost: ModeCost) -> ModeCost:
    """From the files of target and draft; lookups hold nothing on the device."""
    if cost.mode not in DRAFTERS:
        return cost.model_copy(update={"added_bytes": 0, "added_percent": 0.0, "measured": False})
    try:
        memory = pairing.check(settings, resolve_model(settings), draft_of(settings, cost.mode), cost.mode).memory
    except UsageError:
        return cost.model_copy(update={"added_bytes": None, "added_percent": None, "measured": False})
    return cost.model_copy(update={"added_bytes": memory.added_bytes, "added_percent": memory.added_percent, "measured": False})


def _fit(model: costs.CostModel) -> Fit:
    return Fit(
        mode=model.mode,
        task=model.task,
        constants=model.constants,
        accepted=model.accepted,
        error=model.error,
        used=model.error is not None and model.error <= costs.TRUSTED_ERROR,
    )
