"""Where a mode stops paying, and how many tokens to draft: what `tune` measured on this machine, and the defaults until it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from statistics import fmean

from specbatch.domain import Mode, TaskType

# The most requests at once for which a mode is expected to pay, in TaskType's order: code, json, extraction, summary, chat, creative.
# On H200s, 7B target, K=4, against plain (docs/benchmarks.md), in up to four runs:
# ngram: code 0.99 to 1.18 at 64, 0.70 to 1.81 at 256. JSON 1.17 to 1.32 at 16, at 64 0.69 to 1.00 where 14% of the drafts were accepted and
#   1.16 where 19% were. Chat 0.97 to 1.27 at 16, 1.11 and 1.24 at 64. Extraction and summaries were not measured and get half of JSON's.
# suffix: code 1.16 and JSON 1.13 at 64, chat 1.17 at 16 and 0.88 at 64; alone, before it had seen other rows, JSON 1.11 and chat 0.80.
# draft_model: a 17M draft, whose step costs an H200 10 ms of launching beside the target's 5 ms. Where 0.83 of it was accepted (JSON) it
#   broke even up to 16. In vLLM's older runner, at 1, 4 and 16: code (0.62) 1.18, 0.92, 1.07; JSON (0.49) 0.91, 0.99, 0.75; chat (0.34,
#   under the acceptance floor, which demotes it) 0.88, 0.97, 0.69; above the floor chat was not measured. A slower GPU hides the launching:
#   the draft gets its chance. Measure yours with `tune`.
# eagle3: a head trained for minutes, 20% of its drafts accepted on code, 68% on JSON, 25% on chat: code 1.08 and 1.16 at 16 and 0.70 at 64,
#   JSON 1.12 and 1.15 at 64 and more beyond, chat 1.11 and 1.31 at 64 and 0.69 at 256. Published (arXiv 2503.01840, in vLLM, 8B target):
#   gains up to a batch of 56. eagle: not measured; published, as there: gains up to 24.
_BY_TASK = {
    Mode.SUFFIX: (64, 64, 32, 32, 16, 16),
    Mode.NGRAM: (64, 16, 8, 8, 16, 16),
    Mode.DRAFT_MODEL: (2, 4, 4, 4, 16, 16),
    Mode.EAGLE: (24, 24, 24, 24, 24, 24),
    Mode.EAGLE3: (16, 256, 56, 56, 64, 64),
}
CROSSOVER: dict[Mode, dict[TaskType, int]] = {mode: dict(zip(TaskType, loads, strict=True)) for mode, loads in _BY_TASK.items()}

DEFAULT_K = dict.fromkeys((Mode.NGRAM, Mode.DRAFT_MODEL, Mode.EAGLE, Mode.EAGLE3), 4)  # the modes whose K vLLM can schedule
LARGEST_BATCH = 65_536  # a schedule's end; vLLM cuts it at max_num_seqs


LOADS = (1, 4, 16, 64, 256)  # requests at once that `tune` measures
BULK = 1024  # requests handed over together, none replaced: the engine holds back what is beyond its max_num_seqs


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement: the tokens a second that an engine generated with `load` requests at once, drafting K tokens a step (plain: 0).

    Latencies are medians. A step is one pass of the target; `tokens_per_step` counts those of all requests. Memory is the engine's peak.
    """

    mode: Mode
    task: TaskType
    load: int
    k: int
    tokens_per_second: float
    requests: int = 0
    seconds: float = 0.0
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    step_seconds: float | None = None
    tokens_per_step: float | None = None
    start_seconds: float | None = None
    peak_memory_bytes: int | None = None
    estimated: bool = False  # by costs.fill, from the points around it

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


# A task that was not measured takes the figures of one whose answers are alike: of the structured ones, that which gained less on the H200.
STANDS_FOR = {TaskType.EXTRACTION: TaskType.JSON, TaskType.SUMMARY: TaskType.JSON, TaskType.CREATIVE: TaskType.CHAT}


