"""Where a mode stops paying, and how many tokens to draft: what `tune` measured on this machine, and the defaults until it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from statistics import fmean

from specbatch.domain import Mode, TaskType

# The most requests at once for which a mode is expected to pay, in TaskType's order: code, json, extraction, summary, chat, creative.
# ngram: measured twice on one H200, 7B target, K=4. Code 1.18 and 1.07 times plain at 64; 0.70 and 1.35 at 256. JSON 1.16 at 64 where
#   19% of the drafts were accepted, 0.69 where 14% were, 1.28 at 16. Chat 1.34 and 1.31 alone, 0.97 and 1.10 at 16. Extraction and
#   summaries were not measured and get half of JSON's.
# suffix: verified like ngram's drafts; on two CPU cores, 8 at once, JSON gained (44 tokens/s against 36) and chat lost (36 against 40).
# draft_model: on the same H200 a 17M draft broke even on JSON up to 16 (acceptance 0.83), crossed near 2 on code (0.60), and never paid on
#   chat (0.37), where policy's acceptance floor demotes it; a draft above the floor was not measured on chat and gets JSON's load. A second
#   run, with vLLM's older runner, found no load at which that draft paid (docs/benchmarks.md): measure yours with `tune`.
#   Extraction and summaries were not measured and lie between code and JSON.
# eagle, eagle3: published (arXiv 2503.01840, in vLLM, 8B target): EAGLE gains up to a batch of 24, EAGLE-3 up to 56. Not measured here.
_BY_TASK = {
    Mode.SUFFIX: (64, 16, 8, 8, 4, 4),
    Mode.NGRAM: (64, 16, 8, 8, 8, 8),
    Mode.DRAFT_MODEL: (2, 16, 4, 4, 16, 16),
    Mode.EAGLE: (24, 24, 24, 24, 24, 24),
    Mode.EAGLE3: (56, 56, 56, 56, 56, 56),
}
CROSSOVER: dict[Mode, dict[TaskType, int]] = {mode: dict(zip(TaskType, loads, strict=True)) for mode, loads in _BY_TASK.items()}

DEFAULT_K = {Mode.NGRAM: 4, Mode.DRAFT_MODEL: 5, Mode.EAGLE: 5, Mode.EAGLE3: 5}  # the modes whose K vLLM can schedule
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
        """The measured load next above, where speculation pays no more than at `load`, and each mode's speed there with its best K.

        Beyond the measured loads: (0, {}).
        """
        return next((point for point in self._points[self._like[task]] if point[0] >= load), (0, {}))

    def source(self, task: TaskType, load: int) -> str:
        """How the figures of a point came about, in words."""
        like = self._like[task]
        verb = "estimated" if (like, load) in self._estimated else "measured"
        return f"{verb}{'' if like is task else f' on {like}'} with {load} requests at once"

    def crossover(self, mode: Mode, task: TaskType) -> int:
        """The largest load at which the mode is expected to pay: as measured, and beyond what was measured, the default."""
        return self._crossovers[mode, task]

    def ratios(self, mode: Mode, *tasks: TaskType) -> dict[int, dict[int, float]]:
        """Speed relative to plain, by load and then K: the geometric mean over the tasks (all, if none is named)."""
        logs: dict[int, dict[int, list[float]]] = {}
        for speed in self.speeds:
            plain = self._plain.get((speed.task, speed.load), 0.0)
            if speed.mode is mode and (not tasks or speed.task in tasks) and plain > 0 and speed.tokens_per_second > 0:
                logs.setdefault(speed.load, {}).setdefault(speed.k, []).append(log(speed.tokens_per_second / plain))
        return {load: {k: exp(fmean(seen)) for k, seen in by_k.items()} for load, by_k in sorted(logs.items())}

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
        for speed in self.speeds:
            modes = fastest.get((speed.task, speed.load))
            if modes is not None:
                modes[speed.mode] = max(speed.tokens_per_second, modes.get(speed.mode, 0.0))
        return {task: [(load, modes) for (of, load), modes in fastest.items() if of is task] for task in TaskType}

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


def schedule(table: TuningTable | None, mode: Mode, most: int | None = None) -> tuple[tuple[int, int, int], ...]:
    """K by how many requests run in a step, as (first, last, K) for vLLM's num_speculative_tokens_per_batch_size.

    `most` is the mode's K in the settings. Each measured load speaks for those between it and the one below; K is 0 where plain was
    faster. Beyond what was measured K stays up to the default crossover, then drops to 0. Empty for plain, and for suffix, which vLLM
    cannot schedule.
    """
    if mode not in DEFAULT_K:
        return ()
    most = DEFAULT_K[mode] if most is None else most
    ends: list[tuple[int, int]] = []
    for load, ratios in (table or TuningTable()).ratios(mode).items():
        ratio, k = max(((ratio, k) for k, ratio in ratios.items() if k <= most), default=(0.0, 0))
        ends.append((load, k if ratio >= 1 else 0))
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
