"""Mode suffix on a machine without its package, and with it: whoever asks is told what to install."""

from __future__ import annotations

import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.domain import Mode, TaskType
from specbatch.policy import Offer, decide
from specbatch.serving import offered_modes
from specbatch.settings import Settings
from worker import fitness

REMEDY = "pip install arctic-inference==0.1.1"
PACKAGE = "arctic_inference"
find_spec = importlib.util.find_spec


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None if name == PACKAGE else find_spec(name, package))


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec(PACKAGE, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: spec if name == PACKAGE else find_spec(name, package))


def told(*words: str, folder: Path) -> tuple[int, str]:
    ended = CliRunner().invoke(app, [*words, "--model", "x/y", "--data-dir", str(folder)])
    return ended.exit_code, " ".join(ended.output.split())


@pytest.mark.usefixtures("absent")
def test_without_its_package_it_is_not_offered_and_its_rows_are_told_why() -> None:
    assert Mode.SUFFIX not in offered_modes(Settings(model="x/y"))
    withheld = fitness.unfit(Settings(model="x/y"), [Mode.NGRAM, Mode.SUFFIX])
    assert list(withheld) == [Mode.SUFFIX]
    decision = decide(TaskType.CODE, {}, 1, Offer(frozenset({Mode.NGRAM}), withheld), named_mode=Mode.SUFFIX)
    assert decision.mode is Mode.NGRAM
    assert REMEDY in decision.reason


@pytest.mark.usefixtures("present")
def test_with_its_package_it_is_offered_by_vllm() -> None:
    assert Mode.SUFFIX in offered_modes(Settings(model="x/y"))
    assert Mode.SUFFIX not in offered_modes(Settings(model="x/y", engine="scripted"))
    assert fitness.unfit(Settings(model="x/y"), [Mode.SUFFIX]) == {}


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize(("modes", "ok"), [((), True), (("--modes", "ngram,suffix"), False)], ids=["not asked for", "asked for"])
def test_doctor_says_what_to_install(modes: tuple[str, ...], ok: bool, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["doctor", "--json", "--data-dir", str(tmp_path), "--model", "x/y", *modes])
    [check] = [check for check in json.loads(ended.stdout)["checks"] if check["name"] == "suffix"]
    assert check["ok"] is ok
    assert REMEDY in check["found"] + check["remedy"]


@pytest.mark.usefixtures("absent")
def test_check_says_what_to_install(tmp_path: Path) -> None:
    code, output = told("check", "--mode", "suffix", folder=tmp_path)
    assert code == 2
    assert REMEDY in output


@pytest.mark.usefixtures("present")
def test_check_has_nothing_to_compare(tmp_path: Path) -> None:
    code, output = told("check", "--mode", "suffix", folder=tmp_path)
    assert code == 2
    assert "mode suffix has no draft to check" in output
