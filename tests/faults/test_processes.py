"""Processes that die, freeze and leave: every row ends once all the same."""

from __future__ import annotations

import signal

import httpx
import pytest

from specbatch.domain import JobStatus, Outcome
from specbatch.service import batches
from tests.faults.conftest import Install
from tests.faults.installation import requests
from tests.faults.processes import Process
from tests.faults.waiting import until
from tests.server_fixtures import free_port

COMPLETED = JobStatus.COMPLETED


def test_kill_9_of_a_worker(install: Install, database_url: str) -> None:
    here = install(database_url)
    here.reconciler()
    victim, _ = here.worker(), here.worker()
    job_id = here.submit(requests(120))
    here.until_settled(job_id, 10)
    held = here.until_holds(victim)
    victim.kill()
    tally = here.finish(job_id)
    assert (tally.status, tally.outcomes) == (COMPLETED, {Outcome.SUCCEEDED: 120})
    again = here.answers().total() - 120
    assert again <= 10 * len(held), "rows that were settled before the kill have been answered again"


def test_kill_9_of_every_worker_at_once(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url)
    here.reconciler()
    victims = [here.worker(), here.worker()]
    job_id = here.submit(requests(80))
    here.until_settled(job_id, 10)
    for victim in victims:
        victim.kill()
    here.worker()
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 80}


def test_a_worker_starts_in_the_mode_that_most_rows_wait_for(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url, modes=("ngram", "plain"))
    here.reconciler()
    job_id = here.submit(requests(30))  # in plain, by name
    until(lambda: batches.get(here.ctx, job_id).status == JobStatus.IN_PROGRESS, "the batch is validated")
    here.worker()
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 30}
    assert (here.logged("in mode plain"), here.logged("in mode ngram"), here.logged("switching from")) == (1, 0, 0)


def test_the_engine_dies(install: Install, sqlite_url: str) -> None:
    """Under rows of several shards; the worker lives on and starts another."""
    here = install(sqlite_url)
    here.reconciler()
    here.worker()
    job_id = here.submit(requests(60, faults={25: "die_once"}))
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 60}
    assert here.logged("the engine died after") == 1


@pytest.mark.postgres
def test_a_row_that_kills_every_engine_ends_alone(install: Install, postgres_url: str) -> None:
    here = install(postgres_url)
    here.reconciler()
    here.worker()
    job_id = here.submit(requests(40, delay_ms=5, faults={17: "die"}))
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 39, Outcome.FAILED: 1}
    failed = next(row for row in batches.outcomes(here.ctx, job_id) if row["outcome"] == Outcome.FAILED)
    assert (failed["custom_id"], failed["error_code"]) == ("r17", "engine_died")


def test_a_row_that_kills_every_worker_ends_alone(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url, max_attempts=2, lease_seconds=0.6)
    here.reconciler()
    worker = here.worker()
    job_id = here.submit(requests(12, delay_ms=5, faults={7: "exit"}))
    deaths = 0

    def over_or_dead() -> bool:
        return here.ended(job_id) or worker.exit_code is not None

    while not here.ended(job_id):
        until(over_or_dead, "the worker dies", explain=here.describe)
        if worker.exit_code is not None:
            deaths, worker = deaths + 1, here.worker()
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 11, Outcome.FAILED: 1}
    assert deaths <= 8


def test_kill_9_of_the_reconciler_at_every_stage(install: Install, database_url: str) -> None:
    """Before it validates, while rows run, and while it finalizes: the next one goes on where it was."""
    here = install(database_url)
    reconciler = here.reconciler()
    here.worker()
    job_id = here.submit(requests(300, delay_ms=2))
    before = None

    def goes_on() -> bool:
        return here.ended(job_id) or (here.settled(job_id), batches.get(here.ctx, job_id).status) != before

    while not here.ended(job_id):
        reconciler.kill()
        reconciler = here.reconciler()
        before = here.settled(job_id), batches.get(here.ctx, job_id).status
        until(goes_on, "it goes on", explain=here.describe)
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 300}


