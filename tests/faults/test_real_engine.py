"""vLLM itself, killed in the middle of a job: another engine is started, and every row is answered."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest

from specbatch.domain import JobStatus, Outcome
from tests.commands import EXAMPLES
from tests.faults.conftest import Install
from tests.faults.installation import Installation
from tests.faults.processes import Process
from tests.faults.waiting import gone, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ENGINE_SECONDS = 600.0


def engines(worker: Process) -> list[psutil.Process]:
    """The worker's children that hold the model."""
    return [child for child in psutil.Process(worker.pid).children(recursive=True) if "VLLM" in child.name()]


def submitted(here: Installation) -> tuple[Process, str]:
    here.reconciler()
    worker = here.start("worker", "worker.__main__")
    worker.says("worker.steps: ready", ENGINE_SECONDS)
    job_id = here.submit([json.loads(line) for line in EXAMPLES.read_text().splitlines()])
    until(lambda: here.settled(job_id) >= 2, "rows are answered", ENGINE_SECONDS, explain=here.describe)
    assert here.settled(job_id) < 24, "too late to kill anything"
    return worker, job_id


def test_kill_9_of_the_engine_process(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url, engine="vllm", shards_in_flight=4, max_num_seqs=4, lease_seconds=10.0)
    worker, job_id = submitted(here)
    for engine in engines(worker):
        engine.kill()
    tally = here.finish(job_id, ENGINE_SECONDS)
    assert (tally.status, tally.outcomes) == (JobStatus.COMPLETED, {Outcome.SUCCEEDED: 24})
    assert here.logged("the engine died after") >= 1
    assert worker.exit_code is None
    _kill_and_see_the_engine_end(worker)  # the second one, too


def test_kill_9_of_the_worker_leaves_no_engine(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url, engine="vllm", shards_in_flight=4, max_num_seqs=4, lease_seconds=10.0)
    worker, job_id = submitted(here)
    _kill_and_see_the_engine_end(worker)
    here.start("worker", "worker.__main__")
    tally = here.finish(job_id, ENGINE_SECONDS)
    assert (tally.status, tally.outcomes) == (JobStatus.COMPLETED, {Outcome.SUCCEEDED: 24})


def _kill_and_see_the_engine_end(worker: Process) -> None:
    orphans = engines(worker)
    assert orphans
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: all(gone(orphan) for orphan in orphans), "the engine's processes end", 60)
