"""Engines that run for a whole test session, each on an event loop of its own, as a worker runs them. vLLM's start once a mode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from specbatch.domain import Mode, Reply
from specbatch.settings import BUILTIN_MODEL, Settings
from worker.engine import build
from worker.engine.base import Engine, EngineStatus

Result = TypeVar("Result")
START_SECONDS, ANSWER_SECONDS = 240, 100
DRAFT_TOKENS = 3


class RunningEngine:
    """An engine on its own thread's loop; every call blocks until it is answered, or fails after ANSWER_SECONDS."""

    def __init__(self, engine: Engine, kind: str) -> None:
        self.engine = engine
        self.kind = kind
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def mode(self) -> Mode:
        return self.engine.mode

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result], seconds: float = ANSWER_SECONDS) -> Result:
        return self.submit(work).result(seconds)

    def begin(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Future[Reply]:
        return self.submit(self.engine.answer(request_id, endpoint, body))

    def answer(self, endpoint: str, body: dict[str, Any], request_id: str = "row") -> Reply:
        return self.begin(request_id, endpoint, body).result(ANSWER_SECONDS)

    def status(self) -> EngineStatus:
        async def read() -> EngineStatus:
            return self.engine.status()

        return self.run(read())

    def wait(self, true: Callable[[EngineStatus], bool]) -> None:
        """Until a reading of the status is as asked."""

        async def look() -> None:
            while not true(self.engine.status()):
                await asyncio.sleep(0.01)

        self.run(asyncio.wait_for(look(), ANSWER_SECONDS))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def engine_children() -> set[int]:
    """Processes that a stopped engine must have ended: children of this one that run Python, save multiprocessing's tracker."""
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if "spawn_main" in " ".join(child.cmdline()) or "VLLM" in child.name()}


ENGINES = [
    *(pytest.param(("scripted", mode), id=f"scripted-{mode}") for mode in (Mode.PLAIN, Mode.NGRAM, Mode.DRAFT_MODEL)),
    *(pytest.param(("vllm", mode), id=f"vllm-{mode}", marks=pytest.mark.vllm) for mode in (Mode.PLAIN, Mode.NGRAM, Mode.DRAFT_MODEL)),
]


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """Every engine in turn: scripted, and vLLM with the built-in model (plain, ngram) and with a tiny one that is its own draft."""
    kind, mode = request.param
    settings: dict[str, Any] = {"data_dir": tmp_path_factory.mktemp("engine"), "engine": kind, "model": BUILTIN_MODEL}
    settings |= {"max_num_seqs": 16, "draft_tokens": DRAFT_TOKENS, "max_model_len": 512, "tool_call_parser": "hermes"}
    if kind == "vllm" and mode is Mode.DRAFT_MODEL:
        tiny = str(request.getfixturevalue("tiny_llama"))
        settings |= {"model": tiny, "draft": tiny, "dtype": "float32", "cpu_kv_cache_gib": 0.25}
    running = RunningEngine(build(Settings(**settings), mode), kind)
    running.run(running.engine.start(), START_SECONDS)
    yield running
    running.run(running.engine.stop())
    running.run(running.engine.stop())
    assert running.engine.dead
    assert running.status().running_requests == 0
    assert not engine_children()
    running.close()


@pytest.fixture
def vllm_settings(tmp_path: Path, tiny_llama: Path) -> Settings:
    """Settings of a vLLM engine that would start fast."""
    return Settings(data_dir=tmp_path, engine="vllm", model=str(tiny_llama), dtype="float32", cpu_kv_cache_gib=0.25, max_num_seqs=4)
