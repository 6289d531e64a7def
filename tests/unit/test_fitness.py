"""Which modes a worker withholds before any engine starts, and what the engine is told about a pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from specbatch import pairing
from specbatch.domain import Mode
from specbatch.settings import Settings
from tests.model_fixtures import VOCAB_SIZE, write_llama
from worker import fitness
from worker.engine.arguments import speculative_config

TinyModel = Callable[[str, Callable[[Path], Path]], Path]
MODES = (Mode.NGRAM, Mode.PLAIN, Mode.DRAFT_MODEL)


@pytest.fixture
def padded_draft(tiny_model: TinyModel) -> Path:
    return tiny_model("padded-draft", lambda folder: write_llama(folder, vocab_size=VOCAB_SIZE + 64))


def settings(target: Path | str, draft: Path | str, **fields: object) -> Settings:
    return Settings(model=str(target), draft=str(draft), dtype="float32", **fields)  # type: ignore[arg-type]


def test_a_fitting_draft_is_served(tiny_llama: Path, noisy_draft: Path) -> None:
    assert fitness.unfit(settings(tiny_llama, noisy_draft), MODES) == {}


def test_a_draft_with_one_other_token_is_withheld_with_the_token(tiny_llama: Path, renamed_token_draft: Path) -> None:
    withheld = fitness.unfit(settings(tiny_llama, renamed_token_draft), MODES)
    assert set(withheld) == {Mode.DRAFT_MODEL}
    assert "token" in withheld[Mode.DRAFT_MODEL]


def test_a_shorter_or_foreign_draft_is_withheld(tiny_llama: Path, short_draft: Path, qwen2_draft: Path) -> None:
    for draft in (short_draft, qwen2_draft):
        assert set(fitness.unfit(settings(tiny_llama, draft), MODES)) == {Mode.DRAFT_MODEL}


def test_a_draft_that_does_not_fit_beside_its_target_is_withheld(
    tiny_llama: Path, noisy_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbatch.gpus.memory_bytes", lambda: 100_000)
    withheld = fitness.unfit(settings(tiny_llama, noisy_draft), MODES)
    assert set(withheld) == {Mode.DRAFT_MODEL}
    assert "leaves KV cache for" in withheld[Mode.DRAFT_MODEL]


def test_a_folder_that_is_no_model_is_withheld_and_an_id_is_left_to_vllm(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(fitness.unfit(settings(tiny_llama, tmp_path), MODES)) == {Mode.DRAFT_MODEL}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fitness.unfit(settings(tiny_llama, "nobody/has-this-draft"), MODES) == {}


def test_the_scripted_engine_asks_for_no_files() -> None:
    assert fitness.unfit(settings("nowhere/target", "/no/such/draft", engine="scripted"), MODES) == {}


def test_small_files_of_an_id_are_fetched_before_it_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unreachable(model: str, *, local_files_only: bool = False, **_: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        asked.append(model)
        raise OSError("no network")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert not pairing.readable("nobody/has-this-draft")
    assert asked == ["nobody/has-this-draft"]


def test_same_tokens_in_padded_embeddings_are_told_to_vllm(tiny_llama: Path, padded_draft: Path) -> None:
    pair = settings(tiny_llama, padded_draft)
    report = fitness.report(pair, Mode.DRAFT_MODEL)
    assert report is not None
    assert report.compatible
    assert report.use_heterogeneous_vocab
    config = speculative_config(pair, Mode.DRAFT_MODEL, padded_vocabulary=report.use_heterogeneous_vocab)
    assert config is not None
    assert config["use_heterogeneous_vocab"] is True


@pytest.mark.parametrize(("given", "spread"), [({}, 4), ({"draft_tensor_parallel_size": 1}, 1)])
def test_a_draft_spreads_as_its_target_does_unless_told(given: dict[str, int], spread: int) -> None:
    config = speculative_config(settings("t/t", "d/d", tensor_parallel_size=4, **given), Mode.DRAFT_MODEL)
    assert config is not None
    assert config["draft_tensor_parallel_size"] == spread
