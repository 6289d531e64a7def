"""The promise of speculation, judged: the same answers as plain decoding, or else a near-tie of its arithmetic, or a fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, computed_field

from specbatch import errand
from specbatch.domain import Mode

MARGIN = 4.0  # two logits move by the noise each, which doubles the gap's; twice that, as the largest of few measurements is too small
FLOOR = 1e-4  # about fifty roundings of a float32 logit of 16: engines that never differed are not held to the last bit


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True)


class Parameters(_Value):
    modes: tuple[Mode, ...]
    n: int = Field(8, ge=1, description="Prompts of each case.")
    seeds: int = Field(64, ge=8, description="Samples of each prompt, from plain decoding and from the mode each.")


class Progress(_Value):
    message: str


class Verdict(StrEnum):
    NEAR_TIE = "near_tie"  # batch arithmetic rounds differently; either token was as good
    FAULT = "fault"


class Answer(_Value):
    """One choice of one response, token by token. `tops` are the likeliest tokens at each place, with their log probabilities.

    Log probabilities are those that tokens are chosen by: after penalties and masks.
    """

    tokens: tuple[int, ...]
    pieces: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[dict[int, float], ...] = ()
    text: str = ""
    finish_reason: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()

    def piece(self, position: int) -> str:
        return self.pieces[position] if position < len(self.pieces) else f"token {self.tokens[position]}"


class Difference(_Value):
    """Where a mode's answer leaves plain decoding's. `gap` is between both tokens' log probabilities, in the plain run (nats)."""

    prompt: int
    verdict: Verdict
    message: str
    position: int | None = None
    plain: str | None = None
    mode: str | None = None
    gap: float | None = None


class Case(_Value):
    """What one kind of request showed. Drafts are counted over the mode's run; None where the engine does not tell them apart.

    `p_value` is the smallest of the case's tests and `threshold` what it must stay above: faults of distributions stand in `differences`.
    """

    name: str
    compared: int
    identical: int | None = None
    differences: tuple[Difference, ...] = ()
    p_value: float | None = None
    threshold: float | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    note: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def near_ties(self) -> int:
        return sum(each.verdict is Verdict.NEAR_TIE for each in self.differences)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def faults(self) -> int:
        return sum(each.verdict is Verdict.FAULT for each in self.differences)


class ModeReport(_Value):
    """`untried` says why nothing was asked in this mode: nothing is claimed for it then."""

    mode: Mode
    cases: tuple[Case, ...] = ()
    untried: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def lossless(self) -> bool:
        return self.untried is None and not any(case.faults for case in self.cases)


