"""verify finds the faults that are planted for it, calls near-ties by their name, and lets an honest mode pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from specbatch import frequencies, lossless
from specbatch.domain import Mode, Reply
from specbatch.errors import EngineStartError
from specbatch.frequencies import LEVEL, fewer_p, grams, permutation_p
from specbatch.lossless import Answer, Case, Parameters, Report, Verdict
from specbatch.settings import Settings
from tests.chain_engine import Body, ChainEngine, builder
from worker import fitness
from worker.verify import verify

TOLERANCE = 0.01


def answer(*tokens: int, top: tuple[dict[int, float], ...] = (), **fields: Any) -> Answer:
    tops = top or tuple({token: -0.5, token + 100: -1.0} for token in tokens)
    return Answer(
        tokens=tokens, tops=tops, logprobs=tuple(here.get(token, -0.5) for token, here in zip(tokens, tops, strict=True)), **fields
    )


def test_equal_answers_are_no_difference() -> None:
    assert lossless.judge(0, answer(1, 2, 3), answer(1, 2, 3), TOLERANCE) is None


def test_a_token_that_trails_by_a_rounding_is_a_near_tie() -> None:
    plain = answer(1, 2, top=({1: -0.5}, {2: -0.700, 7: -0.705}))
    found = lossless.judge(3, plain, answer(1, 7), TOLERANCE)
    assert found is not None
    assert (found.verdict, found.prompt, found.position) == (Verdict.NEAR_TIE, 3, 1)
    assert found.gap == pytest.approx(0.005)


def test_a_token_that_trails_by_more_is_a_fault_with_both_tokens_and_the_gap() -> None:
    plain = answer(1, 2, top=({1: -0.5}, {2: -0.7, 7: -0.9}), pieces=("a", "b"))
    found = lossless.judge(0, plain, answer(1, 7, pieces=("a", "c")), TOLERANCE)
    assert found is not None
    assert (found.verdict, found.plain, found.mode) == (Verdict.FAULT, "b", "c")
    assert found.gap == pytest.approx(0.2)
    assert "'c' instead of 'b'" in found.message


def test_a_token_beyond_the_likeliest_is_a_fault_with_the_least_gap() -> None:
    found = lossless.judge(0, answer(1, top=({1: -0.5, 2: -4.5},)), answer(9), TOLERANCE)
    assert found is not None
    assert found.verdict is Verdict.FAULT
    assert "more than 4" in found.message


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (answer(1, 2, 3), "3 tokens instead of 2"),
        (answer(1), "1 tokens instead of 2"),
        (answer(1, 2, text="cut"), "text is 'cut'"),
        (answer(1, 2, finish_reason="stop"), "finish_reason is 'stop'"),
        (answer(1, 2, tool_calls=(("set", "{}"),)), "tool_calls"),
        (answer(1, 2, top=({1: -0.5}, {2: -0.6})), "log probability -0.6 instead of -0.5"),
        (answer(1, 2).model_copy(update={"logprobs": (-0.5,)}), "1 log probabilities for 2 tokens"),
    ],
    ids=["longer", "shorter", "text", "finish_reason", "tool calls", "logprob", "logprobs lost"],
)
def test_the_same_beginning_does_not_hide_a_fault(mode: Answer, said: str) -> None:
    found = lossless.judge(0, answer(1, 2), mode, TOLERANCE)
    assert found is not None
    assert found.verdict is Verdict.FAULT
    assert said in found.message


def test_noise_is_what_one_engine_moves_between_its_own_runs() -> None:
    first = answer(1, 2, top=({1: -0.50, 8: -0.9}, {2: -0.7, 7: -0.74}))
    assert lossless.noise([(first, first)]) == 0
    assert lossless.noise([(first, answer(1, 2, top=({1: -0.52, 8: -0.9}, first.tops[1])))]) == pytest.approx(0.02)
    assert lossless.tolerance(0) == lossless.FLOOR
    assert lossless.tolerance(0.1) == pytest.approx(lossless.MARGIN * 0.1)


def test_noise_counts_a_gap_that_plain_decoding_itself_crossed() -> None:
    first = answer(1, top=({1: -0.5, 7: -0.8},))
    assert lossless.noise([(first, answer(7))]) == pytest.approx(0.3)


def draw(seed: int, weights: Sequence[float], samples: int = 96) -> list[tuple[int, ...]]:
    chance = random.Random(seed)
    return [tuple(chance.choices(range(len(weights)), weights, k=4)) for _ in range(samples)]


RIGHT, WRONG = [5, 3, 2, 1, 1], [2, 6, 2, 1, 1]


def least_p(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> tuple[float, float]:
    tests, threshold = frequencies.compare([first], [second])
    return min(test.p_value for test in tests), threshold


@pytest.mark.parametrize("seed", range(20))
def test_draws_of_one_distribution_pass(seed: int) -> None:
    p_value, threshold = least_p(draw(seed, RIGHT), draw(seed + 1000, RIGHT))
    assert p_value > threshold


@pytest.mark.parametrize("seed", range(20))
def test_draws_of_another_distribution_are_rejected(seed: int) -> None:
    p_value, threshold = least_p(draw(seed, RIGHT), draw(seed + 1000, WRONG))
    assert p_value <= threshold


def test_p_values_are_no_smaller_than_chance_makes_them() -> None:
    """Under the null a p-value of at most x has a probability of at most x: of 200, 20 are expected below 0.1, and 34 is 3.3 deviations."""
    small = sum(
        permutation_p([grams(one, 1) for one in draw(seed, RIGHT, 40)], [grams(one, 1) for one in draw(seed + 500, RIGHT, 40)], 0.01) <= 0.1
        for seed in range(200)
    )
    assert small <= 34


def test_an_order_that_single_tokens_do_not_show_is_found_in_runs() -> None:
    """The same tokens as often, and the first token alike: only what follows what differs."""
    chance = random.Random(5)
    pairs = [(chance.randrange(2), chance.randrange(2)) for _ in range(200)]
    paired = [(0, one, one, other, other) for one, other in pairs]
    crossed = [(0, one, other, one, other) for one, other in pairs]
    tests, threshold = frequencies.compare([paired], [crossed])
    assert {test.length for test in tests if test.p_value <= threshold} >= {2}
    assert next(test.p_value for test in tests if test.length == 1) == 1


def test_nothing_sampled_is_no_evidence() -> None:
    assert permutation_p([[], []], [[], []], 0.01) == 1


def test_fishers_test_agrees_with_counting() -> None:
    assert fewer_p(8, 8, 8) == 1
    assert fewer_p(8, 0, 8) == pytest.approx(1 / 12870)  # one way of C(16, 8)
    assert fewer_p(3, 1, 4) == pytest.approx((1 * 1 + 4 * 4) / 70)  # C(4,0) C(4,4) + C(4,1) C(4,3), of C(8,4)
    assert fewer_p(0, 0, 8) == 1


def report(
    change: Callable[[Body], Body] = dict,
    tamper: Callable[[Body, Body], Body] = lambda _, body: body,
    settings: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Report:
    parameters = Parameters(**{"modes": (Mode.NGRAM,), "n": 4, "seeds": 8} | fields)
    return asyncio.run(verify(builder(change, tamper), Settings(data_dir=Path("unused"), **(settings or {})), parameters, lambda _: None))


def faulty(found: Report) -> dict[str, Case]:
    return {case.name: case for case in found.modes[0].cases if case.faults}


def test_an_honest_mode_passes_and_every_case_is_tried() -> None:
    found = report(n=8, seeds=96)
    assert found.lossless, faulty(found)
    assert [case.name for case in found.modes[0].cases] == [
        "greedy",
        "penalties",
        "structured",
        "tool calls",
        "n > 1",
        "stop strings",
        "sampling",
        "sampling among few tokens",
        "sampling, top-k and top-p, n > 1",
        "seeds",
    ]
    for case in found.modes[0].cases:
        assert case.compared > 0
        assert case.note is None
        assert case.p_value is not None or case.identical == case.compared


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_that_drafts_escape_is_found(penalty: str) -> None:
    found = report(lambda body: {key: value for key, value in body.items() if key != penalty})
    assert list(faulty(found)) == ["penalties"]


def swap_token(body: Body, answered: Body) -> Body:
    """One token of one answer is another one, as if a rejected draft had stayed."""
    if body["messages"][0]["content"].startswith("Why is the sky") and body["temperature"] == 0 and "stop" not in body:
        answered["choices"][0]["token_ids"][5] = (answered["choices"][0]["token_ids"][5] + 1) % 8
    return answered


def test_a_single_wrong_token_is_found() -> None:
    found = report(tamper=swap_token)
    assert not found.lossless
    difference = faulty(found)["greedy"].differences[0]
    assert (difference.prompt, difference.position) == (3, 5)


def run_past_the_stop(body: Body, answered: Body) -> Body:
    for choice in answered["choices"] if "stop" in body else []:
        choice["token_ids"].append(3)
        choice["logprobs"]["content"].append(choice["logprobs"]["content"][-1])
    return answered


def test_tokens_past_a_stop_are_found() -> None:
    found = faulty(report(tamper=run_past_the_stop))
    assert list(found) == ["stop strings"]
    assert "tokens instead of" in found["stop strings"].differences[0].message


def lose_a_logprob(body: Body, answered: Body) -> Body:
    for choice in answered["choices"] if "stop" in body else []:
        choice["logprobs"]["content"].pop()
    return answered


def test_log_probabilities_that_lag_behind_their_tokens_are_found() -> None:
    assert list(faulty(report(tamper=lose_a_logprob))) == ["stop strings"]


def test_a_choice_that_got_lost_is_found() -> None:
    found = faulty(report(lambda body: body | {"n": 2} if body.get("top_k") == 1 else body))
    assert list(found) == ["n > 1"]


def warmer(body: Body) -> Body:
    return body if body["temperature"] == 0 or body.get("top_k") == 1 else body | {"temperature": 1.7 * body["temperature"]}


def test_another_temperature_is_found_in_the_frequencies() -> None:
    found = faulty(report(warmer, n=1, seeds=64))
    assert {"sampling", "sampling, top-k and top-p, n > 1"} <= set(found)
    assert all(case.p_value is not None and case.threshold is not None and case.p_value <= case.threshold for case in found.values())


def test_top_k_that_is_not_obeyed_is_found() -> None:
    found = faulty(report(lambda body: body | {"top_k": 2} if body.get("top_k") == 12 else body, n=1, seeds=64))
    assert list(found) == ["sampling, top-k and top-p, n > 1"]


def test_seeds_that_are_ignored_are_found() -> None:
    found = faulty(report(lambda body: {key: value for key, value in body.items() if key != "seed"}))
    assert list(found) == ["seeds"]
    assert found["seeds"].p_value is not None
    assert found["seeds"].p_value <= LEVEL


def test_seeds_that_cannot_repeat_are_told_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of suffix and of chance differ each time, and policy keeps seeded rows away: all else is judged as ever."""

    monkeypatch.setattr(fitness, "suffix_missing", lambda: None)

    def without_seed(body: Body) -> Body:
        return {key: value for key, value in body.items() if key != "seed"}

    chance = {"draft_sample_method": "probabilistic"}
    for mode, settings, why in ((Mode.SUFFIX, {}, "rows before"), (Mode.DRAFT_MODEL, chance, "by chance")):
        found = report(without_seed, settings=settings, modes=(mode,))
        assert found.lossless, faulty(found)
        seeds = found.modes[0].cases[-1]
        assert seeds.name == "seeds"
        assert seeds.identical is not None
        assert seeds.identical < seeds.compared
        assert why in (seeds.note or "")
    assert list(faulty(report(without_seed, modes=(Mode.DRAFT_MODEL,)))) == ["seeds"]
    honest = report(modes=(Mode.SUFFIX,)).modes[0].cases[-1]
    assert (honest.identical, honest.note) == (honest.compared, None)


