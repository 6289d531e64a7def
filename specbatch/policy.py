"""Which mode a row decodes in, and why. Pure: a function of the task type, the sampling, the load, what workers offer, and measurements.

Measurements of this machine win over the defaults below, in this order: speeds seen while serving, the tuning table, acceptance rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbatch.domain import Decision, Mode, TaskType
from specbatch.tuning import DEFAULT_K, TuningTable

STRUCTURED = frozenset({TaskType.CODE, TaskType.JSON, TaskType.EXTRACTION, TaskType.SUMMARY})
LOOKUPS = (Mode.SUFFIX, Mode.NGRAM)  # they draft from the text itself
DRAFTERS = (Mode.EAGLE3, Mode.EAGLE, Mode.DRAFT_MODEL)  # they draft with a second model
PREFERENCE = {task: (*LOOKUPS, *DRAFTERS) if task in STRUCTURED else (*DRAFTERS, *reversed(LOOKUPS)) for task in TaskType}
# JSON repeats values and invents keys and punctuation: on an H200 an EAGLE-3 head made it 1.8 to 2.4 times faster up to 16 requests, suffix
# 1.1 to 1.8, ngram 1.2 to 1.4. On code ngram won, 2.3 to 2.7 against 1.2 to 1.4 up to 4.
PREFERENCE[TaskType.JSON] = (Mode.EAGLE3, *(mode for mode in PREFERENCE[TaskType.JSON] if mode is not Mode.EAGLE3))

# The least acceptance rate (accepted / drafted tokens) worth keeping. 40% where every drafted token costs a pass of a second model. A
# head's passes are short: on an H200, 7B target, K=4, EAGLE-3 gained at 0.19 (chat 1.3 times plain alone, code 1.08 at 16). A lookup costs
# none: ngram gained at 0.13 (JSON), and at 0.07 (chat) gained alone and lost 3% at 16. suffix's drafts are verified like ngram's.
ACCEPTANCE_FLOOR = {Mode.DRAFT_MODEL: 0.40, Mode.EAGLE: 0.15, Mode.EAGLE3: 0.15, Mode.NGRAM: 0.07, Mode.SUFFIX: 0.07}
WINDOW_ROWS, WINDOW_DRAFTED = 32, 256  # a smaller window does not demote
SLOWDOWN = 0.95  # of plain's speed; closer than that is noise between runs
RETRY_EVERY = 64  # of rows that a demotion sends elsewhere, one in so many tries the mode again


@dataclass(frozen=True, slots=True)
class Offer:
    """The modes that workers offer for a model, and why a mode is withheld, in words that follow "but": "no draft model is configured",
    "the draft needs 1.2 GiB and 0.4 GiB are free", "token 17 is 'a' in the target and 'b' in the draft". A withheld mode is not offered."""

    modes: frozenset[Mode]
    withheld: Mapping[Mode, str] = field(default_factory=dict)

    @property
    def available(self) -> frozenset[Mode]:
        return self.modes.difference(self.withheld)


@dataclass(frozen=True, slots=True)
class Window:
    """A mode's latest rows of one task type. `tokens_per_second` is the engine's, at a load like the one expected; None if unknown."""

    rows: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    tokens_per_second: float | None = None


History = Mapping[tuple[Mode, TaskType], Window]
_UNMEASURED = TuningTable()


EPSILON = 1e-5  # vLLM's own: a min_p up to it counts as unset, a temperature below it as greedy
# What vLLM does not refuse, and does not obey to the letter: what is wrong, and what its engine will do. Both found by `verify`.
INEXACT = {
    # vLLM lifts its mask of end tokens a step at a time: within a draft, some positions too late.
    "min_tokens": ("is not exact", "not be exact about min_tokens"),
    # A drafted token takes random numbers of the seed's, so the text depends on what was drafted: on how many requests share the step (K by
    # batch size), on the rows before (suffix), on chance (probabilistic drafts). The distribution is right, the repetition is lost.
    "seed": ("does not repeat its text", "not repeat the text of a seed"),
}


def refused_sampling(body: object) -> str | None:
    """The parameter that vLLM refuses under speculation, or does not obey to the letter, or None."""
    if not isinstance(body, Mapping):
        return None
    given = {
        "min_p": _above(body.get("min_p"), 0.0),
        "logit_bias": body.get("logit_bias"),
        "min_tokens": body.get("min_tokens"),
        # -1 means none. Greedy text has no use for a seed; without a temperature text is sampled.
        "seed": body.get("seed") not in (None, -1) and _above(body.get("temperature"), 1.0),
    }
    return next((name for name, value in given.items() if value), None)


def _above(value: object, default: float) -> bool:
    try:
        return float(default if value is None else value) > EPSILON  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False  # not a number: the engine answers 400 in any mode


def decide(
    task: TaskType,
    body: Mapping[str, Any],
    load: int,
    offer: Offer,
    history: History | None = None,
    table: TuningTable | None = None,
    *,
    named_mode: Mode | None = None,
    row_index: int = 0,
) -> Decision:
    """The mode of one row. Never raises; the mode is one that is offered, or plain where nothing is offered yet.

    `load` is how many requests are expected to decode at once in the engine. `named_mode` is the user's wish. `row_index` spreads the
    retries of a demoted mode, so that the same file is decided the same way twice.
    """
    available, refused = offer.available, refused_sampling(body)
    if not available:
        return Decision(task, Mode.PLAIN, "No worker offers a mode for this model yet: plain, until one does.")
    why, will = INEXACT.get(refused or "", ("is refused", f"refuse {refused}"))
    if refused and Mode.PLAIN in available:
        return Decision(task, Mode.PLAIN, f"{refused} {why} under speculation: plain.")
    warning = f"; without a worker that offers plain, the engine will {will}" if refused else ""
    if named_mode in available:
        return Decision(task, named_mode, f"{named_mode} was asked for{warning}.")
    wish = f"{named_mode} was asked for, but {offer.withheld.get(named_mode, 'no worker offers it')}; " if named_mode else ""
    mode, why = _Choice(task, max(1, load), offer, history or {}, table or _UNMEASURED).make(row_index)
    return Decision(task, mode, f"{wish}{why}{warning}.")


def slowdown(mode: Mode, task: TaskType, history: History) -> str | None:
    """That the mode was slower than plain at a like load, in words; None if it was not, or one of them is not known."""
    speeds = _live_speeds(mode, task, history)
    if speeds is None or speeds[0] >= SLOWDOWN * speeds[1]:
        return None
    return f"{mode} generated {speeds[0]:,.0f} tokens/s against plain's {speeds[1]:,.0f}"


def rejection(mode: Mode, task: TaskType, history: History) -> str | None:
    """That too few of the mode's drafted tokens were accepted, in words; None where speeds are known: they say more."""
    window = history.get((mode, task), Window())
    if window.rows < WINDOW_ROWS or window.drafted_tokens < WINDOW_DRAFTED or _live_speeds(mode, task, history):
        return None
    rate, floor = window.accepted_tokens / window.drafted_tokens, ACCEPTANCE_FLOOR.get(mode, 0.0)
    return f"{mode} had {rate:.0%} of {window.drafted_tokens:,} drafted tokens accepted, under {floor:.0%}" if rate < floor else None