class Report(_Value):
    """`noise` is how far plain decoding's log probabilities move with the batch that a request shares; `tolerance` follows from it."""

    model: str
    noise: float
    tolerance: float
    modes: tuple[ModeReport, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def lossless(self) -> bool:
        """Every mode that was tried."""
        return all(mode.lossless for mode in self.modes if mode.untried is None)


def run(parameters: Parameters, environment: Mapping[str, str]) -> Iterator[Progress | Report]:
    """`python -m worker.verify` with these settings: what it does, and at last what it found. Raises EngineStartError."""
    for line in errand.send("worker.verify", parameters.model_dump_json(), environment):
        if line.startswith('{"message":'):
            yield Progress.model_validate_json(line)
        elif line.startswith('{"model":'):
            yield Report.model_validate_json(line)


def tolerance(noise: float) -> float:
    return max(MARGIN * noise, FLOOR)


def noise(pairs: Iterable[tuple[Answer, Answer]]) -> float:
    """How far two runs of one engine, in batches of other sizes, move the log probability of a chosen token or of its runner-up.

    Where the two runs chose differently, the gap that they crossed counts as well.
    """
    return max((moved for first, second in pairs for moved in _moves(first, second)), default=0.0)


def _moves(first: Answer, second: Answer) -> Iterator[float]:
    position = _parting(first, second)
    for here, there in zip(first.tops[:position], second.tops[:position], strict=False):
        for token in sorted(here, key=here.__getitem__)[-2:]:
            if token in there:
                yield abs(here[token] - there[token])
    if position < min(len(first.tokens), len(second.tokens)):
        gap = _gap(first, second, position)
        if gap is not None:
            yield gap


def judge(prompt: int, plain: Answer, mode: Answer, tolerance: float) -> Difference | None:
    """The first difference between two greedy answers to one prompt, or None. Beyond a near-tie the texts go different ways by right."""
    position = _parting(plain, mode)
    if (wrong := _wrong_logprob(prompt, plain, mode, position, tolerance)) is not None:
        return wrong
    if position < min(len(plain.tokens), len(mode.tokens)):
        return _parted(prompt, plain, mode, position, tolerance)
    if len(plain.tokens) != len(mode.tokens):
        return _fault(prompt, f"{len(mode.tokens)} tokens instead of {len(plain.tokens)}, the same as far as they go", position)
    for field in ("text", "finish_reason", "tool_calls"):
        if getattr(plain, field) != getattr(mode, field):
            said = f"the same tokens, but {field} is {getattr(mode, field)!r} instead of {getattr(plain, field)!r}"
            return _fault(prompt, said)
    return None


def _parted(prompt: int, plain: Answer, mode: Answer, position: int, tolerance: float) -> Difference:
    gap = _gap(plain, mode, position)
    if gap is None:
        least = plain.logprobs[position] - min(plain.tops[position].values()) if plain.tops else None
        known = "no log probability was returned" if least is None else f"it trails by more than {least:.3g}"
        verdict, why = Verdict.FAULT, f"not among the likeliest tokens of the plain run: {known}"
    elif gap <= tolerance:
        verdict, why = Verdict.NEAR_TIE, f"a gap of {gap:.3g} is within the {tolerance:.3g} that batch arithmetic moves"
    else:
        verdict, why = Verdict.FAULT, f"a gap of {gap:.3g} is more than the {tolerance:.3g} that batch arithmetic moves"
    here, there = plain.piece(position), mode.piece(position)
    return Difference(
        prompt=prompt,
        verdict=verdict,
        message=f"token {position} is {there!r} instead of {here!r}: {why}",
        position=position,
        plain=here,
        mode=there,
        gap=gap,
    )


def _wrong_logprob(prompt: int, plain: Answer, mode: Answer, position: int, tolerance: float) -> Difference | None:
    for answer, whose in ((plain, "plain decoding"), (mode, "the mode")):
        if answer.logprobs and len(answer.logprobs) != len(answer.tokens):
            return _fault(prompt, f"{whose} returned {len(answer.logprobs)} log probabilities for {len(answer.tokens)} tokens")
    for place, (here, there) in enumerate(zip(plain.logprobs[:position], mode.logprobs[:position], strict=False)):
        if abs(here - there) > tolerance:
            return _fault(prompt, f"the same token {place} has log probability {there:.4g} instead of {here:.4g}", place)
    return None


def _fault(prompt: int, message: str, position: int | None = None) -> Difference:
    return Difference(prompt=prompt, verdict=Verdict.FAULT, message=message, position=position)


def _parting(first: Answer, second: Answer) -> int:
    """The first position where the tokens differ: at most the length of the shorter."""
    same = zip(first.tokens, second.tokens, strict=False)
    return next((place for place, (here, there) in enumerate(same) if here != there), min(len(first.tokens), len(second.tokens)))


def _gap(first: Answer, second: Answer, position: int) -> float | None:
    """Between both runs' tokens at a position, in the first run; None where that run's likeliest tokens hold no such."""
    top = first.tops[position] if position < len(first.tops) else {}
    other = top.get(second.tokens[position])
    return None if other is None else abs(first.logprobs[position] - other)