@pytest.fixture
def without_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "suffix_missing", lambda: "its package is missing")


@pytest.mark.usefixtures("without_suffix")
def test_a_mode_that_cannot_be_tried_does_not_hide_the_others() -> None:
    found = report(modes=(Mode.SUFFIX, Mode.NGRAM), n=1)
    suffix, ngram = found.modes
    assert (suffix.untried, suffix.cases, suffix.lossless) == ("its package is missing", (), False)
    assert ngram.lossless
    assert found.lossless, "nothing is claimed for what was not tried"


@pytest.mark.usefixtures("without_suffix")
def test_no_engine_starts_where_no_mode_can_be_tried() -> None:
    def build(settings: Settings, mode: Mode) -> Any:
        raise AssertionError(mode)

    with pytest.raises(EngineStartError, match="mode suffix cannot be tried: its package is missing"):
        asyncio.run(verify(build, Settings(data_dir=Path("unused")), Parameters(modes=(Mode.SUFFIX,)), lambda message: None))


def test_a_mode_whose_engine_does_not_start_is_untried() -> None:
    built = builder()

    def build(settings: Settings, mode: Mode) -> Any:
        if mode is Mode.EAGLE:
            raise EngineStartError("the head is too wide")
        return built(settings, mode)

    parameters = Parameters(modes=(Mode.EAGLE, Mode.NGRAM), n=1, seeds=8)
    found = asyncio.run(verify(build, Settings(data_dir=Path("unused")), parameters, lambda message: None))
    assert [(mode.untried, mode.lossless) for mode in found.modes] == [("the head is too wide", False), (None, True)]


