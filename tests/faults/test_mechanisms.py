"""Each mechanism switched off, to show that the tests would notice: the same fault, and now the audit fails."""

from __future__ import annotations

import signal

import pytest
import sqlalchemy as sa

from specbatch.database import now
from specbatch.domain import Mode, Outcome, ShardStatus
from specbatch.models import shards
from specbatch.settings import BUILTIN_MODEL
from tests.faults.audit import audit
from tests.faults.conftest import Install
from tests.faults.installation import Installation, requests
from tests.faults.processes import Process, Seam
from tests.faults.waiting import until


def _zombie_among_heirs(install: Install, url: str, *seams: Seam) -> tuple[Installation, str]:
    """A worker freezes for longer than its lease, another goes on with its shard, and it wakes."""
    here = install(url, shards_in_flight=1)
    here.reconciler()
    zombie = here.worker(*seams)
    job_id = here.submit(requests(6, delay_ms=700))
    here.until_holds(zombie)
    here.freeze(zombie)
    here.worker(*seams, SPECBATCH_MAX_NUM_SEQS="1")  # row after row, so that it is in the middle when the zombie wakes
    until(lambda: here.written_by(1, job_id) > 0, "the heir has written", explain=here.describe)
    zombie.send(signal.SIGCONT)
    until(lambda: here.ended(job_id), "the batch ends", explain=here.describe)
    return here, job_id


def test_the_fence_holds(install: Install, sqlite_url: str) -> None:
    here, job_id = _zombie_among_heirs(install, sqlite_url)
    assert audit(here.ctx, job_id).outcomes == {Outcome.SUCCEEDED: 6}


def test_the_fence_matters(install: Install, sqlite_url: str) -> None:
    here, job_id = _zombie_among_heirs(install, sqlite_url, ("switch_off_fence", ""))
    with pytest.raises(AssertionError, match="after attempt"):
        audit(here.ctx, job_id)


def test_the_lease_s_end_matters(install: Install, sqlite_url: str) -> None:
    """Without it, the shards of a dead worker are lost."""
    here = install(sqlite_url)
    here.reconciler(("switch_off_expiry", ""))
    job_id = _killed_and_left_to_rot(here)
    with pytest.raises(AssertionError, match="still in_progress"):
        audit(here.ctx, job_id)


def test_the_reconciler_matters(install: Install, sqlite_url: str) -> None:
    """Without one, nobody misses a dead worker."""
    here = install(sqlite_url)
    reconciler = here.reconciler()
    job_id = _killed_and_left_to_rot(here, without=reconciler.kill)
    with pytest.raises(AssertionError, match="still in_progress"):
        audit(here.ctx, job_id)
    here.reconciler()
    assert here.finish(job_id).outcomes == {Outcome.SUCCEEDED: 60}


def _killed_and_left_to_rot(here: Installation, without: object = None) -> str:
    """Kill a worker, let another finish all that it can get, and wait until the lease of the rest is long over."""
    victim = here.worker()
    job_id = here.submit(requests(60, delay_ms=300))
    here.until_holds(victim)
    until(lambda: _all_sent(here), "every shard has its message", explain=here.describe)
    if callable(without):
        without()
    victim.kill()
    held = here.held_by(victim)
    assert held
    heir = here.worker()
    until(lambda: _only_dead_ones(here, heir), "nothing but the dead worker's shards is left", explain=here.describe)
    return job_id


def _all_sent(here: Installation) -> bool:
    with here.ctx.database.read() as tx:
        unsent = sa.select(sa.func.count()).where(shards.c.status == ShardStatus.QUEUED, shards.c.published_at == 0)
        return tx.execute(unsent).scalar_one() == 0


def _only_dead_ones(here: Installation, heir: Process) -> bool:
    """No message waits, the heir is idle, and all leases ended three sweeps ago."""
    assert here.ctx.queue is not None
    with here.ctx.database.read() as tx:
        leases = list(tx.execute(sa.select(now() - shards.c.lease_until).where(shards.c.status == ShardStatus.RUNNING)).scalars())
    idle = here.ctx.queue.depth(BUILTIN_MODEL, Mode.PLAIN) == 0 and not here.held_by(heir)
    return idle and bool(leases) and min(leases) > 3 * here.settings.sweep_seconds


def test_renewal_holds(install: Install, sqlite_url: str) -> None:
    """A shard that takes three leases stays in its holder's hands."""
    here = install(sqlite_url, lease_seconds=0.9)
    here.reconciler()
    here.worker()
    tally = here.finish(here.submit(requests(10, delay_ms=2700)))
    assert (tally.outcomes, tally.most_attempts, here.answered_twice()) == ({Outcome.SUCCEEDED: 10}, 1, 0)


def test_renewal_matters(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url, lease_seconds=0.9)
    here.reconciler()
    here.worker(("switch_off_renewal", ""))
    job_id = here.submit(requests(10, delay_ms=2700))
    until(lambda: here.logged("nothing more is written") > 0, "a living holder loses its shard", explain=here.describe)
    assert here.settled(job_id) == 0


def test_resuming_matters(install: Install, sqlite_url: str) -> None:
    """Without it, a second attempt answers what the first had settled."""
    again = {}
    for seams in ((), (("switch_off_resume", ""),)):
        here = install(sqlite_url, shard_rows=40, shards_in_flight=1, max_num_seqs=1)
        here.reconciler()
        victim = here.worker()
        job_id = here.submit(requests(40, delay_ms=40))
        before = here.answers().total()
        here.until_settled(job_id, 25)
        victim.kill()
        here.worker(*seams)
        here.finish(job_id)
        again[bool(seams)] = here.answers().total() - before - 40
        here.close()
    assert again[False] < 25 <= again[True]
