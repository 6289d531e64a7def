"""Services that die, forget and hang: work pauses, goes on alone, and every row ends once."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specbatch import embedded, migration
from specbatch.domain import Outcome
from specbatch.settings import Settings
from tests.faults.conftest import Install
from tests.faults.installation import Installation, requests
from tests.faults.services import Postgres, Valkey, tmpfs


def die_and_return(valkey: Valkey) -> None:
    valkey.kill()
    valkey.start()


def forget_everything(valkey: Valkey) -> None:
    valkey.kill()
    valkey.forget()
    valkey.start()


def flush(valkey: Valkey) -> None:
    valkey.client.flushall()


def cut_connections(valkey: Valkey) -> None:
    assert valkey.cut_connections() > 0


def repeat_and_reorder(valkey: Valkey) -> None:
    """Every message three times, shuffled."""
    for name in valkey.queues():
        messages = valkey.client.lrange(name, 0, -1) * 3
        random.Random(7).shuffle(messages)
        valkey.client.delete(name)
        valkey.client.rpush(name, *messages)


BLOWS = [die_and_return, forget_everything, flush, cut_connections, repeat_and_reorder]


@pytest.mark.parametrize("blow", BLOWS)
def test_valkey(install: Install, sqlite_url: str, valkey: Valkey, blow: Callable[[Valkey], None]) -> None:
    here = install(sqlite_url)
    here.reconciler()
    here.worker(), here.worker()
    job_id = here.submit(requests(150))
    here.until_settled(job_id, 10)
    blow(valkey)
    tally = here.finish(job_id)
    assert (tally.outcomes, tally.losses) == ({Outcome.SUCCEEDED: 150}, 0)
    assert here.answered_twice() == 0, "no worker was lost: nothing had to be answered again"


def test_valkey_is_down_while_batches_are_submitted(install: Install, sqlite_url: str, valkey: Valkey) -> None:
    here = install(sqlite_url)
    reconciler = here.reconciler()
    here.worker()
    valkey.kill()
    job_id = here.submit(requests(40))
    reconciler.says("paused: Redis does not answer")
    valkey.start()
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 40}
    reconciler.says("resumed")


def test_valkey_hangs(install: Install, sqlite_url: str, valkey: Valkey) -> None:
    """It takes connections and answers nothing: whoever publishes gives up in time, and tries again."""
    here = install(sqlite_url)
    reconciler = here.reconciler()
    here.worker()
    valkey.freeze()
    job_id = here.submit(requests(30))
    reconciler.says("paused: Redis does not answer", 60)
    valkey.wake()
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 30}


def test_the_embedded_valkey_is_killed(install: Install, sqlite_url: str, tmp_path: Path) -> None:
    """Nobody else would start it again."""
    with embedded.valkey(Settings(data_dir=tmp_path / "own")) as url:
        here = install(sqlite_url, redis_url=url)
        here.reconciler(), here.worker()
        job_id = here.submit(requests(100))
        here.until_settled(job_id, 10)
        os.kill(int((tmp_path / "own" / "valkey" / "valkey.pid").read_text()), signal.SIGKILL)
        assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 100}
        later = here.submit(requests(20))
        assert here.finish(later).outcomes == {Outcome.SUCCEEDED: 20}
        here.close()


def test_publishes_that_get_lost(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url)
    here.reconciler(("lose_messages", "2"))
    here.worker()
    job_id = here.submit(requests(30, delay_ms=5))
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 30}


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A server of this test's own, migrated."""
    server = Postgres()
    migration.upgrade_database(Settings(database_url=server.url))
    yield server
    server.close()


@pytest.mark.postgres
def test_kill_9_of_postgresql(install: Install, postgres: Postgres) -> None:
    """In the middle of everybody's transactions. Those in hand wait, lose nothing, and are not taken for dead."""
    here = install(postgres.url, lease_seconds=3.0)
    reconciler, worker = here.reconciler(), here.worker()
    job_id = here.submit(requests(150))
    here.until_settled(job_id, 20)
    postgres.kill()
    worker.says("paused:")
    reconciler.says("paused:")
    postgres.start()
    tally = here.finish(job_id)
    assert (tally.outcomes, tally.losses) == ({Outcome.SUCCEEDED: 150}, 0)
    assert here.answered_twice() == 0


@pytest.mark.postgres
def test_every_connection_to_postgresql_is_cut(install: Install, postgres_url: str) -> None:
    import sqlalchemy as sa

    here = install(postgres_url)
    here.reconciler(), here.worker()
    job_id = here.submit(requests(150))
    for count in (10, 40, 80):
        here.until_settled(job_id, count)
        admin = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with admin.connect() as connection:
            others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
            connection.exec_driver_sql(others)
    tally = here.finish(job_id)
    assert (tally.outcomes, here.answered_twice()) == ({Outcome.SUCCEEDED: 150}, 0)


def test_a_full_disk(install: Install, tmp_path: Path) -> None:
    """The database cannot grow: everybody waits, says so, and goes on when there is room again."""
    try:
        with tmpfs(tmp_path / "small", 400) as disk:
            _fill_and_free(install, disk)
    except PermissionError as refused:
        pytest.skip(f"no small disk can be made here: {refused}")


def _fill_and_free(install: Install, disk: Path) -> None:
    url = f"sqlite:///{disk / 'specbatch.db'}"
    migration.upgrade_database(Settings(data_dir=disk, database_url=url))
    here: Installation = install(url, data_dir=disk)
    here.reconciler()
    worker = here.worker()
    job_id = here.submit(requests(200, delay_ms=2000))
    here.until_holds(worker)
    ballast = disk / "ballast"
    _fill(ballast)
    worker.says("paused:")
    before = here.settled(job_id)
    assert before < 200
    ballast.unlink()
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 200}
    here.close()
    here.ctx.database.close()


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def test_a_full_disk_while_outputs_are_written(install: Install, tmp_path: Path, sqlite_url: str) -> None:
    try:
        with tmpfs(tmp_path / "small", 400) as disk:
            here = install(sqlite_url, data_dir=disk)
            reconciler, worker = here.reconciler(), here.worker()
            job_id = here.submit(requests(50, delay_ms=2000))
            here.until_holds(worker)
            ballast = disk / "ballast"
            _fill(ballast)  # the journal, the logs and the database lie elsewhere
            reconciler.says("No room left on the disk")
            ballast.unlink()
            assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 50}
            here.close()
    except PermissionError as refused:
        pytest.skip(f"no small disk can be made here: {refused}")
