"""Which mode a worker with one engine and several modes serves next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from celery.platforms import EX_FAILURE
from celery.worker import components, state

from specbatch.context import Context
from specbatch.domain import Mode
from specbatch.settings import Settings
from worker import supervisor
from worker.engine.scripted import ScriptedEngine
from worker.host import EngineHost
from worker.steps import engine_step
from worker.supervisor import PATIENCE_SECONDS, SHARE, Supervisor, Waiting, choose

START = 40.0
NGRAM, DRAFT, PLAIN = Mode.NGRAM, Mode.DRAFT_MODEL, Mode.PLAIN


def chosen(busy: bool, waiting: dict[Mode, Waiting], *, served: float = 0.0, start: float = START) -> Mode:
    return choose(NGRAM, busy, waiting, served_seconds=served, start_seconds=start)


def test_an_engine_stays_while_nothing_waits_elsewhere() -> None:
    assert chosen(False, {}) is NGRAM
    assert chosen(True, {NGRAM: Waiting(5, 1000.0)}) is NGRAM
    assert chosen(False, {DRAFT: Waiting(0, 1000.0)}) is NGRAM


def test_an_idle_engine_goes_where_most_rows_wait() -> None:
    assert chosen(False, {DRAFT: Waiting(10, 500.0), PLAIN: Waiting(11, 0.0)}) is PLAIN


def test_a_busy_engine_is_not_taken_away_before_it_was_worth_its_start() -> None:
    starving = {DRAFT: Waiting(1, 1e6)}
    assert chosen(True, starving, served=SHARE * START - 1) is NGRAM
    assert chosen(True, starving, served=SHARE * START) is DRAFT


def test_a_busy_engine_is_not_taken_away_for_rows_that_have_not_waited_long() -> None:
    patience = max(PATIENCE_SECONDS, SHARE * START)
    assert chosen(True, {DRAFT: Waiting(10**6, patience - 1)}, served=1e6) is NGRAM
    assert chosen(True, {DRAFT: Waiting(1, patience)}, served=1e6) is DRAFT


def test_of_several_that_starve_the_longest_waiting_comes_first() -> None:
    assert chosen(True, {DRAFT: Waiting(1, 5000.0), PLAIN: Waiting(10**6, 4000.0)}, served=1e6) is DRAFT


@pytest.mark.parametrize("start", [1.0, 40.0, 120.0])
def test_with_endless_work_in_three_modes_none_starves_and_switching_costs_a_tenth(start: float) -> None:
    """A day of one-second steps: every queue is always full."""
    current, since, clock, starts = NGRAM, 0.0, 0.0, 0
    left = dict.fromkeys((NGRAM, DRAFT, PLAIN), 0.0)
    longest = 0.0
    while clock < 86_400:
        waiting = {mode: Waiting(1000, clock - left[mode]) for mode in left}
        wanted = choose(current, True, waiting, served_seconds=clock - since, start_seconds=start)
        if wanted is not current:
            longest = max(longest, clock - left[wanted])
            left[current] = clock
            clock += start
            starts += 1
            current, since = wanted, clock
        clock += 1
    bound = max(PATIENCE_SECONDS, SHARE * start)
    assert starts > 3
    assert longest <= 2 * (bound + start) + bound  # two others are served between, each for the bound at most
    assert starts * start <= 86_400 / SHARE


class Unclean(ScriptedEngine):
    """Its end fails half-way."""

    async def stop(self) -> None:
        await super().stop()
        raise RuntimeError("the device answers nothing")


def make(settings: Settings, mode: Mode) -> ScriptedEngine:
    return (Unclean if mode is NGRAM else ScriptedEngine)(settings, mode)


def test_an_engine_that_ends_badly_does_not_take_its_worker_along(tmp_path: Path) -> None:
    host = EngineHost(Settings(data_dir=tmp_path, engine="scripted"), NGRAM, make)
    host.start()
    for mode in (PLAIN, NGRAM):
        host.switch(mode)
        assert (host.ready, host.mode) == (True, mode)
    host.stop()


def test_a_worker_that_can_no_longer_watch_its_queues_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would live on, serve one mode, and never another."""

    def broken(*_: Any) -> None:
        raise RuntimeError("out of the blue")

    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr("worker.supervisor.service.backlog", broken)
    monkeypatch.setattr(state, "should_stop", None)
    host = EngineHost(Settings(data_dir=tmp_path, engine="scripted"), PLAIN, make)
    watching = Supervisor(cast(Context, None), host, [PLAIN, DRAFT], {})
    watching.start(SimpleNamespace(consumer=SimpleNamespace(task_consumer=object())))
    assert host.stopping.wait(30)
    watching.stop()
    assert state.should_stop == EX_FAILURE
    host.loop.close()


def test_a_sign_of_life_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of the blue")

    monkeypatch.setattr(components.Pool, "requires", components.Pool.requires)
    step = engine_step(cast(Context, None), cast(EngineHost, None), cast(Supervisor, None), "worker")
    assert cast(Any, step)._told(SimpleNamespace(), broken) is False
