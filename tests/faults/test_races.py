"""Cancel, expiry and deletion, racing the rows to the end: each row has one ending, and the counts agree with it."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import sqlalchemy as sa

from specbatch.domain import JobStatus, Outcome
from specbatch.errors import Conflict
from specbatch.models import jobs
from specbatch.service import batches, files
from tests.faults.conftest import Install
from tests.faults.installation import Installation, requests
from tests.faults.waiting import until

ROWS = 60


def pass_the_window(here: Installation, job_id: str) -> None:
    with here.ctx.database.write() as tx:
        tx.execute(sa.update(jobs).where(jobs.c.id == job_id).values(expires_at=0.0))


def cancel(here: Installation, job_id: str) -> None:
    with suppress(Conflict):
        batches.cancel(here.ctx, job_id)


@pytest.mark.parametrize("stop", [cancel, pass_the_window])
def test_stopping_at_every_moment(install: Install, database_url: str, stop: object) -> None:
    """Batch after batch is stopped, each a little later in its life, and the last when it is over."""
    assert callable(stop)
    here = install(database_url)
    here.reconciler(), here.reconciler(), here.worker(), here.worker()
    endings = set()
    for settled in (0, 0, 1, 25, 55, 59, ROWS, None):
        job_id = here.submit(requests(ROWS, delay_ms=15))
        if settled is None:
            until(lambda job_id=job_id: here.ended(job_id), "it ends by itself", explain=here.describe)  # type: ignore[misc]
        else:
            here.until_settled(job_id, settled)
        stop(here, job_id)
        tally = here.finish(job_id)
        assert sum(tally.outcomes.values()) == ROWS
        assert tally.outcomes.get(Outcome.SUCCEEDED, 0) >= (ROWS if settled is None else settled)
        endings.add(tally.status)
    assert endings <= {JobStatus.COMPLETED, JobStatus.CANCELLED, JobStatus.EXPIRED}
    assert len(endings) == 2, "no race was won by both sides"


def test_rows_in_the_engine_are_aborted(install: Install, sqlite_url: str) -> None:
    here = install(sqlite_url)
    here.reconciler()
    worker = here.worker()
    job_id = here.submit(requests(20, faults=dict.fromkeys(range(20), "hang")))
    here.until_holds(worker)
    batches.cancel(here.ctx, job_id)
    assert here.finish(job_id).outcomes == {Outcome.CANCELLED: 20}
    assert here.finish(here.submit(requests(10))).outcomes == {Outcome.SUCCEEDED: 10}, "the engine is free again"


def test_the_input_is_deleted_at_any_moment(install: Install, database_url: str) -> None:
    """Once validated, a batch needs its input no more; before, it fails and says why."""
    here = install(database_url)
    here.reconciler(), here.worker()
    dice = random.Random(3)
    endings = set()
    for late in (False, True, True):
        job_id = here.submit(requests(30, delay_ms=5))
        if late:
            here.until_settled(job_id, dice.randint(1, 20))
        files.delete(here.ctx, batches.get(here.ctx, job_id).input_file_id)
        until(lambda job_id=job_id: here.ended(job_id), "it ends", explain=here.describe)  # type: ignore[misc]
        endings.add(here.finish(job_id).status)
    assert JobStatus.COMPLETED in endings
    assert endings <= {JobStatus.COMPLETED, JobStatus.FAILED}
