"""`run`, end to end with the scripted engine: started, interrupted, killed, continued. What is about SQL runs on both databases."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from specbatch.context import opened
from specbatch.service import batches
from specbatch.service.reports import engines_alive
from specbatch.settings import Settings, load
from specbatch.wire import BatchObject
from tests.commands import EXAMPLES, Commands, answers, chat, family, gone, interrupt, read_lines, wait_for, write_lines

IDS = [line["custom_id"] for line in read_lines(EXAMPLES)]


BRISK = {"stop_seconds": 1.0, "lease_seconds": 2.0, "sweep_seconds": 0.5}


@pytest.fixture
def settings(sqlite_url: str, redis_url: str, tmp_path: Path) -> Settings:
    return load(data_dir=tmp_path, database_url=sqlite_url, redis_url=redis_url, engine="scripted", **BRISK)


@pytest.fixture
def cli(settings: Settings) -> Commands:
    return Commands(settings)


@pytest.fixture
def on_both(database_url: str, redis_url: str, tmp_path: Path) -> Settings:
    return load(data_dir=tmp_path, database_url=database_url, redis_url=redis_url, engine="scripted", **BRISK)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def jobs(settings: Settings) -> list[BatchObject]:
    with opened(settings) as ctx:
        return batches.page(ctx)


def settled(settings: Settings) -> int:
    return sum(job.request_counts.completed for job in jobs(settings))


def test_answers_every_line_in_input_order(on_both: Settings, out: Path) -> None:
    report = Commands(on_both).json("run", EXAMPLES, "-o", out, "--mode", "ngram")
    assert [line["custom_id"] for line in read_lines(out)] == IDS
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in read_lines(out))
    assert report["batch"]["request_counts"] == {"total": 24, "completed": 24, "failed": 0}
    assert report["batch"]["measured"]["accepted_tokens"] > 0
    assert [(mode["mode"], mode["rows"]) for mode in report["modes"]] == [("ngram", 24)]
    assert 0 <= report["ttft"]["p50"] <= report["ttft"]["p95"]
    assert report["output"] == str(out)
    assert not list(out.parent.glob("*.part"))


def test_shows_a_summary_and_keeps_stdout_clean(cli: Commands, out: Path) -> None:
    ended = cli.run("run", EXAMPLES, "-o", out)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "24 of 24, 0 failed" in ended.stderr
    assert "first token" in ended.stderr


def test_rows_that_failed_go_to_a_file_beside(cli: Commands, out: Path, tmp_path: Path) -> None:
    lines = [chat("good"), chat("bad", metadata={"x-fault": "refuse"}), chat("fine")]
    ended = cli.run("run", write_lines(tmp_path / "in.jsonl", lines), "-o", out)
    errors = out.with_suffix(".errors.jsonl")
    assert ended.returncode == 1
    assert list(answers(out)) == ["good", "fine"]
    assert [line["custom_id"] for line in read_lines(errors)] == ["bad"]
    assert str(errors) in ended.stderr
    cli.run("run", write_lines(tmp_path / "in.jsonl", [chat("good")]), "-o", out)
    assert not errors.exists()


def test_reads_stdin_and_writes_stdout(cli: Commands) -> None:
    ended = cli.run("run", "-", "-o", "-", stdin=json.dumps(chat("piped")).encode())
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["custom_id"] == "piped"


def test_every_problem_is_named_with_its_line(cli: Commands, out: Path, settings: Settings, tmp_path: Path) -> None:
    lines = [chat("same"), chat("same"), chat("other") | {"url": "/v1/completions"}, chat("nobody", model="missing")]
    ended = cli.run("run", write_lines(tmp_path / "in.jsonl", lines), "-o", out)
    assert ended.returncode == 2
    for line, words in ((2, "duplicate"), (3, "does not match the batch endpoint"), (4, "'missing' is not supported")):
        assert any(told.startswith(f"line {line}: ") and words in told for told in ended.stderr.splitlines()), ended.stderr
    assert not out.exists()


def test_only_the_first_problems_are_shown(cli: Commands, out: Path, tmp_path: Path) -> None:
    lines = [chat(f"row-{number}", model="missing") for number in range(30)]
    path = write_lines(tmp_path / "in.jsonl", lines)
    ended = cli.run("run", path, "-o", out)
    assert ended.stderr.count("is not supported") == 20
    assert "and 10 more problems" in ended.stderr
    assert len(cli.json("run", path, "-o", out, code=2)["errors"]["data"]) == 30


def interruptible(path: Path) -> Path:
    """Rows of which the first engine finishes all but one."""
    return write_lines(path, [*(chat(f"row-{number}") for number in range(9)), chat("slow", metadata={"x-fault": "hang_once"})])


def test_the_same_command_continues_an_interrupted_run(on_both: Settings, out: Path, tmp_path: Path) -> None:
    settings, cli = on_both, Commands(on_both)
    requests = interruptible(tmp_path / "in.jsonl")
    with cli.started("run", requests, "-o", out) as process:
        wait_for(lambda: settled(settings) == 9)
        told = interrupt(process)
    assert process.returncode == 130
    assert "the same command continues" in told
    assert not out.exists()
    ended = cli.run("run", requests, "-o", out)
    assert ended.returncode == 0, ended.stderr
    assert "9 of 10 rows are answered" in ended.stderr
    assert len(jobs(settings)) == 1
    assert list(answers(out)) == [line["custom_id"] for line in read_lines(requests)]


def test_a_finished_run_is_not_continued(cli: Commands, out: Path, settings: Settings, tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", [chat("only")])
    for _ in range(2):
        assert cli.run("run", requests, "-o", out).returncode == 0
    assert len(jobs(settings)) == 2


def test_a_killed_run_takes_its_processes_along_and_can_be_continued(cli: Commands, out: Path, settings: Settings, tmp_path: Path) -> None:
    requests = interruptible(tmp_path / "in.jsonl")
    with cli.started("run", requests, "-o", out) as process:
        wait_for(lambda: settled(settings) == 9)
        left = family(process.pid)
        assert len(left) >= 3
        process.kill()
        assert gone(left)
    ended = cli.run("run", requests, "-o", out)
    assert ended.returncode == 0, ended.stderr
    assert len(read_lines(out)) == 10
    assert len(jobs(settings)) == 1


def test_a_worker_that_dies_is_started_again(cli: Commands, out: Path, tmp_path: Path) -> None:
    lines = [*(chat(f"row-{number}") for number in range(3)), chat("deadly", metadata={"x-fault": "exit_once"})]
    ended = cli.run("run", write_lines(tmp_path / "in.jsonl", lines), "-o", out)
    assert ended.returncode == 0, ended.stderr
    assert "started again" in ended.stderr
    assert len(read_lines(out)) == 4


def test_a_second_interrupt_ends_at_once(settings: Settings, out: Path, tmp_path: Path) -> None:
    cli = Commands(settings.model_copy(update={"stop_seconds": 3600.0}))
    with cli.started("run", interruptible(tmp_path / "in.jsonl"), "-o", out) as process:
        wait_for(lambda: settled(settings) == 9)
        left = family(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for told in process.stderr:
            if "Ctrl-C again" in told:
                break
        interrupt(process)
        assert gone(left)
    assert process.returncode == 130


@pytest.mark.parametrize("pause", [0.0, 0.003, 0.03])
def test_impatience_leaves_nothing_running(settings: Settings, out: Path, tmp_path: Path, pause: float) -> None:
    """Ctrl-C again and again, wherever in its clean-up that finds the command."""
    cli = Commands(settings.model_copy(update={"stop_seconds": 3600.0}))
    with cli.started("run", interruptible(tmp_path / "in.jsonl"), "-o", out) as process:
        wait_for(lambda: settled(settings) == 9)
        left = family(process.pid)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(pause)
        assert gone(left)


def test_a_run_is_answered_by_the_model_it_names(cli: Commands, out: Path, tmp_path: Path) -> None:
    """`default` means this run's model, whatever was served from this directory before."""
    requests = write_lines(tmp_path / "in.jsonl", [chat("only")])
    for given in (["--model", "org/first"], ["--model", "org/second"], []):
        report = cli.json("run", requests, "-o", out, *given)
        assert report["batch"]["model"] == (given[-1] if given else "builtin:smollm2-135m")


