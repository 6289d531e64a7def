"""A worker that changes modes leaves nothing behind: no process, no thread, no memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from specbatch.context import opened
from specbatch.domain import TERMINAL, Mode
from specbatch.following import readings
from specbatch.processes import Crew
from specbatch.service import batches, files
from specbatch.settings import Settings
from tests.engine_fixtures import engine_children
from tests.server_fixtures import CHAT, jsonl, line
from worker.host import EngineHost

SWITCHING = Path(__file__).parents[2] / "benchmarks" / "switching.py"
GROWTH_BYTES = 64 * 1024**2  # of this process: what an allocator keeps, not an engine
ASK = {"model": "default", "messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 4, "temperature": 0}


@contextmanager
def hosted(settings: Settings, first: Mode) -> Iterator[EngineHost]:
    host = EngineHost(settings, first)
    try:
        host.start()
        yield host
    finally:
        host.stop()


def answered(host: EngineHost) -> bool:
    reply = asyncio.run_coroutine_threadsafe(host.answer("row", CHAT, dict(ASK)), host.loop).result(100)
    assert reply.status_code == 200, reply.body
    return True


def switch_often(settings: Settings, modes: list[Mode], times: int) -> None:
    others = engine_children()  # of an engine that other tests of this session share

    def children() -> int:
        return len(engine_children() - others)

    with hosted(settings, modes[0]) as host:
        assert answered(host)
        seen = [(children(), threading.active_count())]
        resident = psutil.Process().memory_info().rss
        for mode in itertools.islice(itertools.cycle(modes[1:] + modes[:1]), times):
            host.switch(mode)
            assert host.mode is mode
            assert answered(host)
            seen.append((children(), threading.active_count()))
        assert max(seen)[0] <= seen[0][0] + 1, seen  # a mode may need one process more than another
        assert max(threads for _, threads in seen[1:]) <= seen[1][1] + 2, seen
        assert psutil.Process().memory_info().rss - resident < GROWTH_BYTES
    assert children() == 0


def test_twenty_switches_of_scripted_engines(settings: Settings) -> None:
    switch_often(settings, [Mode.NGRAM, Mode.PLAIN], 20)


@pytest.mark.vllm("second")
@pytest.mark.timeout(600)
def test_switches_of_real_engines(tmp_path: Path, tiny_llama: Path) -> None:
    """Three of the twenty that the benchmark makes, in a process of their own as in a worker."""
    out = tmp_path / "switching.json"
    words = ["--model", str(tiny_llama), "--draft", str(tiny_llama), "--times", "3", "--out", str(out)]
    ended = subprocess.run([sys.executable, str(SWITCHING), *words], capture_output=True, text=True, timeout=580, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads(out.read_text())
    readings = told["readings"]
    assert [reading["mode"] for reading in readings] == ["ngram", "draft_model", "plain", "ngram"]
    assert all(reading["answered"] for reading in readings)
    assert len({reading["children"] for reading in readings}) == 1
    # The first engine's tokenizer stays in vLLM's cache, for the next.
    assert len({reading["tokenizers"] for reading in readings[1:]}) == 1, [reading["tokenizers"] for reading in readings]
    assert max(reading["threads"] for reading in readings) <= readings[0]["threads"] + 2
    assert readings[-1]["own_bytes"] - readings[1]["own_bytes"] < GROWTH_BYTES
    assert told["left_behind"] == 0


def test_one_worker_serves_the_rows_of_two_modes_and_fixed_workers_share_its_queues(settings: Settings, redis_url: str) -> None:
    """Batches in either mode, through processes: one worker that switches, and one that does not."""
    shared = settings.model_copy(update={"scripted_delay_ms": 5.0, "shard_rows": 8})
    with opened(shared) as ctx, Crew(shared, redis_url, print) as crew:
        crew.start("reconciler", "worker.reconciler")
        crew.start("switching", "worker", SPECBATCH_MODES="ngram,plain")
        crew.start("fixed", "worker", SPECBATCH_MODES="plain")
        file = files.upload(ctx, "in.jsonl", "batch", [jsonl(*(line(f"r{index}") for index in range(40)))])
        asked = [
            batches.submit(ctx, batches.NewBatch(input_file_id=file.id, endpoint=CHAT, mode=mode)).id
            for mode in (Mode.NGRAM, Mode.PLAIN, Mode.NGRAM, Mode.PLAIN)
        ]
        for job_id in asked:
            *_, last = readings(partial(batches.get, ctx, job_id))
            assert last.status in TERMINAL
            assert (last.request_counts.completed, last.request_counts.failed) == (40, 0)
            rows = batches.outcomes(ctx, job_id)
            assert sorted(row["row_index"] for row in rows) == list(range(40))
            # Decided by whoever had said by then what it offers, and reconsidered when the other worker did: shard by shard.
            assert [row["mode"] for row in rows] == [row["decided_mode"] for row in rows]
