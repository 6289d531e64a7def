"""tools/train_draft.py on a tiny target: vLLM loads what was trained, and accepts what it drafts as often as training said."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specbatch.domain import Mode
from specbatch.settings import Settings
from tests.model_fixtures import CORPUS
from worker.engine import build

ROOT = Path(__file__).parents[2]
K = 2
pytestmark = [
    pytest.mark.vllm("second"),
    pytest.mark.timeout(300),  # three processes that load torch, one after the other
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def tool(*arguments: object) -> dict[str, Any]:
    """The JSON that a command of the tool ends with."""
    command = [sys.executable, "tools/train_draft.py", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


async def acceptance(settings: Settings, mode: Mode, prompts: list[str]) -> float:
    """Accepted over drafted tokens, greedily."""
    engine = build(settings, mode)
    try:
        await engine.start()
        for number, prompt in enumerate(prompts):
            body = {"model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": 32, "temperature": 0}
            assert (await engine.answer(str(number), "/v1/chat/completions", body)).status_code == 200
        status = engine.status()
        return status.accepted_tokens / status.drafted_tokens
    finally:
        await engine.stop()


ASKED = [line[start : start + 24] for line in CORPUS.strip().splitlines() for start in range(0, len(line) - 24, 4)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, looping_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "prompts.txt").write_text("\n".join(ASKED[::2]))
    short = ("--tokens", 6000, "--rows", 32, "--prompt-tokens", 64, "--answer-tokens", 32)
    tool("text", looping_llama, "--out", folder / "text.safetensors", "--prompts", folder / "prompts.txt", *short)
    return folder / "text.safetensors"


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        (Mode.EAGLE, ("head", "--generation", 1)),
        (Mode.EAGLE3, ("head", "--generation", 3)),
        (Mode.DRAFT_MODEL, ("draft", "--layers", 1, "--parallel")),
    ],
    ids=["eagle", "eagle3", "a parallel draft"],
)
def test_what_was_trained_drafts_in_vllm_as_well_as_training_said(
    tmp_path: Path, looping_llama: Path, text: Path, mode: Mode, what: tuple[object, ...]
) -> None:
    command, *options = what
    fast = ("--minutes", 10, "--batches", 120, "--rows", 16, "--lr", 0.003, "--steps", K)
    told = tool(command, looping_llama, "--text", text, "--out", tmp_path / "made", *options, *fast)
    untrained, trained = sum(told["untrained"]) / K, sum(told["trained"]) / K
    made: dict[str, Any] = {"draft" if mode is Mode.DRAFT_MODEL else "eagle": str(tmp_path / "made")}
    settings = Settings(data_dir=tmp_path, model=str(looping_llama), draft_tokens=K, dtype="float32", max_model_len=256, **made)
    measured = asyncio.run(acceptance(settings, mode, ASKED[1:24:2]))
    assert measured > untrained + 0.2
    assert measured == pytest.approx(trained, abs=0.15)
