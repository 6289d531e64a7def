"""`tune` from the engine to the decision: points measured, kept, read back, and obeyed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from specbatch import trial
from specbatch.context import Context
from specbatch.domain import Mode, Reply, TaskType
from specbatch.errors import EngineStartError
from specbatch.machine import Machine, this_machine
from specbatch.service import tuning
from specbatch.service.findings import findings
from specbatch.service.plan import plan
from specbatch.settings import Settings
from specbatch.store import speeds
from specbatch.trial import Measured, Point, Started, Trial
from specbatch.tuning import BULK, Speed
from tests.commands import Commands, chat, gone, write_lines
from worker.engine.base import Engine
from worker.engine.scripted import ScriptedEngine
from worker.tune import LEAST_REQUESTS, run

BOTH = (Mode.PLAIN, Mode.NGRAM)
CHAT = [TaskType.CHAT]


def measured(progress: Iterator[tuning.Progress]) -> list[Speed]:
    return [event for event in progress if isinstance(event, Speed)]


def keep(ctx: Context, *points: Speed, machine: Machine | None = None, draft: str = "") -> None:
    with ctx.database.write() as tx:
        for point in points:
            speeds.put(ctx.database, tx, "builtin:smollm2-135m", draft, machine or this_machine(ctx.settings), point)


def pair(task: TaskType, load: int, plain: float, ngram: float, k: int = 4) -> tuple[Speed, Speed]:
    return Speed(Mode.PLAIN, task, load, 0, plain), Speed(Mode.NGRAM, task, load, k, ngram, start_seconds=70.0)


# The engine's side


async def trial_of(settings: Settings, given: Trial, make: Any = ScriptedEngine) -> list[Started | Measured]:
    told: list[Started | Measured] = []
    await run(given, settings, told.append, make)
    return told


@pytest.fixture
def scripted(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, engine="scripted", scripted_delay_ms=1)


def points(*loads: int) -> tuple[Point, ...]:
    return tuple(Point(task=TaskType.JSON, load=load) for load in loads)


async def test_each_point_is_measured_at_its_load_with_its_k(scripted: Settings) -> None:
    seen: list[tuple[int, int]] = []

    class Watched(ScriptedEngine):
        async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
            seen.append((self.status().running_requests + 1, self._settings.ngram_tokens))
            return await super().answer(request_id, endpoint, body)

    told = await trial_of(scripted, Trial(mode=Mode.NGRAM, k=7, points=points(1, 8), seconds=60), Watched)
    assert isinstance(told[0], Started)
    found = [event.speed for event in told if isinstance(event, Measured)]
    assert [(speed.load, speed.k, speed.mode, speed.task) for speed in found] == [
        (1, 7, Mode.NGRAM, TaskType.JSON),
        (8, 7, Mode.NGRAM, TaskType.JSON),
    ]
    assert {k for _, k in seen} == {7}
    assert max(load for load, _ in seen[-30:]) == 8
    for speed in found:
        assert speed.tokens_per_second > 0
        assert speed.requests >= LEAST_REQUESTS - speed.load
        assert 0 < speed.accepted_tokens < speed.drafted_tokens
        assert speed.tokens_per_step is not None
        assert speed.tokens_per_step > 1  # an accepted token spares a step


async def test_bulk_hands_everything_over_once(scripted: Settings) -> None:
    asked: list[str] = []

    class Watched(ScriptedEngine):
        async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
            asked.append(body["messages"][0]["content"])
            return await super().answer(request_id, endpoint, body)

    bulk = await trial_of(scripted, Trial(mode=Mode.PLAIN, k=0, points=points(BULK), seconds=60), Watched)
    assert isinstance(bulk[-1], Measured)
    assert bulk[-1].speed.requests == BULK
    assert len(set(asked[-BULK:])) > 0.99 * BULK


async def test_an_engine_is_empty_before_the_next_point(scripted: Settings) -> None:
    at_start: list[int] = []

    class Watched(ScriptedEngine):
        async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
            if request_id.endswith("-0-0"):  # the first client's first request: a point begins
                at_start.append(self.status().running_requests)
            return await super().answer(request_id, endpoint, body)

    await trial_of(scripted, Trial(mode=Mode.PLAIN, k=0, points=points(16, 4, 1), seconds=60), Watched)
    assert at_start == [0] * len(at_start)
    assert len(at_start) >= 3


async def test_no_time_leaves_points_out(scripted: Settings) -> None:
    told = await trial_of(scripted, Trial(mode=Mode.PLAIN, k=0, points=points(1, 4), seconds=1e-9))
    assert len(told) == 1


@pytest.mark.parametrize(
    ("context", "said"),
    [(10, "refuses a request of the measurement: This model's maximum context length is 10"), (None, "died while plain was measured")],
)
async def test_an_engine_that_cannot_be_measured_says_why(scripted: Settings, context: int | None, said: str) -> None:
    stopped: list[Engine] = []

    class Failing(ScriptedEngine):
        async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
            fault = {"metadata": {"x-fault": "die"}} if context is None else {}
            return await super().answer(request_id, endpoint, body | fault)

        async def stop(self) -> None:
            stopped.append(self)
            await super().stop()

    with pytest.raises(EngineStartError, match=said):
        await trial_of(
            scripted.model_copy(update={"max_model_len": context}),
            Trial(mode=Mode.PLAIN, k=0, points=points(4), seconds=60),
            Failing,
        )
    assert stopped


def test_leaving_a_trial_ends_its_process(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, engine="scripted", scripted_delay_ms=60_000)
    before = set(psutil.Process().children())
    events = trial.run(Trial(mode=Mode.PLAIN, k=0, points=points(1), seconds=60), settings.environment())
    assert isinstance(next(events), Started)
    children = [child for child in psutil.Process().children() if child not in before]
    assert children
    events.close()
    assert gone(children)


# The database's side


@pytest.mark.parametrize("again", [False, True])
def test_measured_points_are_kept_and_not_measured_twice(ctx: Context, again: bool) -> None:
    first = measured(tuning.tune(ctx, seconds=100, tasks=CHAT, loads=[1, 4], every_k=False))
    assert [(speed.mode, speed.load) for speed in first] == [(mode, load) for mode in BOTH for load in (1, 4)]
    assert set(tuning.here(ctx)) == set(first)
    events = list(tuning.tune(ctx, seconds=100, tasks=CHAT, loads=[1, 4, 2], every_k=False, again=again))
    assert {speed.load for speed in measured(iter(events))} == ({1, 2, 4} if again else {2})
    assert events[-1] == tuning.Left(0)
    assert len(tuning.here(ctx)) == 6


def test_a_small_budget_starts_nothing_and_says_what_is_left(ctx: Context) -> None:
    assert list(tuning.tune(ctx, seconds=1, tasks=CHAT, loads=[1, 4], every_k=False)) == [tuning.Left(4)]


def test_without_plain_there_is_nothing_to_compare_with(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run", failing(Mode.PLAIN))
    with pytest.raises(EngineStartError, match="no luck"):
        list(tuning.tune(ctx, seconds=100, tasks=CHAT, loads=[1]))


def test_a_mode_that_does_not_start_is_left_out(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run", failing(Mode.NGRAM))
    events = list(tuning.tune(ctx, seconds=100, tasks=CHAT, loads=[1], every_k=False))
    assert [event for event in events if isinstance(event, tuning.Failed)] == [tuning.Failed(Mode.NGRAM, 4, "no luck")]
    assert [speed.mode for speed in measured(iter(events))] == [Mode.PLAIN]
    assert events[-1] == tuning.Left(1)


def failing(mode: Mode) -> Any:
    """trial.run, but engines of one mode do not start."""
    real = trial.run

    def run_or_fail(given: Trial, environment: Mapping[str, str]) -> Iterator[Started | Measured]:
        if given.mode is mode:
            raise EngineStartError("no luck")
        yield from real(given, environment)

    return run_or_fail


def test_the_table_decides_in_which_mode_rows_run(ctx: Context, tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "rows.jsonl", [chat(f"row-{number}", "Write a Python function that adds numbers.") for number in range(6)]
    )
    assert group(ctx, file) == (Mode.NGRAM, "code answers repeat their input: ngram, which pays up to 64 requests at once (6 expected).")
    keep(ctx, *pair(TaskType.CODE, 1, 100, 200), *pair(TaskType.CODE, 16, 1_000, 700))
    assert group(ctx, file) == (
        Mode.PLAIN,
        "code answers repeat their input: plain, the fastest of what was measured with 16 requests at once (1,000 tokens/s).",
    )
    keep(ctx, *pair(TaskType.CODE, 16, 1_000, 1_500))
    mode, reason = group(ctx, file)
    assert mode is Mode.NGRAM
    assert "measured with 16 requests at once: 1,500 tokens/s against 1,000 in plain" in reason


def group(ctx: Context, file: Path) -> tuple[Mode, str]:
    (only,) = plan(ctx, file, "/v1/chat/completions").groups
    return only.mode, only.reason


def test_points_of_another_machine_say_nothing_of_this_one(ctx: Context) -> None:
    keep(ctx, *pair(TaskType.CODE, 1, 100, 200), machine=Machine("another GPU", "0.1"))
    keep(ctx, *pair(TaskType.CODE, 4, 100, 200))
    assert {speed.load for speed in tuning.here(ctx)} == {4}
    with ctx.database.read() as tx:
        assert {speed.load for speed in tuning.measured(tx, "builtin:smollm2-135m")} == {4}


def test_points_of_another_draft_say_nothing_of_this_one(ctx: Context) -> None:
    keep(ctx, Speed(Mode.DRAFT_MODEL, TaskType.CHAT, 1, 5, 10.0), draft="an-old-draft")
    keep(ctx, Speed(Mode.DRAFT_MODEL, TaskType.CHAT, 4, 5, 20.0), draft="a-new-draft")
    assert tuning.here(ctx) == ()
    mine = replace(ctx, settings=ctx.settings.model_copy(update={"draft": "an-old-draft"}))
    assert [speed.load for speed in tuning.here(mine)] == [1]
    with ctx.database.read() as tx:
        assert [speed.load for speed in tuning.measured(tx, "builtin:smollm2-135m")] == [4]


def test_an_engine_starts_with_the_k_that_was_measured(ctx: Context) -> None:
    assert tuning.tuned(ctx, Mode.NGRAM) is ctx.settings
    for k, fast in ((4, 150), (8, 200)):
        keep(ctx, *pair(TaskType.CODE, 16, 100, fast, k), *pair(TaskType.CODE, 64, 100, 50, k), *pair(TaskType.CODE, 256, 100, 50, k))
    settings = tuning.tuned(ctx, Mode.NGRAM)
    assert settings.ngram_tokens == 8
    assert settings.tokens_by_batch_size == ((1, 16, 8), (17, 65_536, 0))
    assert tuning.tuned(ctx, Mode.PLAIN) is ctx.settings
    assert tuning.start_seconds(ctx) == {Mode.PLAIN: 0.0, Mode.NGRAM: 70.0}


@pytest.mark.parametrize(
    ("given", "k", "steps"),
    [({"ngram_tokens": 4}, 4, ((1, 16, 4), (17, 65_536, 0))), ({"tokens_by_batch_size": ((1, 9, 3),)}, 4, ((1, 9, 3),))],
)
def test_what_the_user_set_stays(ctx: Context, given: dict[str, Any], k: int, steps: tuple[tuple[int, int, int], ...]) -> None:
    for each, fast in ((4, 150), (8, 200)):
        keep(ctx, *pair(TaskType.CODE, 16, 100, fast, each), *pair(TaskType.CODE, 256, 100, 50, each))
    mine = replace(ctx, settings=Settings(**ctx.settings.model_dump(exclude_unset=True) | given))
    settings = tuning.tuned(mine, Mode.NGRAM)
    assert (settings.ngram_tokens, settings.tokens_by_batch_size) == (k, steps)


def test_an_engine_that_cannot_hold_more_requests_than_pay_gets_one_k(ctx: Context) -> None:
    keep(ctx, *pair(TaskType.CODE, 16, 100, 150, 8), *pair(TaskType.CODE, 64, 100, 50, 8), *pair(TaskType.CODE, 256, 100, 50, 8))
    small = replace(ctx, settings=ctx.settings.model_copy(update={"max_num_seqs": 16}))
    settings = tuning.tuned(small, Mode.NGRAM)
    assert (settings.ngram_tokens, settings.tokens_by_batch_size) == (8, ())
    larger = replace(ctx, settings=ctx.settings.model_copy(update={"max_num_seqs": 17}))
    assert tuning.tuned(larger, Mode.NGRAM).tokens_by_batch_size == ((1, 16, 8), (17, 65_536, 0))


def test_a_mode_that_never_paid_drafts_as_the_settings_say(ctx: Context) -> None:
    keep(ctx, *pair(TaskType.CODE, 256, 100, 50))
    assert tuning.tuned(ctx, Mode.NGRAM) is ctx.settings


def test_findings_name_crossovers_and_the_fit(ctx: Context) -> None:
    for load, plain, ngram in ((1, 207, 427), (4, 611, 1199), (16, 1966, 3795), (64, 5715, 6744), (256, 10854, 7613)):
        keep(ctx, *pair(TaskType.CODE, load, plain, ngram))
    found = findings(ctx)
    assert found.crossovers[Mode.NGRAM][TaskType.CODE] >= 64
    assert found.start_seconds[Mode.NGRAM] == 70.0
    (fit,) = found.fits
    assert fit.error is not None
    assert fit.error < 0.2


# The command line


@pytest.fixture
def commands(sqlite_url: str, tmp_path: Path) -> Commands:
    return Commands(Settings(data_dir=tmp_path, database_url=sqlite_url, engine="scripted"))


def test_tune_and_bench_from_the_command_line(commands: Commands, tmp_path: Path) -> None:
    loads = ("--loads", "1,4", "--tasks", "chat")
    found = commands.json("tune", "--budget", "1", *loads)
    assert {(speed["mode"], speed["load"], speed["k"]) for speed in found["speeds"]} >= {("plain", 1, 0), ("ngram", 4, 4), ("ngram", 4, 8)}
    assert commands.json("tune", "--show") == found
    benched = commands.run("bench", "-o", tmp_path / "out", *loads)
    assert benched.returncode == 0, benched.stderr
    assert "starting an engine" not in benched.stderr  # every point was there
    assert (tmp_path / "out" / "bench.md").read_text() == benched.stdout
    lines = json.loads((tmp_path / "out" / "bench.json").read_text())["lines"]
    assert [(line["load"], line["mode"]) for line in lines] == [(1, "plain"), (1, "ngram"), (4, "plain"), (4, "ngram")]
    assert (tmp_path / "out" / "bench.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tune", "--show"), "nothing was measured for builtin:smollm2-135m yet"),
        (("tune", "--budget", "0.05", "--loads", "1"), "raise --budget"),
        (("bench", "--loads", "one"), "--loads: write numbers"),
        (("tune", "--tasks", "poems"), "choose from code, json"),
    ],
)
def test_bad_usage_is_told(commands: Commands, arguments: tuple[str, ...], said: str) -> None:
    ended = commands.run(*arguments)
    assert ended.returncode == 2
    assert said in ended.stderr


# vLLM


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_vllm_counts_what_a_step_yields(tiny_model: Any, tmp_path: Path) -> None:
    from tests.model_fixtures import LOOPING, write_llama

    target = tiny_model("long-looping-llama", lambda folder: write_llama(folder, attention=LOOPING, max_position_embeddings=4096))
    settings = Settings(data_dir=tmp_path, model=str(target), dtype="float32", max_model_len=2048, cpu_kv_cache_gib=0.25)
    at = tuple(Point(task=TaskType.JSON, load=load) for load in (1, 4))
    events = list(trial.run(Trial(mode=Mode.NGRAM, k=4, points=at, seconds=60, point_seconds=5, max_tokens=24), settings.environment()))
    assert isinstance(events[0], Started)
    found = [event.speed for event in events if isinstance(event, Measured)]
    assert [speed.load for speed in found] == [1, 4]
    for speed in found:
        assert speed.acceptance_rate is not None
        assert speed.acceptance_rate > 0.5  # this model repeats itself
        assert speed.tokens_per_step is not None
        assert speed.tokens_per_step > speed.load  # more than one token a step and request
        assert speed.ttft_seconds is not None
        assert speed.tpot_seconds is not None
        assert speed.peak_memory_bytes is not None


def test_a_standalone_drafts_engine_runs_as_it_was_measured(ctx: Context) -> None:
    """vLLM's older runner gives up whole CUDA graphs for K by batch size, which `tune` does not measure."""
    mine = replace(ctx, settings=ctx.settings.model_copy(update={"draft": "a-draft"}))
    for load, fast in ((4, 150.0), (64, 50.0)):
        keep(mine, Speed(Mode.PLAIN, TaskType.CHAT, load, 0, 100.0))
        keep(mine, Speed(Mode.DRAFT_MODEL, TaskType.CHAT, load, 3, fast), draft="a-draft")
    settings = tuning.tuned(mine, Mode.DRAFT_MODEL)
    assert (settings.draft_tokens, settings.tokens_by_batch_size) == (3, ())
    alone = replace(mine, settings=mine.settings.model_copy(update={"modes": (Mode.DRAFT_MODEL,)}))
    assert tuning.tuned(alone, Mode.DRAFT_MODEL).tokens_by_batch_size, "nobody takes the overload off it"
