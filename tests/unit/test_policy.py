"""Every rule and guard of the decision, made to fire; and what must hold for any input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.domain import Decision, Mode, TaskType
from specbatch.policy import ACCEPTANCE_FLOOR, RETRY_EVERY, WINDOW_DRAFTED, WINDOW_ROWS, History, Offer, Window, decide, refused_sampling
from specbatch.tuning import CROSSOVER, DEFAULT_K, LARGEST_BATCH, Speed, TuningTable, schedule

STRUCTURED = [TaskType.CODE, TaskType.JSON, TaskType.EXTRACTION, TaskType.SUMMARY]
FREE = [TaskType.CHAT, TaskType.CREATIVE]
ALL = frozenset(Mode)
RETRIED_ROW = RETRY_EVERY - 1


def offer(*modes: Mode, **withheld: str) -> Offer:
    return Offer(frozenset(modes) or ALL, {Mode(name): why for name, why in withheld.items()})


def pick(
    task: TaskType = TaskType.CODE, offered: Offer | None = None, load: int = 1, body: dict[str, Any] | None = None, **more: Any
) -> Decision:
    return decide(task, body or {}, load, offered or offer(), **more)


def window(mode: Mode, task: TaskType, rate: float, rows: int = WINDOW_ROWS, drafted: int = 1_000, speed: float | None = None) -> History:
    return {(mode, task): Window(rows, drafted, round(rate * drafted), speed)}


def table(task: TaskType, *points: tuple[Mode, int, float]) -> TuningTable:
    return TuningTable(tuple(Speed(mode, task, load, DEFAULT_K.get(mode, 0), speed) for mode, load, speed in points))


@pytest.mark.parametrize("task", STRUCTURED)
def test_structured_answers_look_up_their_drafts(task: TaskType) -> None:
    assert pick(task).mode is (Mode.EAGLE3 if task is TaskType.JSON else Mode.SUFFIX)
    assert pick(task, offer(*ALL - {Mode.EAGLE3})).mode is Mode.SUFFIX
    without = pick(task, offer(*ALL - {Mode.EAGLE3, Mode.SUFFIX}))
    assert without.mode is Mode.NGRAM
    assert (
        without.reason
        == f"{task} answers repeat their input: ngram, which pays up to {CROSSOVER[Mode.NGRAM][task]} requests at once (1 expected)."
    )


@pytest.mark.parametrize("task", FREE)
def test_new_text_is_drafted_by_a_model_and_by_a_head_before_it(task: TaskType) -> None:
    offered = set(ALL)
    for expected in (Mode.EAGLE3, Mode.EAGLE, Mode.DRAFT_MODEL, Mode.NGRAM, Mode.SUFFIX, Mode.PLAIN):
        assert pick(task, offer(*offered)).mode is expected
        offered.remove(expected)


@pytest.mark.parametrize(
    ("body", "name"), [({"min_p": 0.1}, "min_p"), ({"min_p": "0.1"}, "min_p"), ({"logit_bias": {"5": 1}}, "logit_bias")]
)
def test_sampling_that_speculation_refuses_decodes_plainly(body: dict[str, Any], name: str) -> None:
    for wish in (None, Mode.NGRAM):
        assert pick(body=body, named_mode=wish) == Decision(TaskType.CODE, Mode.PLAIN, f"{name} is refused under speculation: plain.")
    warned = pick(body=body, offered=offer(Mode.NGRAM))
    assert warned.mode is Mode.NGRAM
    assert warned.reason.endswith(f"without a worker that offers plain, the engine will refuse {name}.")


def test_min_tokens_decodes_plainly_where_it_can() -> None:
    body = {"min_tokens": 12}
    assert pick(body=body).reason == "min_tokens is not exact under speculation: plain."
    warned = pick(body=body, offered=offer(Mode.NGRAM))
    assert warned.mode is Mode.NGRAM
    assert warned.reason.endswith("without a worker that offers plain, the engine will not be exact about min_tokens.")
    assert refused_sampling({"min_tokens": 0}) is None


@pytest.mark.parametrize("body", [{"seed": 7}, {"seed": 0, "temperature": 0.2}, {"seed": 7, "temperature": None}])
def test_seeded_text_decodes_plainly_where_it_can(body: dict[str, Any]) -> None:
    """Also where the user named a mode: which of vLLM's would repeat the text depends on the company that a row gets."""
    for wish in (None, *Mode):
        assert pick(body=body, named_mode=wish) == Decision(
            TaskType.CODE, Mode.PLAIN, "seed does not repeat its text under speculation: plain."
        )
    warned = pick(body=body, offered=offer(Mode.SUFFIX, Mode.DRAFT_MODEL), named_mode=Mode.DRAFT_MODEL)
    assert warned.mode is Mode.DRAFT_MODEL
    assert warned.reason.endswith("without a worker that offers plain, the engine will not repeat the text of a seed.")


