"""What `tune` measures, the most useful first. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from specbatch.domain import Mode, TaskType
from specbatch.policy import DRAFTERS, PREFERENCE, STRUCTURED
from specbatch.settings import Settings
from specbatch.trial import Point
from specbatch.tuning import BULK, LOADS

TASKS = (TaskType.CODE, TaskType.JSON, TaskType.CHAT)
OTHER_K = {Mode.NGRAM: (2, 8), Mode.DRAFT_MODEL: (2, 3), Mode.EAGLE: (3, 2), Mode.EAGLE3: (3, 2)}

Item = tuple[Mode, int, tuple[Point, ...]]


def default_k(settings: Settings, mode: Mode) -> int:
    """The K that the settings give a mode."""
    if mode is Mode.PLAIN:
        return 0
    return {Mode.NGRAM: settings.ngram_tokens, Mode.SUFFIX: settings.suffix_tokens}.get(mode, settings.draft_tokens)


def agenda(
    settings: Settings,
    modes: Collection[Mode],
    *,
    tasks: Sequence[TaskType] = TASKS,
    loads: Sequence[int] = (*LOADS, BULK),
    done: Collection[tuple[Mode, int, Point]] = (),
    every_k: bool = True,
) -> list[Item]:
    """One item for each engine to start: its mode, K, and the points that are not `done`.

    Plain at every load first: without it no other point says anything. Then each task's preferred mode with the K of the settings, then
    the other modes, then other K. Within an engine the loads alternate between small and large, so that a cut leaves both ends known, and
    bulk comes last; a lookup takes structured tasks first, a draft the others.
    """
    preferred = dict.fromkeys(next((mode for mode in PREFERENCE[task] if mode in modes), Mode.PLAIN) for task in tasks)
    order = dict.fromkeys((Mode.PLAIN, *preferred, *(mode for mode in Mode if mode in modes)))
    engines = [(mode, default_k(settings, mode)) for mode in order]
    engines += [(mode, k) for mode in order if every_k for k in OTHER_K.get(mode, ()) if k != default_k(settings, mode)]
    items = ((mode, k, _points(mode, tasks, loads)) for mode, k in engines)
    left = ((mode, k, tuple(point for point in points if (mode, k, point) not in done)) for mode, k, points in items)
    return [item for item in left if item[2]]


def _points(mode: Mode, tasks: Iterable[TaskType], loads: Iterable[int]) -> tuple[Point, ...]:
    first = [task for task in tasks if (task in STRUCTURED) is (mode not in DRAFTERS)]
    ordered = [*first, *(task for task in tasks if task not in first)]
    return tuple(Point(task=task, load=load) for load in _ends_first(sorted(loads)) for task in ordered)


def _ends_first(loads: Sequence[int]) -> list[int]:
    """1, 256, 4, 64, 16, and bulk."""
    small = [load for load in loads if load < BULK]
    order: list[int] = []
    while small:
        order.append(small.pop(0))
        if small:
            order.append(small.pop())
    return [*order, *(load for load in loads if load >= BULK)]
