"""What a step costs and what it yields: a model fitted to measured points, to fill those between. Pure.

    speed(b, k) = b * yield(a, k) / step(b, k)
    step(b, k)  = c0 + c1 * log2(b) + c2 * b + k * (d0 + d1 * b)        seconds
    yield(a, k) = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)           tokens a step and request

b requests run at once and k tokens are drafted for each. c0 is what a step costs however small (reading the weights, starting kernels),
c2 what a further request adds (arithmetic, cache, sampling), d0 a drafting pass or lookup, d1 a further token to draft and to verify. The
logarithm is empirical: between one request and some dozens steps grow by about as much with each doubling. `yield` is the expected length
of Leviathan et al., arXiv 2211.17192, equation 1, for a constant probability `a` that a drafted token is accepted; `a` is not the
acceptance rate that vLLM reports but what makes the measured yield come out, so steps without a draft (a lookup that finds nothing)
are in it. The six constants are those of one device, model, mode and task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log, log2
from statistics import fmean

from specbatch.domain import Mode, TaskType
from specbatch.tuning import BULK, Speed

LEAST_LOADS = 3  # fewer say nothing of the shape
TRUSTED_ERROR = 0.10  # a mean error on held-out points above this: the points between stay empty
HALVINGS = 60


@dataclass(frozen=True, slots=True)
class CostModel:
    """Fitted to `loads`; it answers within them. `error` is the mean relative error where each inner load was left out of the fit."""

    mode: Mode
    task: TaskType
    constants: tuple[float, ...]
    accepted: float
    loads: tuple[int, ...]
    error: float | None = None

    def step_seconds(self, load: float, k: int) -> float:
        return sum(constant * feature for constant, feature in zip(self.constants, _features(load, k), strict=True))

    def tokens_per_second(self, load: float, k: int) -> float | None:
        """None outside the measured loads, and where the fit is no step at all."""
        step = self.step_seconds(load, k)
        if step <= 0 or not self.loads[0] <= load <= self.loads[-1]:
            return None
        return load * expected_tokens(self.accepted, k) / step


def expected_tokens(accepted: float, k: int) -> float:
    """Tokens a step and request, where each drafted token is accepted with this probability and the first rejection ends the draft."""
    return sum(accepted**length for length in range(k + 1))


def probability(tokens: float, k: int) -> float:
    """The probability of acceptance that yields so many tokens a step and request with K drafted: the inverse of expected_tokens."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < tokens else (low, middle)
    return (low + high) / 2


def fit(speeds: Iterable[Speed], mode: Mode, task: TaskType) -> CostModel | None:
    """The model of a mode beside plain, from the points of both. None where they are too few."""
    points = [speed for speed in speeds if speed.task is task and speed.mode in (mode, Mode.PLAIN) and speed.load < BULK]
    model = _fit(points, mode, task)
    if model is None:
        return None
    errors = []
    for left_out in model.loads[1:-1]:
        without = _fit([point for point in points if point.load != left_out], mode, task)
        errors += [error(without, point) for point in points if point.load == left_out] if without else []
    return CostModel(mode, task, model.constants, model.accepted, model.loads, fmean(errors) if errors else None)


def error(model: CostModel, point: Speed) -> float:
    """The model's error on a point, relative to what was measured."""
    predicted = model.tokens_per_second(point.load, point.k)
    return 1.0 if predicted is None else abs(predicted / point.tokens_per_second - 1)


def fill(speeds: Sequence[Speed]) -> tuple[Speed, ...]:
    """The measured points, and estimated ones half-way (by ratio) between neighbouring loads, of plain and of each mode with each K.

    Where a model's error is not within TRUSTED_ERROR, or a point was measured, nothing is filled in; nor at a load where that leaves out a
    mode that was measured below and above: the fastest of the others would pass for the fastest of all. A residual is shared out between
    its neighbours, so that the curve goes through what was measured.
    """
    filled: list[Speed] = []
    for task in dict.fromkeys(speed.task for speed in speeds):
        points = [speed for speed in speeds if speed.task is task]
        estimates = _estimates(points, task)
        for load in dict.fromkeys(load for _, load, _ in estimates):
            there = [estimate for estimate in estimates.values() if estimate.load == load]
            if _around(points, load) <= {each.mode for each in (*there, *points) if each.load == load}:
                filled += there
    known = {(speed.mode, speed.task, speed.load, speed.k) for speed in speeds}
    return (*(each for each in filled if (each.mode, each.task, each.load, each.k) not in known), *speeds)