class Wavering(ChainEngine):
    """Log probabilities that lean on how many requests are inside, as those of low precision do."""

    def __init__(self, mode: Mode, by: float) -> None:
        super().__init__(mode)
        self._by, self._inside = by, 0

    async def answer(self, request_id: str, endpoint: str, body: Body) -> Reply:
        self._inside += 1
        await asyncio.sleep(0)
        lean = self._by * min(self._inside, 3)
        reply = await super().answer(request_id, endpoint, body)
        self._inside -= 1
        for choice in reply.body["choices"]:
            for entry in (choice["logprobs"] or {"content": []})["content"]:
                entry["logprob"] -= lean
                for top in entry["top_logprobs"]:
                    top["logprob"] -= lean
        return reply


@pytest.mark.parametrize("n", [1, 2, 8])
def test_noise_is_seen_with_any_number_of_prompts(n: int) -> None:
    """One prompt alone has no company: its answer beside the other probes counts as well."""

    def build(settings: Settings, mode: Mode) -> Any:
        return Wavering(mode, 0.01)

    parameters = Parameters(modes=(Mode.NGRAM,), n=n, seeds=8)
    found = asyncio.run(verify(build, Settings(data_dir=Path("unused")), parameters, lambda message: None))
    assert found.noise >= 0.01
    assert found.lossless, faulty(found)