def test_an_engine_that_does_not_start_says_why(settings: Settings, out: Path) -> None:
    cli = Commands(settings, SPECBATCH_SCRIPTED_FAULTS="start")
    ended = cli.run("run", EXAMPLES, "-o", out)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("specbatch: error: the scripted engine was told not to start: unset")
    assert not out.exists()
    assert jobs(settings)[0].status in ("cancelling", "cancelled")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "there is no folder"),
        ({}, "holds no config.json"),
        ({"config.json": '{"architectures": ["LlamaForCausalLM"]}'}, "holds no tokenizer"),
    ],
)
def test_a_model_that_cannot_be_served(files: dict[str, str] | None, words: str, settings: Settings, out: Path, tmp_path: Path) -> None:
    """No engine is started for it, and no batch stays behind."""
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    ended = Commands(settings.model_copy(update={"engine": "vllm"})).run("run", EXAMPLES, "-o", out, "--model", folder, "--mode", "plain")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("specbatch: error: ")
    assert words in ended.stderr
    assert not out.exists()
    assert jobs(settings)[0].status in ("cancelling", "cancelled")


def test_everything_embedded_leaves_no_process(tmp_path: Path) -> None:
    home = tmp_path / "home"
    cli = Commands(load(data_dir=home, engine="scripted", **BRISK))
    ended = cli.run("run", EXAMPLES, "-o", tmp_path / "out.jsonl")
    assert ended.returncode == 0, ended.stderr
    assert len(read_lines(tmp_path / "out.jsonl")) == 24
    assert (home / "specbatch.db").exists()
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(home) in " ".join(each.info["cmdline"] or [])]


def test_a_worker_that_is_alive_is_used(cli: Commands, out: Path, settings: Settings, tmp_path: Path) -> None:
    with cli.started("worker"), opened(settings) as ctx:
        wait_for(lambda: engines_alive(ctx))
        with cli.started("run", interruptible(tmp_path / "in.jsonl"), "-o", out) as process:
            wait_for(lambda: settled(settings) == 9)
            modules = [part for each in family(process.pid) for part in each.cmdline() if part in ("worker", "worker.reconciler")]
            interrupt(process)
    assert modules == ["worker.reconciler"]


def test_the_output_of_a_run_that_was_killed_before_its_end_is_delivered(cli: Commands, out: Path, settings: Settings) -> None:
    """Others finished its batch meanwhile: nothing is run again."""
    with cli.started("worker"), cli.started("reconciler"):
        with cli.started("run", EXAMPLES, "-o", out) as process:
            wait_for(lambda: jobs(settings))
            process.kill()
        wait_for(lambda: jobs(settings)[0].status == "completed")
    ended = cli.run("run", EXAMPLES, "-o", out)
    assert ended.returncode == 0, ended.stderr
    assert list(answers(out)) == IDS
    assert len(jobs(settings)) == 1


def test_the_script_and_the_module_are_one(cli: Commands) -> None:
    script = subprocess.run([Path(sys.executable).with_name("specbatch"), "--version"], capture_output=True, text=True, check=True)
    assert script.stdout == cli.run("--version").stdout
