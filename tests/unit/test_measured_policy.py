"""Policy beside what two H200s measured (benchmarks/results): what it picks must not be slower than plain there, nor far from the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from specbatch import costs
from specbatch.domain import Mode, TaskType
from specbatch.policy import Offer, decide
from specbatch.tuning import Speed, TuningTable

RUN = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200" / "2026-11-30"
Speeds = dict[tuple[TaskType, int], dict[Mode, float]]


def speeds_of(file: Path) -> list[Speed]:
    found: list[Any] = json.loads(file.read_text(encoding="utf-8"))["speeds"]
    return TypeAdapter(list[Speed]).validate_python(found)


def measured(folder: Path) -> Speeds:
    speeds: Speeds = {}
    for speed in (speed for file in folder.glob("modes-*.json") for speed in speeds_of(file)):
        speeds.setdefault((speed.task, speed.load), {})[speed.mode] = speed.tokens_per_second
    return speeds


def test_with_the_table_of_one_gpu_the_other_is_never_slower_than_plain_and_near_its_best() -> None:
    table, found = TuningTable(costs.fill(speeds_of(RUN / "tune.json"))), measured(RUN)
    assert {load for _, load in found} == {1, 4, 8, 16, 64, 128, 256}  # the table knows nothing of 8 and 128
    for (task, load), speeds in found.items():
        mode = decide(task, {}, load, Offer(frozenset(speeds)), table=table).mode
        assert speeds[mode] >= 0.97 * speeds[Mode.PLAIN], (task, load, mode)
        assert speeds[mode] >= 0.94 * max(speeds.values()), (task, load, mode)  # a tie of the table differs by 5% there


def test_nor_is_it_slower_where_plain_and_one_other_mode_are_all_there_is() -> None:
    table = TuningTable(costs.fill(speeds_of(RUN / "tune.json")))
    for (task, load), speeds in measured(RUN).items():
        for other in speeds.keys() - {Mode.PLAIN}:
            mode = decide(task, {}, load, Offer(frozenset({Mode.PLAIN, other})), table=table).mode
            assert speeds[mode] >= 0.95 * speeds[Mode.PLAIN], (task, load, other)


@pytest.mark.parametrize("folder", [RUN, RUN / "drafts"], ids=["lookups and heads", "drafts"])
def test_without_a_table_no_mode_is_used_where_it_cost_a_tenth(folder: Path) -> None:
    for (task, load), speeds in measured(folder).items():
        for mode in speeds.keys() - {Mode.PLAIN}:
            decided = decide(task, {}, load, Offer(frozenset({Mode.PLAIN, mode}))).mode
            tried = mode is Mode.DRAFT_MODEL and task is TaskType.CHAT  # its acceptance is under the floor: rows that run tell
            tried = tried or (mode is Mode.SUFFIX and load == 1)  # remembers nothing yet
            assert tried or speeds[decided] >= 0.9 * speeds[Mode.PLAIN], (task, load, mode)