def test_a_request_that_only_the_mode_refuses_is_a_fault() -> None:
    found = faulty(report(lambda body: body | {"min_p": 0.1} if "frequency_penalty" in body else body))
    assert list(found) == ["penalties"]
    assert "min_p is refused" in found["penalties"].differences[0].message


def test_a_mode_that_dies_has_a_fault_and_the_others_are_still_tried() -> None:
    found = report(lambda body: body | {"die": body.get("top_k") == 12}, modes=(Mode.NGRAM, Mode.DRAFT_MODEL))
    assert [[case.name for case in mode.cases if case.faults] for mode in found.modes] == [["engine"], ["engine"]]
    assert "the table is gone" in found.modes[0].cases[0].differences[0].message


def test_plain_decoding_that_dies_ends_it() -> None:
    def build(settings: Settings, mode: Mode) -> Any:
        return ChainEngine(mode, lambda body: body | {"die": True})

    with pytest.raises(EngineStartError, match="died in mode plain"):
        asyncio.run(verify(build, Settings(data_dir=Path("unused")), Parameters(modes=(Mode.NGRAM,)), lambda message: None))


def test_an_engine_without_token_ids_is_told_so() -> None:
    settings = Settings(data_dir=Path("unused"), engine="scripted")
    from worker.engine import build

    with pytest.raises(EngineStartError, match="no token ids"):
        asyncio.run(verify(build, settings, Parameters(modes=(Mode.NGRAM,), n=1), lambda message: None))


def test_every_engine_is_stopped_before_the_next_one_starts() -> None:
    running: list[Mode] = []
    built = builder()

    def build(settings: Settings, mode: Mode) -> Any:
        assert not any(engine.running for engine in engines)
        engines.append(built(settings, mode))
        running.append(mode)
        return engines[-1]

    engines: list[Any] = []
    parameters = Parameters(modes=(Mode.NGRAM, Mode.DRAFT_MODEL), n=2, seeds=8)
    asyncio.run(verify(build, Settings(data_dir=Path("unused")), parameters, lambda message: None))
    assert running == [Mode.PLAIN, Mode.NGRAM, Mode.DRAFT_MODEL]
    assert not any(engine.running for engine in engines)
