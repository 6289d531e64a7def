"""What is said before an engine starts in vain, and after."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from specbatch.domain import Mode
from specbatch.errors import EngineStartError, UsageError
from specbatch.gpus import has_gpu
from specbatch.serving import resolve_model, served_names
from specbatch.settings import BUILTIN_MODEL, Settings
from worker.engine import preflight
from worker.engine.memory import Processes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def check(model: str | Path, mode: Mode = Mode.PLAIN, **fields: object) -> None:
    preflight.check(Settings(**fields), mode, str(model), cpu=True)  # type: ignore[arg-type]


def test_a_whole_folder_and_a_hub_id_pass(model: Path) -> None:
    check(model)
    check("org/model")


@pytest.mark.parametrize("absent", ["./absent", "/absent/model", "~/absent", "a/b/c"])
def test_a_folder_that_is_not_there(absent: str) -> None:
    with pytest.raises(EngineStartError, match="there is no folder"):
        check(absent)


@pytest.mark.parametrize(("missing", "said"), [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer")])
def test_a_folder_that_is_not_whole(model: Path, missing: str, said: str) -> None:
    (model / missing).unlink()
    with pytest.raises(EngineStartError, match=said):
        check(model)


def test_a_draft_is_looked_at_in_its_own_mode_alone(model: Path) -> None:
    check(model, Mode.NGRAM, draft="./absent")
    with pytest.raises(EngineStartError, match="SPECBATCH_DRAFT"):
        check(model, Mode.DRAFT_MODEL, draft="./absent")


def test_suffix_needs_its_package(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineStartError, match="pip install arctic-inference"):
        check(model, Mode.SUFFIX)


def test_more_memory_than_is_free(model: Path) -> None:
    with pytest.raises(EngineStartError, match=r"not enough memory.*SPECBATCH_CPU_KV_CACHE_GIB"):
        check(model, cpu_kv_cache_gib=2.0**20)


def test_a_failed_start_is_explained_by_what_its_process_raised(tmp_path: Path, model: Path) -> None:
    log = (
        "2026-01-01 00:00:00,000 7 ERROR vllm.v1.engine.core: EngineCore failed to start.\n"
        'Traceback (most recent call last):\n  File "core.py", line 1\n'
        "ValueError: No available memory for the cache blocks.\n"
        "RuntimeError: Engine core initialization failed.\n"
    )
    error = preflight.explain(RuntimeError("Engine core initialization failed."), log, tmp_path / "engine.log", str(model))
    assert error.message.startswith("not enough memory")
    assert "No available memory for the cache blocks" in error.message
    assert str(tmp_path / "engine.log") in error.message


def test_an_unknown_hub_id_is_explained(tmp_path: Path) -> None:
    error = preflight.explain(OSError("org/absent is not a local folder"), "", tmp_path / "engine.log", "org/absent")
    assert error.message.startswith("org/absent was not found")


def test_the_processes_of_an_engine_are_those_started_since() -> None:
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    with subprocess.Popen(sleep, stdout=subprocess.PIPE) as earlier:
        processes = Processes()
        processes.begin()
        assert processes.peak_bytes() is None
        with subprocess.Popen(sleep, stdout=subprocess.PIPE) as own:
            assert own.stdout is not None
            own.stdout.readline()
            assert [process.pid for process in processes.refresh()] == [own.pid]
            assert (processes.peak_bytes() or 0) > 1024**2
            processes.end()
            assert not psutil.pid_exists(own.pid) or psutil.Process(own.pid).status() == psutil.STATUS_ZOMBIE
            processes.end()
        assert earlier.poll() is None
        earlier.kill()


def test_the_model_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(Settings(engine="scripted")) == BUILTIN_MODEL
    monkeypatch.setattr("specbatch.serving.has_gpu", lambda: False)
    assert resolve_model(Settings()) == BUILTIN_MODEL
    monkeypatch.setattr("specbatch.serving.has_gpu", lambda: True)
    assert resolve_model(Settings(model="org/model")) == "org/model"
    with pytest.raises(UsageError, match="SPECBATCH_MODEL"):
        resolve_model(Settings())
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu(tmp_path)


def test_the_names_of_a_model() -> None:
    assert served_names(Settings(model="/models/org/model/")) == ("/models/org/model/", "model", "default")
    assert served_names(Settings(model=BUILTIN_MODEL, served_names="a, default")) == (BUILTIN_MODEL, "smollm2-135m", "a", "default")
