"""tools/train_draft.py on a tiny target: vLLM loads the head, and accepts what it drafts as often as training said."""

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
    pytest.mark.vllm,
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


async def acceptance(settings: Settings, prompts: list[str]) -> float:
    """Accepted over drafted tokens, greedily."""
    engine = build(settings, Mode.EAGLE)
    try:
        await engine.start()
        for number, prompt in enumerate(prompts):
            body = {"model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": 32, "temperature": 0}
            assert (await engine.answer(str(number), "/v1/chat/completions", body)).status_code == 200
        status = engine.status()
        return status.accepted_tokens / status.drafted_tokens
    finally:
        await engine.stop()


def test_a_trained_head_drafts_in_vllm_as_well_as_training_said(tmp_path: Path, looping_llama: Path) -> None:
    asked = [line[start : start + 24] for line in CORPUS.strip().splitlines() for start in range(0, len(line) - 24, 4)]
    prompts, text, head = tmp_path / "prompts.txt", tmp_path / "text.safetensors", tmp_path / "head"
    prompts.write_text("\n".join(asked[::2]))
    short = ("--tokens", 6000, "--rows", 32, "--prompt-tokens", 64, "--answer-tokens", 32)
    tool("text", looping_llama, "--out", text, "--prompts", prompts, *short)
    fast = ("--minutes", 10, "--batches", 80, "--rows", 16, "--lr", 0.003, "--steps", K)
    told = tool("head", looping_llama, "--text", text, "--out", head, "--generation", 1, *fast)
    untrained, trained = sum(told["untrained"]) / K, sum(told["trained"]) / K
    settings = Settings(data_dir=tmp_path, model=str(looping_llama), eagle=str(head), draft_tokens=K, dtype="float32")
    measured = asyncio.run(acceptance(settings, asked[1:24:2]))
    assert measured > untrained + 0.2
    assert measured == pytest.approx(trained, abs=0.15)