@pytest.mark.parametrize("body", [{"seed": 7, "temperature": 0}, {"seed": 7, "temperature": 1e-6}, {"seed": -1}, {"seed": None}, {}])
def test_greedy_text_and_unseeded_samples_are_speculated_on(body: dict[str, Any]) -> None:
    assert refused_sampling(body) is None
    assert pick(body=body).mode is Mode.SUFFIX


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"min_p": 0}, {"min_p": 1e-6}, {"min_p": None}, {"min_p": "much"}, {"min_p": []}, {"logit_bias": {}}, None, "text"),
        *({"seed": 7, "temperature": "hot"}, {"seed": 7, "temperature": []}, {"seed": None, "temperature": 1}),
    ],
)
def test_sampling_that_speculation_accepts(body: Any) -> None:
    assert refused_sampling(body) is None


def test_a_named_mode_wins_where_it_is_offered() -> None:
    assert pick(TaskType.CHAT, named_mode=Mode.SUFFIX, load=1_000) == Decision(TaskType.CHAT, Mode.SUFFIX, "suffix was asked for.")
    other = pick(TaskType.CHAT, offer(Mode.NGRAM), named_mode=Mode.EAGLE)
    assert other.mode is Mode.NGRAM
    assert other.reason.startswith("eagle was asked for, but no worker offers it; chat answers are new text")


@pytest.mark.parametrize(
    "why",
    [
        "no draft model is configured",
        "the draft needs 1.2 GiB beside the target and 0.4 GiB are free",
        "token 17 is 'a' in the target and 'b' in the draft",
    ],
)
def test_a_draft_that_is_missing_too_large_or_incompatible_gives_way_to_ngram(why: str) -> None:
    decision = pick(TaskType.CHAT, offer(Mode.PLAIN, Mode.NGRAM, Mode.DRAFT_MODEL, draft_model=why), load=2)
    limit = CROSSOVER[Mode.NGRAM][TaskType.CHAT]
    assert decision == Decision(
        TaskType.CHAT,
        Mode.NGRAM,
        f"chat answers are new text, but {why}: ngram, which pays up to {limit} requests at once (2 expected).",
    )
    named = pick(TaskType.CHAT, offer(Mode.NGRAM, draft_model=why), named_mode=Mode.DRAFT_MODEL)
    assert named.reason.startswith(f"draft_model was asked for, but {why}; ")


def test_the_best_of_what_is_offered_is_taken_and_said() -> None:
    assert "but no worker offers a draft model or an EAGLE head: ngram" in pick(TaskType.CHAT, offer(Mode.NGRAM, Mode.PLAIN)).reason
    assert "but no worker offers ngram or suffix: eagle3" in pick(TaskType.JSON, offer(Mode.EAGLE3, Mode.PLAIN)).reason
    assert pick(TaskType.CHAT, offer(Mode.PLAIN)).mode is Mode.PLAIN


def test_without_any_worker_rows_wait_in_plain() -> None:
    for empty in (Offer(frozenset()), Offer(frozenset({Mode.NGRAM}), {Mode.NGRAM: "numba is missing"})):
        decision = pick(offered=empty)
        assert decision.mode is Mode.PLAIN
        assert "No worker offers a mode" in decision.reason


@pytest.mark.parametrize("mode", list(ACCEPTANCE_FLOOR))
def test_low_acceptance_demotes(mode: Mode) -> None:
    task = TaskType.JSON if mode in (Mode.NGRAM, Mode.SUFFIX) else TaskType.CHAT
    offered, floor = offer(mode, Mode.PLAIN), ACCEPTANCE_FLOOR[mode]
    assert pick(task, offered, history=window(mode, task, floor)).mode is mode
    demoted = pick(task, offered, history=window(mode, task, floor - 0.02))
    assert demoted.mode is Mode.PLAIN
    assert f"{mode} had {floor - 0.02:.0%} of 1,000 drafted tokens accepted, under {floor:.0%}" in demoted.reason


