"""1,000 rows of Parquet become Parquet through a template of two columns on a real engine, killed twice on the way."""

from __future__ import annotations

import datetime
import signal
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.context import opened
from specbatch.errors import ServiceUnavailable
from specbatch.service import batches
from specbatch.settings import Settings
from tests.commands import Commands, family, gone, wait_for

ROWS = 1000
START_SECONDS = 240.0  # of an engine, on a busy machine without a GPU


@pytest.fixture
def settings(tmp_path: Path, tiny_llama: Path) -> Settings:
    return Settings(
        data_dir=tmp_path / "home",
        model=str(tiny_llama),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        cpu_kv_cache_gib=0.25,
        enforce_eager=True,
        stop_seconds=3.0,
        lease_seconds=3.0,
        sweep_seconds=0.5,
        shard_rows=64,
        shards_in_flight=1,  # what a stopping worker still answers is a small part of the whole, however long it takes to stop
    )


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_killed_twice_and_whole(settings: Settings, tmp_path: Path) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    given = pa.table(
        {
            "id": pa.array(range(ROWS), pa.uint32()),
            "city": pa.array([f"city {number % 7}" for number in range(ROWS)]).dictionary_encode(),
            "at": pa.array([datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)] * ROWS, pa.timestamp("us", tz="UTC")),
        }
    )
    pq.write_table(given, source)
    cli = Commands(settings)
    words = ("generate", source, "-o", out, "--prompt", "Tell me of {{ city }}, visitor {{ id }}.", "--max-tokens", "12", "--seed", "1")
    sampling = ("--temperature", "0.8", "--mode", "ngram")
    for answered in (150, 500):
        with cli.started(*words, *sampling) as process:
            wait_for(lambda least=answered: settled(settings) >= least or process.poll() is not None, START_SECONDS)  # type: ignore[misc]
            assert process.poll() is None, process.communicate()[1]
            left = family(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert gone(left), "a process outlived the command"
        assert settled(settings) < ROWS, "it was done before it was killed"
        assert not out.exists()
    with cli.started(*words, *sampling) as process:
        stderr = process.communicate(timeout=START_SECONDS)[1]
        assert process.returncode == 0, stderr
    made = pq.read_table(out)
    assert made.select(given.column_names) == given
    assert made.num_rows == ROWS
    assert None not in made["text"].to_pylist()  # some are empty: a random model may end at once
    assert all(1 <= tokens <= 12 for tokens in made["generated_tokens"].to_pylist())
    assert set(made["finish_reason"].to_pylist()) <= {"length", "stop"}
    assert set(made["mode"].to_pylist()) == {"ngram"}
    assert len(set(made["seed"].to_pylist())) == ROWS
    with opened(settings) as ctx:
        [batch] = batches.page(ctx)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (ROWS, 0)


def settled(settings: Settings) -> int:
    """Rows in the database, once it and its tables are there."""
    if not (settings.home / "specbatch.db").exists():
        return 0
    with opened(settings) as ctx, suppress(ServiceUnavailable):
        return sum(batch.request_counts.completed for batch in batches.page(ctx))
    return 0