def test_kill_9_of_the_api(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url, port=free_port())
    here.reconciler()
    here.worker()
    api = here.start("api", "api.__main__")
    base = f"http://{here.settings.host}:{here.settings.port}"
    until(lambda: _healthy(base), "the API answers", explain=api.text)
    job_id = here.submit(requests(40))
    here.until_settled(job_id, 5)
    with pytest.raises(httpx.HTTPError):  # a follower loses its stream, and nothing else happens
        _follow_until_killed(base, job_id, api)
    here.finish(job_id)
    here.start("api", "api.__main__")
    until(lambda: _healthy(base), "the next API answers")
    assert len(httpx.get(f"{base}/v1/batches/{job_id}/results").json()["data"]) == 40


def _healthy(base: str) -> bool:
    try:
        return httpx.get(f"{base}/healthz").status_code == 200
    except httpx.HTTPError:
        return False


def _follow_until_killed(base: str, job_id: str, api: Process) -> None:
    with httpx.stream("GET", f"{base}/v1/batches/{job_id}/results", headers={"accept": "application/x-ndjson"}, timeout=30) as stream:
        for _ in stream.iter_lines():
            api.kill()


def test_a_zombie_wakes_and_writes(install: Install, database_url: str) -> None:
    """SIGSTOP for longer than a lease, with rows answered and not yet written: the fence refuses them."""
    here = install(database_url, scripted_delay_ms=50)
    here.reconciler()
    zombie = here.worker()
    job_id = here.submit(requests(30, delay_ms=1500))
    here.until_holds(zombie)
    here.freeze(zombie)
    held = here.held_by(zombie)
    assert held, "it was done before it stood still"
    here.worker()
    until(lambda: here.passed_on(held), "another worker has its shards", explain=here.describe)
    zombie.send(signal.SIGCONT)
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 30}
    zombie.says("a newer attempt has this shard; nothing more is written")


def test_sigterm_in_the_middle_of_a_shard(install: Install, sqlite_url: str) -> None:
    """What cannot be finished in time is handed back, at once and without a loss; a second worker goes on."""
    here = install(sqlite_url, stop_seconds=0.3, lease_seconds=60.0)
    here.reconciler()
    leaving = here.worker()
    job_id = here.submit(requests(40, delay_ms=600))
    here.until_holds(leaving)
    leaving.send(signal.SIGTERM)
    assert leaving.wait(20) == 0
    assert not here.held_by(leaving), "a shard was left to its lease"
    here.worker()
    tally = here.finish(job_id)
    assert (tally.outcomes, tally.losses) == ({Outcome.SUCCEEDED: 40}, 0)


def test_a_second_signal_is_obeyed_at_once(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url, stop_seconds=600.0)
    here.reconciler()
    leaving = here.worker()
    job_id = here.submit(requests(10, faults=dict.fromkeys(range(10), "hang")))
    here.until_holds(leaving)
    while leaving.exit_code is None:  # two that come together count as one
        leaving.send(signal.SIGTERM)
        until(lambda: leaving.exit_code is not None or not leaving.pending(), "the signal is taken")
    assert leaving.exit_code == 128 + signal.SIGTERM
    batches.cancel(here.ctx, job_id)
    assert here.finish(job_id).outcomes == {Outcome.CANCELLED: 10}


@pytest.mark.postgres
def test_clocks_that_disagree_by_minutes(install: Install, postgres_url: str) -> None:
    here = install(postgres_url)
    here.reconciler(("skew_clock", "-400"))
    fast, slow = here.worker(("skew_clock", "600")), here.worker(("skew_clock", "-600"))
    job_id = here.submit(requests(120, delay_ms=100))
    here.until_holds(fast)
    here.until_holds(slow)
    tally = here.finish(job_id)
    assert (tally.outcomes, tally.losses, here.answered_twice()) == ({Outcome.SUCCEEDED: 120}, 0, 0)


@pytest.mark.postgres
def test_two_reconcilers_and_a_worker_that_dies(install: Install, postgres_url: str) -> None:
    here = install(postgres_url)
    here.reconciler(), here.reconciler()
    victim, _ = here.worker(), here.worker()
    jobs = [here.submit(requests(30)) for _ in range(4)]
    here.until_holds(victim)
    victim.kill()
    for job_id in jobs:
        assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 30}