def test_a_draft_under_40_percent_gives_way_to_the_next_best() -> None:
    demoted = pick(TaskType.CHAT, offer(Mode.DRAFT_MODEL, Mode.NGRAM, Mode.PLAIN), history=window(Mode.DRAFT_MODEL, TaskType.CHAT, 0.39))
    assert demoted.mode is Mode.NGRAM


@pytest.mark.parametrize(("rows", "drafted"), [(WINDOW_ROWS - 1, 1_000), (WINDOW_ROWS, WINDOW_DRAFTED - 1)])
def test_a_small_window_does_not_demote(rows: int, drafted: int) -> None:
    history = window(Mode.DRAFT_MODEL, TaskType.CHAT, 0.0, rows, drafted)
    assert pick(TaskType.CHAT, offer(Mode.DRAFT_MODEL, Mode.PLAIN), history=history).mode is Mode.DRAFT_MODEL


def test_acceptance_counts_by_task() -> None:
    history = window(Mode.DRAFT_MODEL, TaskType.CHAT, 0.1)
    assert pick(TaskType.CREATIVE, offer(Mode.DRAFT_MODEL, Mode.PLAIN), history=history).mode is Mode.DRAFT_MODEL


def test_a_measured_slowdown_demotes_whatever_the_acceptance() -> None:
    history = {**window(Mode.NGRAM, TaskType.CODE, 0.9, speed=80), **window(Mode.PLAIN, TaskType.CODE, 0, drafted=0, speed=100)}
    demoted = pick(TaskType.CODE, offer(Mode.NGRAM, Mode.PLAIN), history=history)
    assert demoted.mode is Mode.PLAIN
    assert "ngram generated 80 tokens/s against plain's 100" in demoted.reason
    measured = table(TaskType.CODE, (Mode.PLAIN, 8, 100), (Mode.NGRAM, 8, 200))
    assert pick(TaskType.CODE, offer(Mode.NGRAM, Mode.PLAIN), history=history, table=measured).mode is Mode.PLAIN


def test_a_measured_gain_keeps_a_mode_under_the_acceptance_floor() -> None:
    history = {**window(Mode.NGRAM, TaskType.CODE, 0.01, speed=110), **window(Mode.PLAIN, TaskType.CODE, 0, drafted=0, speed=100)}
    assert pick(TaskType.CODE, offer(Mode.NGRAM, Mode.PLAIN), history=history).mode is Mode.NGRAM


def test_a_demoted_mode_is_tried_again_on_one_row_in_64() -> None:
    history = window(Mode.DRAFT_MODEL, TaskType.CHAT, 0.1)
    modes = [
        pick(TaskType.CHAT, offer(Mode.DRAFT_MODEL, Mode.PLAIN), history=history, row_index=row).mode for row in range(4 * RETRY_EVERY)
    ]
    assert modes.count(Mode.DRAFT_MODEL) == 4
    retried = pick(TaskType.CHAT, offer(Mode.DRAFT_MODEL, Mode.PLAIN), history=history, row_index=RETRIED_ROW)
    assert "draft_model again on one row in 64" in retried.reason
    assert "had 10% of 1,000" in retried.reason
    beyond = pick(TaskType.CHAT, offer(Mode.DRAFT_MODEL, Mode.PLAIN), 1_000, history=history, row_index=RETRIED_ROW)
    assert beyond.mode is Mode.PLAIN, "no retry where the load alone rules the mode out"


@pytest.mark.parametrize("mode", list(CROSSOVER))
@pytest.mark.parametrize("task", list(TaskType))
def test_beyond_its_crossover_a_mode_gives_way_to_plain(mode: Mode, task: TaskType) -> None:
    limit = CROSSOVER[mode][task]
    assert pick(task, offer(mode, Mode.PLAIN), limit).mode is mode
    beyond = pick(task, offer(mode, Mode.PLAIN), limit + 1)
    assert beyond.mode is Mode.PLAIN
    assert f"{mode} pays only up to {limit} requests at once ({limit + 1} expected)" in beyond.reason


def test_beyond_the_crossover_without_plain_a_mode_that_can_stop_drafting_is_kept() -> None:
    kept = pick(TaskType.CODE, offer(Mode.SUFFIX, Mode.NGRAM), 500)
    assert kept.mode is Mode.NGRAM
    assert "since no worker offers plain (tokens_by_batch_size can stop its drafts at this load)" in kept.reason
    assert pick(TaskType.CODE, offer(Mode.SUFFIX), 500).reason.endswith("suffix, since no worker offers plain.")


