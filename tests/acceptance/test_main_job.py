"""The main job on a real model: SmolLM2 answers the examples, drafting by n-grams, by every way in, on both databases."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import sqlalchemy as sa

from specbatch.domain import Mode
from specbatch.settings import Settings
from tests.commands import EXAMPLES, Commands, answers, read_lines, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
IDS = [line["custom_id"] for line in read_lines(EXAMPLES)]
ENGINE_SECONDS = 600.0


class Measured(NamedTuple):
    rows: int
    timed: int
    generated: int
    drafted: int
    accepted: int


def measured(settings: Settings, batch_id: str) -> Measured:
    """What the database itself holds of a batch's rows."""
    query = sa.text("""
        SELECT count(*), count(ttft_seconds + tpot_seconds + queue_seconds),
               sum(generated_tokens), sum(drafted_tokens), sum(accepted_tokens)
        FROM measurements WHERE job_id = :job AND mode = 'ngram'
    """)
    with sa.create_engine(settings.sql_url, poolclass=sa.NullPool).connect() as connection:
        return Measured(*connection.execute(query, {"job": batch_id}).one())


def test_run_with_everything_embedded(tmp_path: Path) -> None:
    """`make demo`."""
    settings = Settings(data_dir=tmp_path)
    out = tmp_path / "out.jsonl"
    report = Commands(settings).json("run", EXAMPLES, "-o", out, "--mode", "ngram", seconds=ENGINE_SECONDS)
    assert [line["custom_id"] for line in read_lines(out)] == IDS
    stored = measured(settings, report["batch"]["id"])
    assert (stored.rows, stored.timed) == (24, 24)
    assert 0 < stored.accepted < stored.drafted
    assert stored.generated == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in read_lines(out))
    assert report["batch"]["measured"]["accepted_tokens"] == stored.accepted
    assert report["batch"]["measured"]["peak_memory_bytes"] > 100 * 1024**2
    for kind in ("question", "code", "json"):
        assert all(text.strip() for custom_id, text in answers(out).items() if custom_id.startswith(kind))
    assert all(isinstance(json.loads(text), dict) for custom_id, text in answers(out).items() if custom_id.startswith("json"))


def test_by_hand_by_run_and_by_http(database_url: str, redis_url: str, tmp_path: Path) -> None:
    """One installation, three ways in: the same lines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = Settings(data_dir=tmp_path, database_url=database_url, redis_url=redis_url, port=port, modes=(Mode.NGRAM,))
    cli = Commands(settings)
    by_hand, by_run, by_http = (tmp_path / f"{name}.jsonl" for name in ("hand", "run", "http"))
    with cli.started("up") as process:
        batch_id = cli.run("submit", EXAMPLES, "--mode", "ngram").stdout.strip()
        assert cli.run("status", batch_id, "--watch", seconds=ENGINE_SECONDS).returncode == 0
        assert cli.run("results", batch_id, "-o", by_hand).returncode == 0
        assert cli.run("run", EXAMPLES, "-o", by_run, "--mode", "ngram", seconds=ENGINE_SECONDS).returncode == 0
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as api:
            by_http.write_bytes(over_http(api))
        assert process.poll() is None
    for path in (by_hand, by_run, by_http):
        assert [line["custom_id"] for line in read_lines(path)] == IDS
    assert answers(by_hand) == answers(by_run) == answers(by_http)
    stored = measured(settings, batch_id)
    assert (stored.rows, stored.timed) == (24, 24)
    assert 0 < stored.accepted < stored.drafted


def over_http(api: httpx.Client) -> bytes:
    """What the README does with curl."""
    file = api.post("/v1/files", data={"purpose": "batch"}, files={"file": ("requests.jsonl", EXAMPLES.read_bytes())}).json()
    batch = api.post(
        "/v1/batches",
        json={"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ).json()

    def output() -> str | None:
        return api.get(f"/v1/batches/{batch['id']}").json()["output_file_id"]  # type: ignore[no-any-return]

    return api.get(f"/v1/files/{wait_for(output)}/content").content