@dataclass(frozen=True)
class TuningTable:
    """What this machine and model measured. Only points at which plain was measured too say anything."""

    speeds: tuple[Speed, ...] = ()

    def at(self, task: TaskType, load: int) -> tuple[int, Mapping[Mode, float]]:
        """The measured load next above, and each mode's speed there, with the K that `schedule` gives its engine.

        Speculation mostly pays less the more requests run, so the load above is the careful one to take. Where a mode gains more there,
        its ratio to plain is interpolated, both in logarithms: on H200s an EAGLE-3 head made code 0.72 times as fast with 64 requests,
        0.74 with 128, and 1.30 with 256. Beyond the measured loads: (0, {}).
        """
        points = self._points[self._like[task]]
        above = next((number for number, (at, _) in enumerate(points) if at >= load), None)
        if above is None:
            return 0, {}
        at, speeds = points[above]
        if at == load or above == 0:
            return at, speeds
        before, below = points[above - 1]
        weight = log(load / before) / log(at / before)
        return at, {mode: _between(speed, speeds[Mode.PLAIN], below.get(mode), below[Mode.PLAIN], weight) for mode, speed in speeds.items()}

    def source(self, task: TaskType, load: int) -> str:
        """How the figures of a point came about, in words."""
        like = self._like[task]
        verb = "estimated" if (like, load) in self._estimated else "measured"
        return f"{verb}{'' if like is task else f' on {like}'} with {load} requests at once"

    def crossover(self, mode: Mode, task: TaskType) -> int:
        """The largest load at which the mode is expected to pay: as measured, and beyond what was measured, the default."""
        return self._crossovers[mode, task]

    def ratios(self, mode: Mode, task: TaskType) -> dict[int, dict[int, float]]:
        """Speed relative to plain, by load, the smallest first, and then K."""
        found: dict[int, dict[int, float]] = {}
        for speed in self.speeds:
            plain = self._plain.get((task, speed.load), 0.0)
            if (speed.mode, speed.task) == (mode, task) and plain > 0 and speed.tokens_per_second > 0:
                found.setdefault(speed.load, {})[speed.k] = speed.tokens_per_second / plain
        return dict(sorted(found.items()))

    @cached_property
    def _like(self) -> dict[TaskType, TaskType]:
        tasks = {speed.task for speed in self.speeds}
        return {task: task if task in tasks else STANDS_FOR.get(task, task) for task in TaskType}

    @cached_property
    def _estimated(self) -> set[tuple[TaskType, int]]:
        return {(speed.task, speed.load) for speed in self.speeds if speed.estimated}

    @cached_property
    def _plain(self) -> dict[tuple[TaskType, int], float]:
        return {(speed.task, speed.load): speed.tokens_per_second for speed in self.speeds if speed.mode is Mode.PLAIN}

    @cached_property
    def _points(self) -> dict[TaskType, list[tuple[int, Mapping[Mode, float]]]]:
        fastest: dict[tuple[TaskType, int], dict[Mode, float]] = {point: {} for point in sorted(self._plain)}
        for speed in sorted(self.speeds, key=lambda speed: (speed.k == self._k_at(speed.mode, speed.load), speed.tokens_per_second)):
            modes = fastest.get((speed.task, speed.load))
            if modes is not None:
                modes[speed.mode] = speed.tokens_per_second  # the last: that of the engine's K, or the best where that was not measured
        return {task: [(load, modes) for (of, load), modes in fastest.items() if of is task] for task in TaskType}

    def _k_at(self, mode: Mode, load: int) -> int:
        return next((k for first, last, k in self._schedules.get(mode, ()) if first <= load <= last), 0)

    @cached_property
    def _schedules(self) -> dict[Mode, tuple[tuple[int, int, int], ...]]:
        most: dict[Mode, int] = {}
        for speed in self.speeds:
            most[speed.mode] = max(speed.k, most.get(speed.mode, 0))
        return {mode: schedule(self, mode, k) for mode, k in most.items()}

    @cached_property
    def _crossovers(self) -> dict[tuple[Mode, TaskType], int]:
        return {(mode, task): self._crossover(mode, task) for mode in CROSSOVER for task in TaskType}

    def _crossover(self, mode: Mode, task: TaskType) -> int:
        default = CROSSOVER[mode][task]
        pays = {load: max(by_k.values()) >= 1 for load, by_k in self.ratios(mode, self._like[task]).items()}
        if not pays:
            return default
        last = max((load for load, paid in pays.items() if paid), default=0)
        return max(last, default) if last == max(pays) else last


def _between(speed: float, plain: float, speed_below: float | None, plain_below: float, weight: float) -> float:
    """`speed`, or plain's times the ratio that is geometrically interpolated, if that is known and less."""
    if not speed_below or min(speed, plain, plain_below) <= 0:
        return speed
    return min(speed, float(plain * (speed / plain) ** weight * (speed_below / plain_below) ** (1 - weight)))


def schedule(
    table: TuningTable | None, mode: Mode, most: int | None = None, *, every_task: bool = False
) -> tuple[tuple[int, int, int], ...]:
    """K by how many requests run in a step, as (first, last, K) for vLLM's num_speculative_tokens_per_batch_size.

    `most` is the mode's K in the settings. Each measured load speaks for those between it and the one below. K is the best for the tasks
    that the mode makes faster than plain there, since policy sends it no others, and 0 where there are none. `every_task`: no plain engine
    takes the others, so all are weighed alike. Beyond what was measured K stays up to the default crossover, then drops to 0. Empty for
    plain, and for suffix, which vLLM cannot schedule.
    """
    if mode not in DEFAULT_K:
        return ()
    most = DEFAULT_K[mode] if most is None else most
    by_task = [table.ratios(mode, task) for task in TaskType] if table is not None else []
    ends = [(load, _best_k(by_task, load, most, every_task)) for load in sorted({load for ratios in by_task for load in ratios})]
    last_load, last_k = ends[-1] if ends else (0, most)
    default = max(CROSSOVER[mode].values())
    if default > last_load:
        ends.append((default, last_k))
    ranges: list[tuple[int, int, int]] = []
    for end, k in [*ends, (LARGEST_BATCH, 0)]:
        first = ranges[-1][1] + 1 if ranges else 1
        if ranges and ranges[-1][2] == k:
            first = ranges.pop()[0]
        ranges.append((first, end, k))
    return tuple(ranges)


def _best_k(by_task: Sequence[Mapping[int, Mapping[int, float]]], load: int, most: int, every_task: bool) -> int:
    """Each task's ratios are those of its own measured load next above, as policy takes them."""
    weighed: dict[int, list[float]] = {}
    for by_load in by_task:
        measured = next((by_k for at, by_k in by_load.items() if at >= load), {})
        ratios = {k: ratio for k, ratio in measured.items() if k <= most}
        if every_task or max(ratios.values(), default=0.0) >= 1:
            for k, ratio in ratios.items():
                weighed.setdefault(k, []).append(log(ratio))
    tasks = max(map(len, weighed.values()), default=0)  # a K that was not measured on all of them would be judged by the others
    best, k = max(((fmean(logs), k) for k, logs in weighed.items() if len(logs) == tasks), default=(-1.0, 0))
    return k if best >= 0 else 0