def test_the_table_chooses_the_fastest_at_the_next_measured_load() -> None:
    measured = table(
        TaskType.CHAT,
        *((Mode.PLAIN, 4, 100.0), (Mode.NGRAM, 4, 120.0), (Mode.DRAFT_MODEL, 4, 150.0)),
        *((Mode.PLAIN, 64, 900.0), (Mode.NGRAM, 64, 800.0), (Mode.DRAFT_MODEL, 64, 700.0)),
    )
    few = pick(TaskType.CHAT, load=3, table=measured)
    assert few == Decision(
        TaskType.CHAT,
        Mode.DRAFT_MODEL,
        "chat answers are new text: draft_model, measured with 4 requests at once: 150 tokens/s against 100 in plain.",
    )
    many = pick(TaskType.CHAT, load=5, table=measured)
    assert many.mode is Mode.PLAIN
    assert "plain, the fastest of what was measured with 64 requests at once (900 tokens/s)" in many.reason
    forced = pick(TaskType.CHAT, offer(Mode.NGRAM, Mode.DRAFT_MODEL), load=64, table=measured)
    assert forced.mode is Mode.NGRAM
    assert forced.reason.endswith("800 tokens/s against 900 in plain, which no worker offers.")


def test_the_table_wins_over_acceptance_and_default_crossovers() -> None:
    measured = table(TaskType.CHAT, (Mode.PLAIN, 200, 100.0), (Mode.DRAFT_MODEL, 200, 150.0))
    history = window(Mode.DRAFT_MODEL, TaskType.CHAT, 0.1)
    assert pick(TaskType.CHAT, load=200, table=measured, history=history).mode is Mode.DRAFT_MODEL


def test_the_table_is_silent_on_tasks_modes_and_loads_that_it_did_not_measure() -> None:
    measured = table(TaskType.CHAT, (Mode.PLAIN, 4, 100.0), (Mode.DRAFT_MODEL, 4, 50.0))
    assert pick(TaskType.CODE, offer(Mode.NGRAM, Mode.PLAIN), 4, table=measured).mode is Mode.NGRAM
    assert pick(TaskType.CHAT, offer(Mode.NGRAM, Mode.PLAIN), 4, table=measured).mode is Mode.NGRAM
    beyond = pick(TaskType.CHAT, offer(Mode.DRAFT_MODEL, Mode.PLAIN), 8, table=measured)
    assert beyond.mode is Mode.PLAIN
    assert "draft_model paid at no load that was measured" in beyond.reason


def test_a_crossover_is_measured_and_extended_by_the_default() -> None:
    points = ((Mode.PLAIN, 4, 1.0), (Mode.NGRAM, 4, 2.0), (Mode.PLAIN, 16, 4.0))
    assert table(TaskType.CODE).crossover(Mode.NGRAM, TaskType.CODE) == 64
    assert table(TaskType.CODE, *points, (Mode.NGRAM, 16, 3.0)).crossover(Mode.NGRAM, TaskType.CODE) == 4
    assert table(TaskType.CODE, *points, (Mode.NGRAM, 16, 5.0)).crossover(Mode.NGRAM, TaskType.CODE) == 64
    assert table(TaskType.CODE, (Mode.PLAIN, 99, 1.0), (Mode.NGRAM, 99, 2.0)).crossover(Mode.NGRAM, TaskType.CODE) == 99


@pytest.mark.parametrize("mode", list(DEFAULT_K))
def test_the_default_schedule_stops_drafting_beyond_the_crossover(mode: Mode) -> None:
    limit = max(CROSSOVER[mode].values())
    assert schedule(None, mode) == ((1, limit, DEFAULT_K[mode]), (limit + 1, LARGEST_BATCH, 0))
    assert schedule(TuningTable(), mode, 2) == ((1, limit, 2), (limit + 1, LARGEST_BATCH, 0))


def test_modes_that_cannot_be_scheduled() -> None:
    assert schedule(None, Mode.PLAIN) == schedule(None, Mode.SUFFIX) == ()


def test_the_measured_schedule_takes_the_best_k_at_each_load() -> None:
    speeds = [
        (1, 0, 100),
        (1, 2, 150),
        (1, 4, 200),
        (1, 8, 300),
        (8, 0, 100),
        (8, 2, 130),
        (8, 4, 120),
        (32, 0, 100),
        (32, 2, 90),
        (32, 4, 80),
    ]
    measured = TuningTable(tuple(Speed(Mode.NGRAM if k else Mode.PLAIN, TaskType.CODE, load, k, rate) for load, k, rate in speeds))
    assert schedule(measured, Mode.NGRAM, 8) == ((1, 1, 8), (2, 8, 2), (9, LARGEST_BATCH, 0))
    assert schedule(measured, Mode.NGRAM) == ((1, 1, 4), (2, 8, 2), (9, LARGEST_BATCH, 0)), "K of 8 is above the setting"
    short = TuningTable(measured.speeds[:7])
    assert schedule(short, Mode.NGRAM) == ((1, 1, 4), (2, 64, 2), (65, LARGEST_BATCH, 0)), "kept up to the default crossover"


