"""The cost model: what it recovers, how it judges itself, and what it fills in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.costs import TRUSTED_ERROR, expected_tokens, fill, fit, probability
from specbatch.domain import Mode, TaskType
from specbatch.tuning import BULK, LOADS, Speed, TuningTable

CONSTANTS = (4e-3, 6e-4, 5e-5, 2e-4, 3e-5)  # of a 7B target on one H200, by the order
ACCEPTED = 0.6


def step(load: int, k: int) -> float:
    c0, c1, c2, d0, d1 = CONSTANTS
    return c0 + c1 * log2(load) + c2 * load + k * (d0 + d1 * load)


def point(mode: Mode, load: int, k: int, factor: float = 1.0) -> Speed:
    tokens = expected_tokens(ACCEPTED, k)
    return Speed(mode, TaskType.CODE, load, k, factor * load * tokens / step(load, k), tokens_per_step=tokens * load)


def machine(*ks: int, loads: tuple[int, ...] = LOADS, noise: Callable[[int], float] = lambda load: 1.0) -> list[Speed]:
    """The points of a machine that obeys the formula."""
    plain = [point(Mode.PLAIN, load, 0) for load in loads]
    return plain + [point(Mode.NGRAM, load, k, noise(load)) for k in ks for load in loads]


@given(st.floats(0.01, 0.99), st.integers(1, 16))
def test_a_yield_and_its_probability_are_inverse(accepted: float, k: int) -> None:
    assert probability(expected_tokens(accepted, k), k) == pytest.approx(accepted, abs=1e-6)


def test_the_expected_tokens_of_a_draft() -> None:
    assert expected_tokens(0.0, 4) == 1.0
    assert expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.5, 3) == pytest.approx((1 - 0.5**4) / (1 - 0.5))


def test_a_machine_that_obeys_the_formula_is_recovered() -> None:
    model = fit(machine(2, 4), Mode.NGRAM, TaskType.CODE)
    assert model is not None
    assert model.constants == pytest.approx(CONSTANTS, rel=1e-4)
    assert model.accepted == pytest.approx(ACCEPTED)
    assert model.error == pytest.approx(0.0, abs=1e-6)
    for load, k in ((8, 3), (128, 4), (2, 0)):
        assert model.tokens_per_second(load, k) == pytest.approx(load * expected_tokens(ACCEPTED, k) / step(load, k), rel=1e-4)


def test_it_does_not_answer_beyond_what_was_measured() -> None:
    model = fit(machine(4, loads=(4, 16, 64)), Mode.NGRAM, TaskType.CODE)
    assert model is not None
    assert model.tokens_per_second(2, 4) is None
    assert model.tokens_per_second(65, 4) is None


def test_the_error_is_that_of_loads_left_out() -> None:
    """A bend at one load is in its own fit's reach, and not in that of the fit without it."""
    model = fit(machine(4, noise=lambda load: 0.5 if load == 16 else 1.0), Mode.NGRAM, TaskType.CODE)
    assert model is not None
    assert model.error is not None
    assert model.error > TRUSTED_ERROR


@pytest.mark.parametrize(
    "speeds",
    [
        [],
        machine(4, loads=(1, 256)),
        [speed for speed in machine(4) if speed.mode is Mode.PLAIN],
        [speed for speed in machine(4) if speed.mode is Mode.NGRAM],
    ],
)
def test_too_few_points_give_no_model(speeds: list[Speed]) -> None:
    assert fit(speeds, Mode.NGRAM, TaskType.CODE) is None
    assert set(fill(speeds)) == set(speeds)


def test_bulk_runs_are_not_steps_at_a_load() -> None:
    bulk = point(Mode.NGRAM, BULK, 4, 0.1)
    assert fit([*machine(4), bulk], Mode.NGRAM, TaskType.CODE) == fit(machine(4), Mode.NGRAM, TaskType.CODE)
    assert bulk in fill([*machine(4), bulk])


def test_points_between_are_estimated_and_measured_ones_are_kept() -> None:
    measured = machine(4)
    filled = {(speed.mode, speed.load): speed for speed in fill(measured)}
    assert sorted(load for mode, load in filled if mode is Mode.NGRAM) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {speed for speed in filled.values() if not speed.estimated} == set(measured)
    for mode, k in ((Mode.PLAIN, 0), (Mode.NGRAM, 4)):
        assert filled[mode, 128].estimated
        assert filled[mode, 128].tokens_per_second == pytest.approx(point(mode, 128, k).tokens_per_second, rel=1e-4)


def test_a_fit_that_misses_fills_nothing() -> None:
    measured = machine(4, noise=lambda load: 0.5 if load == 16 else 1.0)
    assert set(fill(measured)) == set(measured)


def test_a_load_without_an_estimate_for_every_mode_stays_empty() -> None:
    """Else the fastest of those that were estimated would pass for the fastest of all: on an H200 ngram's 1.4 for EAGLE-3's 2.2, at 8."""
    steady = machine(4)
    fitful = [replace(speed, mode=Mode.EAGLE3, tokens_per_second=3 * speed.tokens_per_second) for speed in steady if speed.k]
    fitful = [replace(speed, tokens_per_second=speed.tokens_per_second / 2) if speed.load == 16 else speed for speed in fitful]
    assert len(fill(steady)) > len(steady)
    assert set(fill([*steady, *fitful])) == {*steady, *fitful}
    short = [speed for speed in fitful if speed.load <= 4]  # says nothing of what lies beyond
    assert {speed.load for speed in fill([*steady, *short]) if speed.estimated} == {8, 32, 128}
    table = TuningTable(fill([*steady, *fitful]))
    for load in range(1, 257):
        at, speeds = table.at(TaskType.CODE, load)
        assert max(speeds, key=lambda mode: speeds[mode]) is Mode.EAGLE3, (load, at)


def test_a_load_that_another_mode_measured_is_estimated_for_the_rest() -> None:
    ngram, eagle = machine(4), [replace(speed, mode=Mode.EAGLE3) for speed in machine(4) if speed.k]
    at_eight = [point(Mode.PLAIN, 8, 0), point(Mode.NGRAM, 8, 4)]
    filled = {(speed.mode, speed.load): speed.estimated for speed in fill([*ngram, *eagle, *at_eight])}
    assert (filled[Mode.PLAIN, 8], filled[Mode.NGRAM, 8], filled[Mode.EAGLE3, 8]) == (False, False, True)


def test_estimates_move_a_crossover_between_the_measured_loads() -> None:
    """On this machine ngram pays at 64 and no longer at 256: where it stops lies between."""
    assert point(Mode.NGRAM, 64, 4).tokens_per_second > point(Mode.PLAIN, 64, 0).tokens_per_second
    assert point(Mode.NGRAM, 256, 4).tokens_per_second < point(Mode.PLAIN, 256, 0).tokens_per_second
    pays = point(Mode.NGRAM, 128, 4).tokens_per_second > point(Mode.PLAIN, 128, 0).tokens_per_second
    table = TuningTable(fill(machine(4)))
    assert table.crossover(Mode.NGRAM, TaskType.CODE) == (128 if pays else 64)
    assert table.source(TaskType.CODE, 128) == "estimated with 128 requests at once"
    assert table.source(TaskType.CODE, 64) == "measured with 64 requests at once"
