"""Mode suffix on vLLM, where its package is installed (the extra `suffix`, or PYTHONPATH): skipped where it is not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch.domain import Mode
from specbatch.lossless import ModeReport, Parameters
from specbatch.settings import Settings
from tests.engine_fixtures import START_SECONDS, RunningEngine
from tests.integration import test_engine_conformance as conformance
from worker.engine import build
from worker.engine.base import Engine
from worker.verify import verify

pytest.importorskip("arctic_inference")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

VERIFY_SECONDS = 300
LEFT_OUT = {
    "test_a_seed_gives_the_same_sample_twice",  # a seed's text depends on the rows before: policy sends it to plain
    "test_penalties_change_what_is_said",  # random weights do not repeat themselves; `verify` asks for penalties below
}
globals().update(
    {
        name: test
        for name, test in vars(conformance).items()
        if name.startswith("test_") and name not in LEFT_OUT and "engine" in inspect.signature(test).parameters
    }
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Settings:
    return Settings(
        data_dir=tmp_path_factory.mktemp("suffix"),
        model=str(tiny_llama),
        dtype="float32",
        cpu_kv_cache_gib=0.25,
        max_num_seqs=16,
        logprobs_mode="processed_logprobs",
        tool_call_parser="hermes",
    )


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Iterator[RunningEngine]:
    running = RunningEngine(build(settings, Mode.SUFFIX), "vllm")
    running.run(running.engine.start(), START_SECONDS)
    yield running
    running.run(running.engine.stop())
    running.close()


class Running:
    """An engine that was started by others, and is stopped by them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@pytest.fixture(scope="module")
def report(engine: RunningEngine, settings: Settings) -> ModeReport:
    def built(given: Settings, mode: Mode) -> Any:
        return Running(engine.engine) if mode is Mode.SUFFIX else build(given, mode)

    parameters = Parameters(modes=(Mode.SUFFIX,), n=4, seeds=48)
    return engine.run(verify(built, settings, parameters, lambda message: None), VERIFY_SECONDS).modes[0]


def test_it_changes_nothing(report: ModeReport) -> None:
    assert report.lossless, [(case.name, case.differences) for case in report.cases if case.faults]
    assert all(case.compared for case in report.cases)
    assert sum(case.accepted_tokens or 0 for case in report.cases) > 0
    assert sum(case.near_ties for case in report.cases) <= 2, "float32 leaves few of them"


def test_a_seed_does_not_repeat_and_it_is_told(report: ModeReport) -> None:
    seeds = report.cases[-1]
    assert seeds.name == "seeds"
    assert seeds.identical is not None
    assert seeds.identical < seeds.compared
    assert "depend on the rows before" in (seeds.note or "")


def test_a_row_is_drafted_from_the_answers_before_it(engine: RunningEngine) -> None:
    body = conformance.chat("Tell of the tide.", max_tokens=64, ignore_eos=True)
    first, again = (engine.answer(conformance.CHAT, body).measurement for _ in range(2))
    assert again.generated_tokens == first.generated_tokens == 64
    assert again.accepted_tokens > first.accepted_tokens
    assert again.accepted_tokens >= 32, "the same text was answered a moment ago"