def test_the_schedule_is_for_the_tasks_that_policy_sends() -> None:
    """Chat, which ngram slows down, goes to the plain engine, and code keeps its drafts; without a plain engine both weigh alike."""
    speeds = [Speed(Mode.PLAIN, task, 4, 0, 100) for task in (TaskType.CODE, TaskType.CHAT)]
    gain_and_loss = [Speed(Mode.NGRAM, TaskType.CODE, 4, 4, 150), Speed(Mode.NGRAM, TaskType.CHAT, 4, 4, 60)]
    measured = TuningTable((*speeds, *gain_and_loss))
    assert pick(TaskType.CHAT, load=4, table=measured).mode is Mode.PLAIN
    assert pick(TaskType.CODE, load=4, table=measured).mode is Mode.NGRAM
    assert schedule(measured, Mode.NGRAM)[0] == (1, 64, 4)
    assert schedule(measured, Mode.NGRAM, every_task=True) == ((1, LARGEST_BATCH, 0),)


def test_a_load_that_only_one_task_measured_does_not_stop_the_drafts_of_another() -> None:
    code = [Speed(Mode.PLAIN, TaskType.CODE, 256, 0, 100), Speed(Mode.NGRAM, TaskType.CODE, 256, 4, 150)]
    chat = [Speed(Mode.PLAIN, TaskType.CHAT, 128, 0, 100), Speed(Mode.NGRAM, TaskType.CHAT, 128, 4, 60)]
    measured = TuningTable((*code, *chat))
    assert pick(TaskType.CODE, load=100, table=measured).mode is Mode.NGRAM
    assert schedule(measured, Mode.NGRAM) == ((1, 256, 4), (257, LARGEST_BATCH, 0))


TASKS, MODES = st.sampled_from(TaskType), st.sampled_from(Mode)
WORDS = st.sampled_from(["no draft model is configured", "the draft is too large"])
OFFERS = st.builds(Offer, st.frozensets(MODES), st.dictionaries(MODES, WORDS, max_size=3))
RATES = st.floats(0, 1e6)
LOADS = st.integers(1, 300)
WINDOWS = st.builds(Window, st.integers(0, 100), st.integers(0, 5_000), st.integers(0, 5_000), st.none() | RATES)
TABLES = st.builds(TuningTable, st.lists(st.builds(Speed, MODES, TASKS, LOADS, st.integers(0, 16), RATES), max_size=12).map(tuple))
VALUES = st.none() | st.integers() | st.floats() | st.text() | st.dictionaries(st.text(), st.integers(), max_size=2)
BODIES = st.dictionaries(st.sampled_from(["min_p", "logit_bias", "min_tokens", "seed", "temperature"]), VALUES)


ONE_K = st.builds(Speed, MODES, TASKS, LOADS, st.just(4), RATES).map(
    lambda speed: replace(speed, k=0) if speed.mode is Mode.PLAIN else speed
)


@given(
    measured=st.lists(ONE_K, max_size=24, unique_by=lambda speed: (speed.mode, speed.task, speed.load)).map(
        lambda speeds: TuningTable(tuple(speeds))
    ),
    mode=st.sampled_from(list(DEFAULT_K)),
    load=LOADS,
)
def test_an_engine_drafts_where_policy_sends_it_rows(measured: TuningTable, mode: Mode, load: int) -> None:
    steps = schedule(measured, mode, 4)
    k = next(k for first, last, k in steps if first <= load <= last)
    for task in TaskType:
        _, speeds = measured.at(task, load)
        if 0 < speeds.get(Mode.PLAIN, 0) < speeds.get(mode, 0):
            assert k == 4, steps


