"""Which mode a worker with one engine and several modes serves next."""

from __future__ import annotations

import pytest

from specbatch.domain import Mode
from worker.supervisor import PATIENCE_SECONDS, SHARE, Waiting, choose

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
