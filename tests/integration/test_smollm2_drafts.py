"""SmolLM2 with drafts of its own: itself, whose every greedy draft is accepted, and a noisy copy, some of whose drafts are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specbatch.domain import Mode
from specbatch.settings import Settings
from tests.model_fixtures import copy_with_noise
from worker import builtin
from worker.engine import build

pytestmark = [
    pytest.mark.vllm("second"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

PROMPTS = ("Why does ice float?", "Write a Python function that adds two numbers.", "List three colours as JSON.", "Tell me about Lisbon.")
NOISE = 0.05


class Answered(NamedTuple):
    texts: list[str]
    drafted: int
    accepted: int


async def answered(settings: Settings) -> Answered:
    engine = build(settings, Mode.DRAFT_MODEL)
    try:
        await engine.start()
        replies = await asyncio.gather(*(engine.answer(prompt, "/v1/chat/completions", chat(prompt)) for prompt in PROMPTS))
        measured = [reply.measurement for reply in replies]
        return Answered(
            [reply.body["choices"][0]["message"]["content"] for reply in replies],
            sum(each.drafted_tokens for each in measured),
            sum(each.accepted_tokens for each in measured),
        )
    finally:
        await engine.stop()


def chat(prompt: str) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": 33, "temperature": 0, "ignore_eos": True}


async def test_itself_is_accepted_whole_and_a_noisy_copy_in_part(tmp_path: Path) -> None:
    """In float32, where no near-tie turns on the size of a batch."""
    model = builtin.folder(Settings().cache_dir)
    noisy = copy_with_noise(model, tmp_path / "noisy", noise=NOISE)
    common: dict[str, Any] = {"data_dir": tmp_path, "engine": "vllm", "model": str(model), "dtype": "float32", "draft_tokens": 3}
    itself, copy = [
        await answered(Settings(**common, draft=str(draft), max_model_len=512, max_num_seqs=4, cpu_kv_cache_gib=0.5))
        for draft in (model, noisy)
    ]
    # One token of the prompt's own step, then steps of three drafts and one more.
    assert itself.drafted == itself.accepted == len(PROMPTS) * 24
    assert 0 < copy.accepted < copy.drafted
    assert copy.texts == itself.texts