@given(
    task=TASKS,
    body=BODIES,
    load=st.integers(0, 10**6),
    offered=OFFERS,
    history=st.dictionaries(st.tuples(MODES, TASKS), WINDOWS, max_size=8),
    measured=st.none() | TABLES,
    named=st.none() | MODES,
    row=st.integers(0, 10**9),
)
def test_a_decision_is_always_offered_and_explained(
    task: TaskType,
    body: dict[str, Any],
    load: int,
    offered: Offer,
    history: History,
    measured: TuningTable | None,
    named: Mode | None,
    row: int,
) -> None:
    decision = decide(task, body, load, offered, history, measured, named_mode=named, row_index=row)
    assert decision.mode in (offered.available or {Mode.PLAIN})
    assert decision.task is task
    assert decision.reason.endswith(".")
    assert "\n" not in decision.reason
    if refused_sampling(body) and Mode.PLAIN in offered.available:
        assert decision.mode is Mode.PLAIN
    elif named in offered.available:
        assert decision.mode is named


@given(measured=TABLES, mode=MODES, most=st.integers(1, 16))
def test_a_schedule_is_one_that_vllm_accepts(measured: TuningTable, mode: Mode, most: int) -> None:
    """vllm.v1.spec_decode.dynamic.utils: ranges start at 1, ascend without overlap, K of 0 or more; ours have no gaps either."""
    steps = schedule(measured, mode, most)
    ends = [0, *(last for _, last, _ in steps)]
    assert [first for first, _, _ in steps] == [end + 1 for end in ends[:-1]]
    assert all(first <= last and 0 <= k <= most for first, last, k in steps)
    assert bool(steps) == (mode in DEFAULT_K)


def test_between_two_loads_a_mode_that_gains_more_at_the_larger_is_not_trusted_with_all_of_it() -> None:
    measured = table(
        TaskType.CODE, *((Mode.PLAIN, 64, 1000.0), (Mode.EAGLE3, 64, 700.0), (Mode.PLAIN, 256, 2000.0), (Mode.EAGLE3, 256, 2600.0))
    )
    offered = offer(Mode.EAGLE3, Mode.PLAIN)
    picked = {load: pick(TaskType.CODE, offered, load=load, table=measured).mode for load in (64, 65, 128, 250, 256)}
    assert picked == {64: Mode.PLAIN, 65: Mode.PLAIN, 128: Mode.PLAIN, 250: Mode.EAGLE3, 256: Mode.EAGLE3}
    before = pick(TaskType.CODE, offered, load=2, table=measured)
    assert before.mode is Mode.PLAIN, "nothing was measured below: the load above speaks"


def test_a_gain_within_the_noise_is_none() -> None:
    offered = offer(Mode.NGRAM, Mode.PLAIN)
    for gain, mode in ((1.002, Mode.PLAIN), (1.04, Mode.PLAIN), (1.06, Mode.NGRAM)):
        measured = table(TaskType.JSON, (Mode.PLAIN, 64, 1000.0), (Mode.NGRAM, 64, 1000.0 * gain))
        decided = pick(TaskType.JSON, offered, load=64, table=measured)
        assert decided.mode is mode
        assert ("nothing gained 5% of what was measured with 64" in decided.reason) == (mode is Mode.PLAIN)


def test_a_gain_of_a_mode_that_nobody_offers_is_not_spoken_of() -> None:
    measured = table(TaskType.JSON, (Mode.PLAIN, 64, 1000.0), (Mode.NGRAM, 64, 900.0), (Mode.EAGLE3, 64, 2000.0))
    decided = pick(TaskType.JSON, offer(Mode.NGRAM, Mode.PLAIN), load=64, table=measured)
    assert "plain, the fastest of what was measured with 64 requests at once" in decided.reason


def test_what_counts_is_the_k_that_the_engine_runs() -> None:
    """The engine's K serves all tasks: 8, for code. What 2 would have made of chat is nobody's gain."""

    def speed(mode: Mode, task: TaskType, k: int, tokens_per_second: float) -> Speed:
        return Speed(mode, task, 16, k, tokens_per_second)

    code, chat = TaskType.CODE, TaskType.CHAT
    measured = TuningTable(
        (
            *(speed(Mode.PLAIN, task, 0, 1000.0) for task in (code, chat)),
            *(speed(Mode.NGRAM, code, k, tps) for k, tps in ((2, 1400.0), (8, 2500.0))),
            *(speed(Mode.NGRAM, chat, k, tps) for k, tps in ((2, 1100.0), (8, 700.0))),
        )
    )
    assert pick(code, offer(Mode.NGRAM, Mode.PLAIN), load=16, table=measured).mode is Mode.NGRAM
    assert pick(chat, offer(Mode.NGRAM, Mode.PLAIN), load=16, table=measured).mode is Mode.PLAIN
