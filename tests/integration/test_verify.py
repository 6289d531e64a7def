"""verify on vLLM: every mode that a CPU can run keeps the promise, and a mode that was tampered with is found out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbatch.domain import Mode, Reply
from specbatch.lossless import ModeReport, Parameters
from specbatch.settings import Settings
from tests.commands import Commands
from tests.model_fixtures import copy_with_noise, write_eagle
from worker.engine import build
from worker.engine.base import Engine
from worker.verify import verify

pytestmark = [
    pytest.mark.vllm("second"),
    pytest.mark.timeout(600),  # five engines start, one after the other
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
TinyModel = Callable[[str, Callable[[Path], Path]], Path]
HONEST = ("target as its own draft", "noisy draft", "eagle", "eagle3")


class Tampered:
    """An engine whose requests lose their penalty, and are sampled warmer than they ask for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        """It runs already: another mode's engine, kept."""

    async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
        kept = {key: value for key, value in body.items() if key != "repetition_penalty"}
        warmth = {"temperature": 3 * body["temperature"]} if body.get("top_k") != 1 else {}
        return await self._engine.answer(request_id, endpoint, kept | warmth)


class Kept:
    """An engine that runs on when its interview is over."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def stop(self) -> None: ...


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, looping_llama: Path, tiny_model: TinyModel) -> dict[str, ModeReport]:
    """One plain run, and each mode against it. The engine that is tampered with is the one that was honest before."""
    noisy = tiny_model("noisy-looping", lambda folder: copy_with_noise(looping_llama, folder))
    eagle = tiny_model("eagle-looping", lambda folder: write_eagle(looping_llama, folder))
    eagle3 = tiny_model("eagle3-looping", lambda folder: write_eagle(looping_llama, folder, generation=3))
    tries: dict[str, tuple[Mode, dict[str, str]]] = {
        "target as its own draft": (Mode.DRAFT_MODEL, {"draft": str(looping_llama), "draft_sample_method": "greedy"}),
        "tampered": (Mode.DRAFT_MODEL, {}),
        "noisy draft": (Mode.DRAFT_MODEL, {"draft": str(noisy)}),
        "eagle": (Mode.EAGLE, {"eagle": str(eagle)}),
        "eagle3": (Mode.EAGLE3, {"eagle": str(eagle3)}),
    }
    left = list(tries.items())
    kept: list[Kept] = []

    def built(settings: Settings, mode: Mode) -> Any:
        if mode is Mode.PLAIN:
            return build(settings, mode)
        name, (_, changes) = left.pop(0)
        if name == "tampered":
            return Tampered(kept.pop().engine)
        engine = build(settings.model_copy(update=changes), mode)
        if left and left[0][0] == "tampered":
            kept.append(Kept(engine))
            return kept[0]
        return engine

    settings = Settings(
        data_dir=tmp_path_factory.mktemp("verify"),
        model=str(looping_llama),
        dtype="float32",
        cpu_kv_cache_gib=0.25,
        logprobs_mode="processed_logprobs",
        tool_call_parser="hermes",
        draft_sample_method="probabilistic",
    )
    parameters = Parameters(modes=tuple(mode for mode, _ in tries.values()), n=4, seeds=48)
    report = asyncio.run(verify(built, settings, parameters, lambda message: None))
    return dict(zip(tries, report.modes, strict=True))


@pytest.mark.parametrize("name", HONEST)
def test_a_mode_changes_nothing(reports: dict[str, ModeReport], name: str) -> None:
    found = reports[name]
    assert found.lossless, [(case.name, case.differences) for case in found.cases if case.faults]
    for case in found.cases:
        assert case.compared > 0, (case.name, case.note)
        assert case.note is None or (name, case.name) == ("noisy draft", "seeds"), case.name
    assert sum(case.near_ties for case in found.cases) <= 2, "float32 leaves few of them"


def test_drafts_by_chance_do_not_repeat_a_seeds_text_and_it_is_told(reports: dict[str, ModeReport]) -> None:
    """vLLM 0.32, draft_sample_method probabilistic. Policy sends seeded rows to plain."""
    seeds = reports["noisy draft"].cases[-1]
    assert seeds.name == "seeds"
    assert seeds.identical is not None
    assert seeds.identical < seeds.compared
    assert "drawn by chance, so seeds do not repeat" in (seeds.note or "")


def test_the_targets_own_drafts_are_all_accepted(reports: dict[str, ModeReport]) -> None:
    greedy = reports["target as its own draft"].cases[0]
    assert greedy.drafted_tokens
    assert greedy.accepted_tokens is not None
    # A request's end cuts its last drafts short: they were drafted, and not wrong.
    assert greedy.accepted_tokens / greedy.drafted_tokens >= 0.9


def test_a_noisy_draft_is_sometimes_rejected(reports: dict[str, ModeReport]) -> None:
    greedy = reports["noisy draft"].cases[0]
    assert greedy.drafted_tokens
    assert greedy.accepted_tokens is not None
    assert 0 < greedy.accepted_tokens < greedy.drafted_tokens


def test_a_tampered_mode_is_found_out(reports: dict[str, ModeReport]) -> None:
    faulty = {case.name for case in reports["tampered"].cases if case.faults}
    assert "penalties" in faulty
    assert {"sampling", "sampling, top-k and top-p, n > 1"} & faulty
    # What was not tampered with. Seeded text is: it is sampled.
    assert not {"greedy", "structured", "tool calls", "n > 1", "stop strings"} & faulty


def test_the_command_verifies_in_a_process_of_its_own(tmp_path: Path, looping_llama: Path) -> None:
    """The n-gram mode, with the short lookups that have drafted broken tool calls (vllm issue 40875)."""
    commands = Commands(Settings(data_dir=tmp_path))
    flags = ("--dtype", "float32", "--cpu-kv-cache-gib", 0.25, "--n", 2, "--seeds", 16, "--ngram-lookup-min", 2)
    document = commands.json("verify", "--model", looping_llama, "--mode", "ngram", *flags, seconds=300)  # two engines start
    cases = {case["name"]: case for case in document["modes"][0]["cases"]}
    assert document["lossless"]
    assert document["modes"][0]["mode"] == "ngram"
    assert cases["tool calls"]["identical"] == 2
    assert cases["greedy"]["accepted_tokens"] > 0