def _estimates(points: Sequence[Speed], task: TaskType) -> dict[tuple[Mode, int, int], Speed]:
    found: dict[tuple[Mode, int, int], Speed] = {}
    for mode in dict.fromkeys(point.mode for point in points if point.mode is not Mode.PLAIN):
        model = fit(points, mode, task)
        if model is not None and model.error is not None and model.error <= TRUSTED_ERROR:
            for of in (Mode.PLAIN, mode):
                for estimate in _between(model, [point for point in points if point.mode is of]):
                    found.setdefault((of, estimate.load, estimate.k), estimate)
    return found


def _around(points: Iterable[Speed], load: int) -> set[Mode]:
    """The modes that were measured below this load and above it."""
    below, above = ({point.mode for point in points if sign * (point.load - load) > 0} for sign in (-1, 1))
    return below & above


def _between(model: CostModel, points: Iterable[Speed]) -> Iterable[Speed]:
    by_k: dict[int, dict[int, Speed]] = {}
    for point in points:
        if point.load in model.loads:
            by_k.setdefault(point.k, {})[point.load] = point
    for k, by_load in by_k.items():
        for low, high in pairwise(sorted(by_load)):
            middle = round((low * high) ** 0.5)
            if low < middle < high:
                corrections = [log(by_load[load].tokens_per_second / (model.tokens_per_second(load, k) or 1.0)) for load in (low, high)]
                estimate = (model.tokens_per_second(middle, k) or 0.0) * exp(fmean(corrections))
                yield Speed(by_load[low].mode, model.task, middle, k, estimate, estimated=True)


def _fit(points: Sequence[Speed], mode: Mode, task: TaskType) -> CostModel | None:
    """Least squares of relative errors in the time of a step; where no step was timed, a step is what the speed and the yield say."""
    drafted = [point for point in points if point.mode is mode and point.k > 0]
    loads = sorted({point.load for point in points if point.mode is Mode.PLAIN} & {point.load for point in drafted})
    points = [point for point in points if point.load in loads and point.tokens_per_second > 0]
    if len(loads) < LEAST_LOADS:
        return None
    accepted = fmean(probability(_yield(point), point.k) for point in drafted)
    rows, targets = [], []
    for point in points:
        seconds = point.load * expected_tokens(accepted, point.k) / point.tokens_per_second
        rows.append([feature / seconds for feature in _features(point.load, point.k)])
        targets.append(1.0)
    constants = _least_squares(rows, targets)
    return None if constants is None else CostModel(mode, task, constants, accepted, tuple(loads))


def _yield(point: Speed) -> float:
    """Tokens a step and request: counted, else from the acceptance rate as if every step drafted K."""
    if point.tokens_per_step is not None:
        return max(1.0, point.tokens_per_step / point.load)
    return 1.0 + (point.acceptance_rate or 0.0) * point.k


def _features(load: float, k: int) -> tuple[float, ...]:
    return (1.0, log2(load), load, k, k * load)


def _least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...] | None:
    """Solve the normal equations by elimination with pivots; None where the points leave a constant undetermined."""
    size = len(rows[0])
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    values = [sum(row[i] * target for row, target in zip(rows, targets, strict=True)) for i in range(size)]
    scales = [matrix[i][i] ** 0.5 for i in range(size)]  # columns differ by orders of magnitude
    if not all(scales):
        return None
    matrix = [[matrix[i][j] / scales[i] / scales[j] for j in range(size)] + [values[i] / scales[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < 1e-10:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [one - factor * other for one, other in zip(matrix[row], matrix[column], strict=True)]
    return tuple(matrix[i][size] / matrix[i][i] / scales[i] for i in range(size))