def _live_speeds(mode: Mode, task: TaskType, history: History) -> tuple[float, float] | None:
    speeds = [history.get((of, task), Window()).tokens_per_second for of in (mode, Mode.PLAIN)]
    return (speeds[0], speeds[1]) if speeds[0] and speeds[1] else None


@dataclass(frozen=True, slots=True)
class _Choice:
    task: TaskType
    load: int
    offer: Offer
    history: History
    table: TuningTable

    def make(self, row_index: int) -> tuple[Mode, str]:
        """The first mode without a flaw: of those measured at this load, the fastest first; else in the order of preference."""
        at, speeds = self.table.at(self.task, self.load)
        offered = [mode for mode in PREFERENCE[self.task] if mode in self.offer.available]
        measured = self._ranked(offered, speeds)
        flaws = list(self._missing())
        idle: list[Mode] = []  # at this load they would not draft, if told so by batch size
        for mode in measured or offered:
            overload = None if measured else self._overload(mode)
            if overload:
                flaws.append(overload)
                idle += [mode] if mode in DEFAULT_K else []
            elif flaw := slowdown(mode, self.task, self.history) or (None if measured else rejection(mode, self.task, self.history)):
                flaws.append(flaw)
                if row_index % RETRY_EVERY == RETRY_EVERY - 1:
                    return mode, self._say(flaws, f"{mode} again on one row in {RETRY_EVERY}, to see whether that still holds")
            elif measured:
                return mode, self._say(flaws, self._compare(mode, at, speeds))
            else:
                return mode, self._say(flaws, f"{mode}, which pays up to {self._limit(mode)} requests at once ({self.load} expected)")
        if Mode.PLAIN in self.offer.available:
            return Mode.PLAIN, self._say(flaws, "plain")
        if idle:
            return idle[0], self._say(
                flaws, f"{idle[0]}, since no worker offers plain (tokens_by_batch_size can stop its drafts at this load)"
            )
        return offered[0], self._say(flaws, f"{offered[0]}, since no worker offers plain")

    def _compare(self, mode: Mode, at: int, speeds: Mapping[Mode, float]) -> str:
        if mode is Mode.PLAIN and any(speed > speeds[mode] for of, speed in speeds.items() if of in self.offer.available):
            source = self.table.source(self.task, at)
            return f"plain, since nothing gained {1 - SLOWDOWN:.0%} of what was {source} ({speeds[mode]:,.0f} tokens/s)"
        if mode is Mode.PLAIN:
            return f"plain, the fastest of what was {self.table.source(self.task, at)} ({speeds[mode]:,.0f} tokens/s)"
        pair = f"{speeds[mode]:,.0f} tokens/s against {speeds[Mode.PLAIN]:,.0f} in plain"
        missing = "" if Mode.PLAIN in self.offer.available else ", which no worker offers"
        return f"{mode}, {self.table.source(self.task, at)}: {pair}{missing}"

    def _ranked(self, offered: Sequence[Mode], speeds: Mapping[Mode, float]) -> list[Mode]:
        """The offered modes that were measured, the fastest first; none unless one of them speculates. Equal ones keep their order.

        Plain comes before what is faster by no more than noise: it needs no memory, and costs nothing where the noise was the gain.
        """
        known = [mode for mode in offered if mode in speeds]
        plain = [Mode.PLAIN] if Mode.PLAIN in self.offer.available else []
        worth = {mode: speed / SLOWDOWN if mode is Mode.PLAIN else speed for mode, speed in speeds.items()}
        return sorted([*known, *plain], key=lambda mode: -worth[mode]) if known else []

    def _missing(self) -> Iterator[str]:
        """Why the kind of mode that suits the task is not to be had at all. One mode of the kind is enough for silence."""
        kind, name = (LOOKUPS, "ngram or suffix") if self.task in STRUCTURED else (DRAFTERS, "a draft model or an EAGLE head")
        if self.offer.available.isdisjoint(kind):
            yield from dict.fromkeys(self.offer.withheld[mode] for mode in reversed(kind) if mode in self.offer.withheld)
            if self.offer.withheld.keys().isdisjoint(kind):
                yield f"no worker offers {name}"

    def _limit(self, mode: Mode) -> int:
        return self.table.crossover(mode, self.task)

    def _overload(self, mode: Mode) -> str | None:
        limit = self._limit(mode)
        if self.load <= limit:
            return None
        if limit == 0:
            return f"{mode} paid at no load that was measured"
        return f"{mode} pays only up to {limit} requests at once ({self.load} expected)"

    def _say(self, flaws: Sequence[str], choice: str) -> str:
        nature = "repeat their input" if self.task in STRUCTURED else "are new text"
        return f"{self.task} answers {nature}{', but ' + ' and '.join(flaws) if flaws else ''}: {choice}"
