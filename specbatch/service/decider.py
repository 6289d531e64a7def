"""Decides the mode of each row of a batch, from the row itself and what is known when the batch is validated."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from specbatch import lines, policy
from specbatch.classify import classify
from specbatch.context import Context
from specbatch.domain import Decision, Mode, TaskType
from specbatch.service import offers, tuning
from specbatch.service.reconsider import most_at_once
from specbatch.settings import Settings
from specbatch.store import history, shards
from specbatch.tuning import TuningTable

SAMPLE_LINES = 1000
NOTHING_GENERATED = "Vectors and scores are computed, not generated: plain."


class Decider:
    def __init__(
        self,
        offer: policy.Offer,
        past: policy.History,
        table: TuningTable,
        loads: Mapping[TaskType, int],
        *,
        task: TaskType | None,
        mode: Mode | None,
        pooled: bool = False,
    ) -> None:
        self._offer, self._past, self._table, self._loads = offer, past, table, loads
        self._task, self._mode, self._pooled = task, mode, pooled
        self._decided: dict[tuple[TaskType, str | None, bool], Decision] = {}

    @classmethod
    def for_file(
        cls,
        ctx: Context,
        tx: sa.Connection,
        model: str,
        path: Path,
        endpoint: str,
        *,
        task: TaskType | None = None,
        mode: Mode | None = None,
    ) -> Decider:
        """For the rows of a file that will run on this model.

        A row's expected load is the rows that will share its engine: at first those of its kind, and once it shows which tasks chose the
        same mode, all of these; at most what an engine runs in a step.
        """
        offer = offers.offer(ctx, tx, model)
        backlog = sum(owed for _, owed, _ in shards.backlog(tx, model))
        rows, table, modes = sampled(path, ctx.settings, task), tuning.table(tx, model), offer.available | {Mode.PLAIN}
        loads = {each: most_at_once(ctx.settings, backlog + sum(rows[other] for other in _alike(each))) for each in TaskType}
        past = history.windows(tx, model, modes, loads)

        def chosen(each: TaskType) -> Mode:
            return policy.decide(each, {}, loads[each], offer, past, table, named_mode=mode).mode

        first = {each: chosen(each) for each in rows}
        together: Counter[Mode] = Counter()
        for each, many in rows.items():
            together[first[each]] += many
        for each, many in reversed(rows.most_common()):  # the fewest leave first a mode that pays for none at the load of all
            load = most_at_once(ctx.settings, backlog + together[first[each]])
            if load != loads[each]:
                loads[each] = load
                past |= history.windows(tx, model, modes, {each: load})
                together[first[each]] -= many
                together[chosen(each)] += many
        return cls(offer, past, table, loads, task=task, mode=mode, pooled=endpoint in lines.POOLED)

    def __call__(self, body: Mapping[str, Any], row_index: int) -> Decision:
        task = classify(body, self._task).task
        if self._pooled:
            return Decision(task, Mode.PLAIN, NOTHING_GENERATED)
        retry = row_index % policy.RETRY_EVERY == policy.RETRY_EVERY - 1
        kind = task, policy.refused_sampling(body), retry
        if kind not in self._decided:
            self._decided[kind] = policy.decide(
                task, body, self._loads[task], self._offer, self._past, self._table, named_mode=self._mode, row_index=row_index
            )
        return self._decided[kind]


def sampled(path: Path, settings: Settings, named: TaskType | None) -> Counter[TaskType]:
    """Rows of each task type that a file is expected to hold: a sample from its beginning, scaled by its size."""
    counts: Counter[TaskType] = Counter()
    size = 0
    for _, line in itertools.islice(lines.read(path, settings.max_line_bytes), SAMPLE_LINES):
        size += len(line) + 1
        counts[classify(_body(line), named).task] += 1
    scale = max(1.0, path.stat().st_size / max(1, size))
    return Counter({task: round(scale * many) for task, many in counts.items()})


def _alike(task: TaskType) -> list[TaskType]:
    """The tasks that will most likely share this one's engine."""
    return [each for each in TaskType if (each in policy.STRUCTURED) is (task in policy.STRUCTURED)]


def _body(line: bytes) -> dict[str, Any]:
    """The body of a line; a line at fault counts as chat, validation says what is wrong with it."""
    try:
        body = json.loads(line)["body"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return body if isinstance(body, dict) else {}
