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
        """For the rows of a file that will run on this model."""
        offer = offers.offer(ctx, tx, model)
        backlog = sum(owed for _, owed, _ in shards.backlog(tx, model))
        loads = expected_loads(path, ctx.settings, backlog, task)
        past = history.windows(tx, model, offer.available | {Mode.PLAIN}, max(loads.values()))
        return cls(offer, past, tuning.table(tx, model), loads, task=task, mode=mode, pooled=endpoint in lines.POOLED)

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


def expected_loads(path: Path, settings: Settings, backlog: int, named: TaskType | None) -> dict[TaskType, int]:
    """How many requests will run at once beside a row of each task type: those of its own kind, since the other kind runs in another mode.

    A sample from the beginning of the file, scaled by the file's size; at most what an engine runs in a step.
    """
    counts: Counter[bool] = Counter()
    size = 0
    for _, line in itertools.islice(lines.read(path, settings.max_line_bytes), SAMPLE_LINES):
        size += len(line) + 1
        counts[classify(_body(line), named).task in policy.STRUCTURED] += 1
    scale = max(1.0, path.stat().st_size / max(1, size))
    return {task: most_at_once(settings, backlog + round(scale * counts[task in policy.STRUCTURED])) for task in TaskType}


def _body(line: bytes) -> dict[str, Any]:
    """The body of a line; a line at fault counts as chat, validation says what is wrong with it."""
    try:
        body = json.loads(line)["body"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return body if isinstance(body, dict) else {}
