"""`up`, with submit, status, results, cancel and jobs against it: the same answers as `run`, on both databases."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from specbatch.settings import Settings, load
from tests.commands import EXAMPLES, Commands, answers, chat, family, gone, interrupt, read_lines, wait_for, write_lines
from tests.webhook_receiver import SECRET, Receiver


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def settings(database_url: str, redis_url: str, tmp_path: Path) -> Settings:
    brisk = {"stop_seconds": 1.0, "lease_seconds": 2.0, "sweep_seconds": 0.5}
    return load(data_dir=tmp_path, database_url=database_url, redis_url=redis_url, engine="scripted", port=free_port(), **brisk)


@pytest.fixture
def cli(settings: Settings) -> Commands:
    return Commands(settings)


@contextmanager
def served(cli: Commands, settings: Settings) -> Iterator[subprocess.Popen[str]]:
    with cli.started("up") as process:
        wait_for(lambda: answering(settings) or process.poll() is not None)
        yield process


def answering(settings: Settings) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{settings.port}/healthz").is_success
    except httpx.TransportError:
        return False


def test_by_hand_as_by_run_and_by_curl(cli: Commands, settings: Settings, tmp_path: Path) -> None:
    by_run, by_hand, by_http = (tmp_path / f"{name}.jsonl" for name in ("run", "hand", "http"))
    with served(cli, settings) as process:
        batch_id = cli.run("submit", EXAMPLES).stdout.strip()
        watched = cli.run("status", batch_id, "--watch", "--json")
        events = [json.loads(line) for line in watched.stdout.splitlines()]
        assert watched.returncode == 0
        assert all(event["event"] == "progress" for event in events[:-1])
        assert (events[-1]["object"], events[-1]["status"]) == ("batch", "completed")
        assert cli.run("results", batch_id, "-o", by_hand).returncode == 0
        by_http.write_bytes(httpx.get(f"http://127.0.0.1:{settings.port}/v1/files/{events[-1]['output_file_id']}/content").content)
        assert cli.run("run", EXAMPLES, "-o", by_run).returncode == 0
        left = family(process.pid)
        assert "stopping" in interrupt(process)
    assert process.returncode == 0
    assert gone(left)
    assert len(read_lines(by_hand)) == 24
    assert by_http.read_bytes() == by_hand.read_bytes()
    assert answers(by_run) == answers(by_hand)


def test_cancel_keeps_what_is_done(cli: Commands, settings: Settings, tmp_path: Path) -> None:
    lines = [chat("quick"), chat("never", metadata={"x-fault": "hang"})]
    out = tmp_path / "out.jsonl"
    with served(cli, settings):
        batch = cli.json("submit", write_lines(tmp_path / "in.jsonl", lines), "--metadata", "who=me", "--mode", "plain")
        assert (batch["status"], batch["metadata"]) == ("validating", {"who": "me"})
        wait_for(lambda: cli.json("status", batch["id"])["request_counts"]["completed"] == 1)
        refused = cli.run("results", batch["id"], "-o", out)
        assert (refused.returncode, out.exists()) == (2, False)
        assert "1 of 2 rows" in refused.stderr
        assert cli.json("cancel", batch["id"])["status"] == "cancelling"
        assert cli.run("status", batch["id"], "--watch").returncode == 1
        assert cli.run("results", batch["id"], "-o", out).returncode == 1
        assert list(answers(out)) == ["quick"]
        assert read_lines(out.with_suffix(".errors.jsonl"))[0]["error"]["code"] == "batch_cancelled"
        assert [each["id"] for each in cli.json("jobs")["data"]] == [batch["id"]]
        assert batch["id"] in cli.run("jobs").stdout


def test_bad_lines_are_skipped_their_end_is_announced_and_what_failed_is_tried_again(
    settings: Settings, receiver: Receiver, tmp_path: Path
) -> None:
    lines = [chat("good"), chat("streamed", stream=True), chat("refused", metadata={"x-fault": "refuse"})]
    requests, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    known = settings.model_copy(update={"webhook_secret": SECRET, "webhook_private_addresses": True})
    cli = Commands(known)
    with served(cli, known):
        failed = cli.json("submit", requests, "--on-invalid", "fail", "--webhook-url", receiver.url)
        assert cli.run("status", failed["id"], "--watch").returncode == 2
        skipped = cli.json("submit", requests, "--on-invalid", "skip", "--webhook-url", receiver.url)
        assert cli.run("status", skipped["id"], "--watch").returncode == 1
        assert cli.run("results", skipped["id"], "-o", out).returncode == 1
        assert list(answers(out)) == ["good"]
        wrong = {line["custom_id"]: line["error"] and line["error"]["code"] for line in read_lines(out.with_suffix(".errors.jsonl"))}
        assert wrong == {"streamed": "streaming_unsupported", "refused": None}
        wait_for(lambda: len(receiver.came) == 2)
        announced = {event["data"]["id"]: event["type"] for event in receiver.events()}
        assert announced == {failed["id"]: "batch.failed", skipped["id"]: "batch.completed"}
        again = cli.run("retry", skipped["id"])
        assert again.returncode == 0
        assert cli.run("status", again.stdout.strip(), "--watch").returncode == 1
        second = cli.json("status", again.stdout.strip(), code=1)
        assert second["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
        assert second["metadata"] == {"retry_of": skipped["id"]}
        nothing = cli.run("retry", failed["id"])
        assert (nothing.returncode, "nothing to retry" in nothing.stderr) == (2, True)


def test_a_worker_killed_under_up_comes_back(cli: Commands, settings: Settings, tmp_path: Path) -> None:
    with served(cli, settings) as process:
        worker = wait_for(lambda: next((each for each in family(process.pid) if each.cmdline()[-1:] == ["worker"]), None))
        assert worker is not None
        worker.send_signal(signal.SIGKILL)
        batch_id = cli.run("submit", write_lines(tmp_path / "in.jsonl", [chat("after")])).stdout.strip()
        assert cli.run("status", batch_id, "--watch").returncode == 0
        assert "was killed by signal 9; it is started again" in interrupt(process)
