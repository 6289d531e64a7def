"""What a file would become: how many rows in each mode, and why. Nothing runs, nothing is written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pydantic import BaseModel, Field

from specbatch import lines, pairing
from specbatch.compat import Demand
from specbatch.context import Context
from specbatch.domain import Decision, Mode, TaskType
from specbatch.service import offers
from specbatch.service.decider import Decider

MOST_PROBLEMS = 1000  # listed; all are counted


class Group(BaseModel):
    """Rows that were decided alike."""

    task: TaskType
    mode: Mode
    reason: str
    rows: int


class PlanProblem(BaseModel):
    line: int | None
    param: str | None
    message: str


class Plan(BaseModel):
    model: str | None
    rows: int
    groups: list[Group]
    memory: dict[Mode, Demand] = Field(description="By mode, of each device, where the files of the model and its draft are here.")
    problems: list[PlanProblem]
    problem_count: int


def plan(ctx: Context, path: Path, endpoint: str, *, task: TaskType | None = None, mode: Mode | None = None) -> Plan:
    """Decide every row of a file as validation would now. Lines at fault are listed and not decided."""
    with ctx.database.read() as tx:
        models = offers.models(ctx, tx)
    decider: Decider | None = None
    decided: Counter[Decision] = Counter()
    problems: list[PlanProblem] = []
    model, count, faults = None, 0, 0
    for number, line in lines.read(path, ctx.settings.max_line_bytes):
        count += 1
        request, found = lines.parse(line, number, endpoint, ctx.settings.max_line_bytes)
        faults += len(found)
        problems += [PlanProblem(line=each.line, param=each.param, message=each.message) for each in found[: MOST_PROBLEMS - len(problems)]]
        if request is None or found:
            continue
        if decider is None:
            model = models.get(request.model, request.model)
            with ctx.database.read() as tx:
                decider = Decider.for_file(ctx, tx, model, path, endpoint, task=task, mode=mode)
        decided[decider(request.body, number - 1)] += 1
    groups = [Group(task=each.task, mode=each.mode, reason=each.reason, rows=rows) for each, rows in decided.most_common()]
    memory = {group.mode: needed for group in groups if model and (needed := pairing.demand(ctx.settings, model, group.mode))}
    return Plan(model=model, rows=count, groups=groups, memory=memory, problems=problems, problem_count=faults)
