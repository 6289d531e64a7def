"""What is measured first, with which requests, and what the table then says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch import workload
from specbatch.agenda import TASKS, agenda, default_k
from specbatch.classify import classify
from specbatch.domain import Mode, TaskType
from specbatch.policy import Offer, decide
from specbatch.settings import Settings
from specbatch.trial import Point
from specbatch.tuning import BULK, LOADS, Speed, TuningTable, schedule

SETTINGS = Settings(engine="scripted", draft="a-draft")
MODES = (Mode.PLAIN, Mode.NGRAM, Mode.DRAFT_MODEL)


def engines(*, every_k: bool = True) -> list[tuple[Mode, int]]:
    return [(mode, k) for mode, k, _ in agenda(SETTINGS, MODES, every_k=every_k)]


def table(*points: tuple[Mode, TaskType, int, float]) -> TuningTable:
    return TuningTable(tuple(Speed(mode, task, load, 0 if mode is Mode.PLAIN else 4, speed) for mode, task, load, speed in points))


def test_plain_comes_first_then_each_tasks_own_mode_then_other_k() -> None:
    assert engines() == [
        (Mode.PLAIN, 0),
        (Mode.NGRAM, SETTINGS.ngram_tokens),
        (Mode.DRAFT_MODEL, SETTINGS.draft_tokens),
        (Mode.NGRAM, 2),
        (Mode.NGRAM, 8),
        (Mode.DRAFT_MODEL, 2),
        (Mode.DRAFT_MODEL, 3),
    ]
    assert engines(every_k=False) == engines()[:3]


def test_both_ends_of_the_loads_come_before_the_middle_and_bulk_last() -> None:
    _, _, points = agenda(SETTINGS, MODES)[0]
    assert list(dict.fromkeys(point.load for point in points)) == [1, 256, 4, 64, 16, BULK]
    assert {(point.task, point.load) for point in points} == set(itertools.product(TASKS, (*LOADS, BULK)))


def test_a_lookup_takes_structured_tasks_first_and_a_draft_the_others() -> None:
    points = {mode: points for mode, _, points in agenda(SETTINGS, MODES, every_k=False)}
    assert points[Mode.NGRAM][0].task is TaskType.CODE
    assert points[Mode.DRAFT_MODEL][0].task is TaskType.CHAT


@given(st.sets(st.tuples(st.sampled_from(TASKS), st.sampled_from(LOADS))))
def test_what_is_done_is_left_out(done: set[tuple[TaskType, int]]) -> None:
    before = {(Mode.NGRAM, 4, Point(task=task, load=load)) for task, load in done}
    left = agenda(SETTINGS, (Mode.PLAIN, Mode.NGRAM), loads=LOADS, done=before)
    wanted = [point for mode, k, points in left if (mode, k) == (Mode.NGRAM, 4) for point in points]
    assert {(point.task, point.load) for point in wanted} == set(itertools.product(TASKS, LOADS)) - done
    assert all(points for _, _, points in left)


def test_k_is_that_of_the_settings() -> None:
    settings = Settings(engine="scripted", ngram_tokens=7, draft_tokens=3, suffix_tokens=9)
    assert [default_k(settings, mode) for mode in (Mode.PLAIN, Mode.NGRAM, Mode.DRAFT_MODEL, Mode.EAGLE, Mode.SUFFIX)] == [0, 7, 3, 3, 9]


@pytest.mark.parametrize("task", TaskType)
def test_requests_are_of_their_task_and_the_same_every_time(task: TaskType) -> None:
    bodies = list(itertools.islice(workload.requests(task, 40, max_tokens=9), 60))
    assert bodies == list(itertools.islice(workload.requests(task, max_tokens=9), 40, 100))
    assert all(body["temperature"] == 0 and body["max_tokens"] == 9 for body in bodies)
    assert sum(classify(body).task is task for body in bodies) >= 57


@pytest.mark.parametrize("task", TASKS)
def test_no_prompt_meets_its_own_cached_prefix(task: TaskType) -> None:
    prompts = [body["messages"][0]["content"] for body in itertools.islice(workload.requests(task), 2000)]
    assert len(set(prompts)) > 1990


@pytest.mark.parametrize(("task", "like"), [(TaskType.SUMMARY, TaskType.JSON), (TaskType.CREATIVE, TaskType.CHAT)])
def test_a_task_that_was_not_measured_takes_the_figures_of_one_like_it(task: TaskType, like: TaskType) -> None:
    slow = table((Mode.PLAIN, like, 16, 100.0), (Mode.NGRAM, like, 16, 70.0))
    decision = decide(task, {}, 16, Offer(frozenset({Mode.PLAIN, Mode.NGRAM})), table=slow)
    assert decision.mode is Mode.PLAIN
    assert f"measured on {like} with 16 requests at once" in decision.reason
    assert slow.crossover(Mode.NGRAM, task) == 0


def test_a_task_that_was_measured_speaks_for_itself() -> None:
    both = table(
        (Mode.PLAIN, TaskType.JSON, 16, 100.0),
        (Mode.NGRAM, TaskType.JSON, 16, 70.0),
        (Mode.PLAIN, TaskType.SUMMARY, 16, 100.0),
        (Mode.NGRAM, TaskType.SUMMARY, 16, 150.0),
    )
    decision = decide(TaskType.SUMMARY, {}, 16, Offer(frozenset({Mode.PLAIN, Mode.NGRAM})), table=both)
    assert decision.mode is Mode.NGRAM
    assert "ngram, measured with 16 requests at once: 150 tokens/s against 100 in plain" in decision.reason


def test_a_k_that_only_some_tasks_were_measured_with_is_not_preferred_for_what_the_others_lack() -> None:
    """As `tune` leaves it when its budget ends within an engine."""
    tokens = {TaskType.CODE: 1800.0, TaskType.JSON: 1300.0, TaskType.CHAT: 1200.0}
    plain = [Speed(Mode.PLAIN, task, 16, 0, 1000.0) for task in tokens]
    four = [Speed(Mode.NGRAM, task, 16, 4, speed) for task, speed in tokens.items()]
    eight = Speed(Mode.NGRAM, TaskType.CODE, 16, 8, 1500.0)
    steps = schedule(TuningTable((*plain, *four, eight)), Mode.NGRAM, 8)
    assert next(k for first, last, k in steps if first <= 16 <= last) == 4
