"""`check` and `verify` before any model is read: bad usage is told in one line, with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specbatch.cli import app
from specbatch.cli.verify import show
from specbatch.domain import Mode
from specbatch.lossless import Case, Difference, ModeReport, Report, Verdict


def run(*words: str, folder: Path) -> Result:
    return CliRunner().invoke(app, [*words, "--data-dir", str(folder)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check",), "give it with --draft"),
        (("check", "--mode", "eagle", "--draft", "x"), "give it with --eagle"),
        (("check", "--mode", "ngram", "--eagle", "x"), "has no draft to check"),
        (("check", "--mode", "faster"), "faster"),
        (("check", "--model", "./nowhere", "--draft", "./nothing"), "neither a folder nor a model"),
        (("verify", "--engine", "scripted"), "use engine vllm"),
        (("verify", "--mode", "plain"), "what the others are verified against"),
        (("verify", "--mode", "draft_model"), "set SPECBATCH_DRAFT"),
        (("verify", "--mode", "eagle3"), "set SPECBATCH_EAGLE"),
        (("verify", "--modes", "plain"), "no mode but plain"),
        (("verify", "--mode", "faster"), "faster"),
        (("verify", "--n", "0"), "--n"),
        (("verify", "--seeds", "2"), "--seeds"),
        (("verify", "--ngram-lookup-min", "4"), "lower the minimum"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_usage_is_told_and_nothing_is_started(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    ended = run(*words, folder=tmp_path)
    assert ended.exit_code == 2, ended.output
    assert said in " ".join(ended.output.replace("│", " ").split())
    assert not list(tmp_path.rglob("engine.log"))


def test_an_error_is_a_document_with_json(tmp_path: Path) -> None:
    ended = run("check", "--json", folder=tmp_path)
    assert ended.exit_code == 2
    assert json.loads(ended.stdout)["error"]["param"] == "mode"


def test_a_report_shows_faults_before_near_ties(capsys: pytest.CaptureFixture[str]) -> None:
    tie = Difference(prompt=1, verdict=Verdict.NEAR_TIE, message="as good")
    fault = Difference(prompt=2, verdict=Verdict.FAULT, message="worse")
    cases = (
        Case(name="greedy", compared=8, identical=6, differences=(tie, fault)),
        Case(name="seeds", compared=4, p_value=0.5, threshold=0.01),
    )
    report = Report(model="m", noise=0.0, tolerance=1e-4, modes=(ModeReport(mode=Mode.NGRAM, cases=cases),))
    show(report)
    shown = capsys.readouterr()
    assert not report.lossless
    assert shown.err.index("FAULT, greedy, prompt 2: worse") < shown.err.index("near-tie, greedy, prompt 1: as good")
    assert "ngram is NOT lossless here" in shown.err
    assert "greedy" in shown.out
