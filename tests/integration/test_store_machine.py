"""The store under every order of events that hypothesis can think of, on both databases: nothing is lost, nothing is written twice.

Claims are never forgotten here, so each stays in the hands of a zombie that may write at any time, however late.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specbatch.context import Context
from specbatch.database import Database
from specbatch.domain import TERMINAL, Measurement, Mode, Outcome, RowResult, ShardStatus
from specbatch.errors import Conflict, ServiceUnavailable
from specbatch.lines import compact
from specbatch.models import jobs, metadata, shards
from specbatch.queue import Queue
from specbatch.service import batches, files, finalize, ingest, upkeep
from specbatch.service import shards as service
from specbatch.service.shards import Standing, Taken
from specbatch.settings import Settings
from tests.faults.audit import audit

MODEL = "builtin:smollm2-135m"
SHARD_ROWS = 5


class Hints(Queue):
    """A queue that delivers nothing, and is down when a test says so: messages are only hints."""

    def __init__(self) -> None:
        self.down = False
        self.sent: list[tuple[str, int]] = []

    def publish(self, shards: Iterable[tuple[str, int, str, Mode]], *, again: bool = False) -> None:
        for job_id, shard_no, *_ in shards:
            if self.down:
                raise ServiceUnavailable("down", code="redis_unavailable")
            self.sent.append((job_id, shard_no))

    def depth(self, model: str, mode: Mode) -> int:
        return 0


def open_store(url: str, home: Path) -> Context:
    database = Database(url)
    with database.write() as tx:
        for table in reversed(metadata.sorted_tables):
            tx.execute(sa.delete(table))
    wanted = Settings(data_dir=home, database_url=url, engine="scripted", shard_rows=SHARD_ROWS, max_attempts=3, lease_seconds=600)
    return Context(wanted, database, Hints())


def submitted(ctx: Context, count: int) -> str:
    line = '{"custom_id": "r%d", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "default", "messages": [%d]}}\n'
    uploaded = files.upload(ctx, "in.jsonl", "batch", [(line % (number, number)).encode() for number in range(count)])
    new = batches.NewBatch(input_file_id=uploaded.id, endpoint="/v1/chat/completions", mode=Mode.PLAIN)
    return batches.submit(ctx, new).id


def taken_now(ctx: Context, job_id: str, shard_no: int, owner: str = "somebody") -> Taken | None:
    return service.claim(ctx, job_id, shard_no, model=MODEL, mode=Mode.PLAIN, owner=owner)


def ended(index: int, outcome: Outcome = Outcome.SUCCEEDED) -> RowResult:
    cost = Measurement(prompt_tokens=3, generated_tokens=2) if outcome is Outcome.SUCCEEDED else None
    return RowResult(index, outcome, 200 if cost else 500, compact({"answer": index}), None, cost)


def lapse(ctx: Context, job_id: str, shard_no: int) -> None:
    """As if the lease had run out."""
    with ctx.database.write() as tx:
        tx.execute(sa.update(shards).where(shards.c.job_id == job_id, shards.c.shard_no == shard_no).values(lease_until=0.0))


def hurry(ctx: Context, job_id: str, shard_no: int) -> None:
    """As if its delays were over."""
    with ctx.database.write() as tx:
        this = (shards.c.job_id == job_id, shards.c.shard_no == shard_no)
        tx.execute(sa.update(shards).where(*this).values(not_before=0.0, published_at=0.0))


class Store(RuleBasedStateMachine):
    batch_ids = Bundle("batches")
    claims = Bundle("claims")

    def __init__(self, url: str, home: Path) -> None:
        super().__init__()
        self.ctx = open_store(url, home)
        self.hints = self.ctx.queue
        self.jobs: list[str] = []

    def teardown(self) -> None:
        """Whatever state this was left in, ordinary workers and reconcilers end every batch."""
        assert isinstance(self.hints, Hints)
        self.hints.down = False
        try:
            settle_everything(self.ctx, self.jobs)
            for job_id in self.jobs:
                audit(self.ctx, job_id)
        finally:
            self.ctx.database.close()

    @initialize(target=batch_ids, count=strategies.integers(1, 14))
    def first_batch(self, count: int) -> str:
        return self.another(count)

    @precondition(lambda self: len(self.jobs) < 3)
    @rule(target=batch_ids, count=strategies.integers(1, 14))
    def submit(self, count: int) -> str:
        return self.another(count)

    def another(self, count: int) -> str:
        job_id = submitted(self.ctx, count)
        self.jobs.append(job_id)
        return job_id

    @rule()
    def validate(self) -> None:
        ingest.ingest_next(self.ctx, "reconciler")

    @rule(target=claims, job_id=batch_ids, data=strategies.data())
    def claim(self, job_id: str, data: strategies.DataObject) -> object:
        shard_no = data.draw(strategies.integers(0, 5))
        hurry(self.ctx, job_id, shard_no)
        taken = taken_now(self.ctx, job_id, shard_no)
        return multiple() if taken is None else taken

    @rule(taken=claims, data=strategies.data())
    def settle(self, taken: Taken, data: strategies.DataObject) -> None:
        """Any holder, however stale, writes any of the rows it was given, however often: as after a commit whose answer was lost."""
        owed = list(taken.owed)
        some = data.draw(strategies.lists(strategies.sampled_from(owed), unique=True)) if owed else []
        outcome = data.draw(strategies.sampled_from([Outcome.SUCCEEDED, Outcome.FAILED]))
        service.settle(self.ctx, taken.claim, [ended(index, outcome) for index in some])

    @rule(taken=claims)
    def renew_or_close(self, taken: Taken) -> None:
        standing = service.renew(self.ctx, taken.claim)
        if standing in (Standing.CANCELLED, Standing.EXPIRED):
            service.close(self.ctx, taken.claim, Outcome.CANCELLED if standing is Standing.CANCELLED else Outcome.EXPIRED)

    @rule(taken=claims, lost=strategies.booleans())
    def hand_back(self, taken: Taken, lost: bool) -> None:
        service.hand_back(self.ctx, taken.claim, lost=lost)

    @rule(taken=claims)
    def fall_silent(self, taken: Taken) -> None:
        lapse(self.ctx, taken.claim.job_id, taken.claim.shard_no)

    @rule(redis_down=strategies.booleans())
    def sweep(self, redis_down: bool) -> None:
        assert isinstance(self.hints, Hints)
        self.hints.down = redis_down
        try:
            upkeep.sweep(self.ctx)
        except ServiceUnavailable:
            assert redis_down

    @rule(job_id=batch_ids)
    def cancel(self, job_id: str) -> None:
        try:
            batches.cancel(self.ctx, job_id)
        except Conflict:
            assert batches.get(self.ctx, job_id).status in TERMINAL

    @rule(job_id=batch_ids)
    def pass_the_window(self, job_id: str) -> None:
        with self.ctx.database.write() as tx:
            tx.execute(sa.update(jobs).where(jobs.c.id == job_id).values(expires_at=0.0))

    @rule()
    def finalize(self) -> None:
        finalize.finalize_next(self.ctx, "reconciler")

    @invariant()
    def every_promise_holds(self) -> None:
        for job_id in self.jobs:
            audit(self.ctx, job_id, ended=batches.get(self.ctx, job_id).status in TERMINAL)


def settle_everything(ctx: Context, job_ids: list[str]) -> None:
    """Bounded rounds of what honest processes do. A batch that needs more is stuck."""
    for _ in range(30):
        while ingest.ingest_next(ctx, "reconciler"):
            pass
        with ctx.database.read() as tx:
            running = list(tx.execute(sa.select(shards.c.job_id, shards.c.shard_no).where(shards.c.status == ShardStatus.RUNNING)))
            queued = list(tx.execute(sa.select(shards.c.job_id, shards.c.shard_no).where(shards.c.status == ShardStatus.QUEUED)))
        for job_id, shard_no in running:
            lapse(ctx, job_id, shard_no)
        for job_id, shard_no in queued:
            hurry(ctx, job_id, shard_no)
            if (taken := taken_now(ctx, job_id, shard_no)) is not None:
                service.settle(ctx, taken.claim, [ended(index) for index in taken.owed])
        upkeep.sweep(ctx)
        while finalize.finalize_next(ctx, "reconciler"):
            pass
        if all(batches.get(ctx, job_id).status in TERMINAL for job_id in job_ids):
            return
    raise AssertionError(f"stuck: {[batches.get(ctx, job_id) for job_id in job_ids]}")


@pytest.fixture
def ctx(database_url: str, tmp_path: Path) -> Iterator[Context]:
    """Closed even when its test fails: connections that are left to the garbage collector fail some later test too."""
    store = open_store(database_url, tmp_path)
    yield store
    store.database.close()


def test_any_order_of_events(database_url: str, tmp_path: Path) -> None:
    examples = 30 if database_url.startswith("sqlite") else 15
    calm = settings(max_examples=examples, stateful_step_count=30, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))

    class Here(Store):
        def __init__(self) -> None:
            super().__init__(database_url, tmp_path)

    run_state_machine_as_test(Here, settings=calm)


@pytest.mark.parametrize("seed", [1, 2])
def test_many_at_once(ctx: Context, seed: int) -> None:
    """Eight workers that crash, stall and write late, two reconcilers, every message twice: the transactions really meet."""
    job_id = submitted(ctx, 240)
    ingest.ingest_next(ctx, "reconciler")
    with ThreadPoolExecutor(10) as pool:
        workers = [pool.submit(_unreliable, ctx, job_id, random.Random(seed * 100 + number)) for number in range(8)]
        sweepers = [pool.submit(_sweep_until, ctx, job_id) for _ in range(2)]
        fenced = sum(worker.result() for worker in workers)
        for sweeper in sweepers:
            sweeper.result()
    settle_everything(ctx, [job_id])
    tally = audit(ctx, job_id)
    assert tally.rows == 240
    assert fenced > 0, "no zombie wrote: the test has lost its teeth"


def _unreliable(ctx: Context, job_id: str, dice: random.Random) -> int:
    """Answers how many of its writes were fenced off."""
    fenced = 0
    for _ in range(60):
        shard_no = dice.randrange(60)
        hurry(ctx, job_id, shard_no)
        taken = taken_now(ctx, job_id, shard_no, f"worker-{id(dice)}")
        if taken is None:
            continue
        rest = list(taken.owed)
        fate = dice.random()
        if fate < 0.25:  # a crash
            lapse(ctx, job_id, taken.claim.shard_no)
            continue
        if fate < 0.5:  # a stall: others go on with the shard, then it wakes and writes
            lapse(ctx, job_id, taken.claim.shard_no)
            upkeep.sweep(ctx)
            taken_now(ctx, job_id, taken.claim.shard_no, "heir")
            lapse(ctx, job_id, taken.claim.shard_no)
        while rest:
            some, rest = rest[:2], rest[2:]
            if service.settle(ctx, taken.claim, [ended(index) for index in some]) is Standing.FENCED:
                fenced += 1
                break
    return fenced


def _sweep_until(ctx: Context, job_id: str) -> None:
    for _ in range(40):
        upkeep.sweep(ctx)
        finalize.finalize_next(ctx, "reconciler")
