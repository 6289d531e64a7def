"""A whole installation: any number of workers, reconcilers and APIs, over real services, with the scripted engine and its journal."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from specbatch.context import Context, opened
from specbatch.domain import TERMINAL, Mode, ShardStatus
from specbatch.models import jobs, results, shards
from specbatch.service import batches, files
from specbatch.settings import Settings
from tests.faults.audit import Tally, audit
from tests.faults.processes import Process, Seam
from tests.faults.waiting import until
from worker.engine.faults import JOURNAL_VARIABLE

CHAT = "/v1/chat/completions"


def request(number: int, delay_ms: float = 30.0, fault: str | None = None) -> dict[str, Any]:
    """One line. `fault`: what its row does to the engine (worker/engine/faults.py)."""
    asked = {"x-delay-ms": str(delay_ms)} | ({"x-fault": fault} if fault else {})
    body = {"model": "default", "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 8, "metadata": asked}
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}


def requests(count: int, delay_ms: float = 30.0, faults: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    return [request(number, delay_ms, (faults or {}).get(number)) for number in range(count)]


class Installation:
    def __init__(self, ctx: Context, place: Path) -> None:
        """`place` keeps the logs and the journal."""
        self.ctx = ctx
        self.settings = ctx.settings
        self.processes: list[Process] = []
        self.journal = place / "journal"
        self._logs = place / "process-logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._started: Counter[str] = Counter()

    def worker(self, *seams: Seam, name: str = "worker", **environment: str) -> Process:
        """A worker that is ready to consume. Each has a name of its own, with which its claims' owner begins."""
        worker = self.start(name, "worker.__main__", *seams, **environment)
        worker.says("worker.steps: ready")
        return worker

    def reconciler(self, *seams: Seam) -> Process:
        return self.start("reconciler", "worker.reconciler", *seams)

    def start(self, name: str, module: str, *seams: Seam, **environment: str) -> Process:
        self._started[name] += 1
        full_name = f"{name}{self._started[name]}"
        given = self.settings.environment() | {JOURNAL_VARIABLE: str(self.journal)} | environment
        process = Process(full_name, module, given, self._logs / f"{full_name}.log", seams)
        self.processes.append(process)
        return process

    def submit(self, lines: Sequence[Mapping[str, Any]]) -> str:
        """Upload and submit, in this process; the batch's id."""
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        uploaded = files.upload(self.ctx, "in.jsonl", "batch", [data])
        return batches.submit(self.ctx, batches.NewBatch(input_file_id=uploaded.id, endpoint=CHAT, mode=Mode.PLAIN)).id

    def ended(self, job_id: str) -> bool:
        return batches.get(self.ctx, job_id).status in TERMINAL

    def settled(self, job_id: str) -> int:
        with self.ctx.database.read() as tx:
            return int(tx.execute(sa.select(jobs.c.settled).where(jobs.c.id == job_id)).scalar_one())

    def until_settled(self, job_id: str, count: int) -> None:
        until(lambda: self.settled(job_id) >= count, f"{count} rows are settled", explain=self.describe)

    def finish(self, job_id: str, seconds: float = 60.0) -> Tally:
        """Wait for the end of a batch, and audit it."""
        until(lambda: self.ended(job_id), "the batch ends", seconds, explain=self.describe)
        return audit(self.ctx, job_id)

    def held_by(self, process: Process) -> dict[tuple[str, int], int]:
        """(job, shard) -> attempt of every shard in the hands of a process."""
        query = sa.select(shards.c.job_id, shards.c.shard_no, shards.c.attempt).where(
            shards.c.status == ShardStatus.RUNNING, shards.c.owner.startswith(f"{process.name}-")
        )
        with self.ctx.database.read() as tx:
            return {(row.job_id, row.shard_no): row.attempt for row in tx.execute(query)}

    def passed_on(self, held: Mapping[tuple[str, int], int]) -> bool:
        """Whether each of these shards, as held_by gave them, has been claimed anew, or ended."""
        query = sa.select(shards.c.job_id, shards.c.shard_no, shards.c.attempt, shards.c.status).where(
            sa.tuple_(shards.c.job_id, shards.c.shard_no).in_(list(held))
        )
        with self.ctx.database.read() as tx:
            now = {(row.job_id, row.shard_no): row for row in tx.execute(query)}
        return all(now[key].attempt > attempt or now[key].status == ShardStatus.DONE for key, attempt in held.items())

    def freeze(self, process: Process) -> None:
        """SIGSTOP, but not in the middle of a transaction: on SQLite nobody could write until it wakes."""

        def frozen_outside() -> bool:
            process.freeze()
            if not self.settings.sql_url.startswith("sqlite"):
                return True
            with closing(sqlite3.connect(self.settings.sql_url.removeprefix("sqlite:///"), timeout=0.5)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    connection.rollback()
                except sqlite3.OperationalError:
                    process.send(signal.SIGCONT)
                    return False
            return True

        until(frozen_outside, f"{process.name} is frozen")

    def until_holds(self, process: Process) -> dict[tuple[str, int], int]:
        until(lambda: bool(self.held_by(process)), f"{process.name} holds a shard", explain=self.describe)
        return self.held_by(process)

    def written_by(self, attempt_above: int, job_id: str) -> int:
        with self.ctx.database.read() as tx:
            query = sa.select(sa.func.count()).where(results.c.job_id == job_id, results.c.attempt > attempt_above)
            return int(tx.execute(query).scalar_one())

    def answers(self) -> Counter[str]:
        """How often the engines answered each row, as job-row."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return Counter(line.split()[-1].rpartition("-")[0] for line in lines if " answered " in line)

    def answered_twice(self) -> float:
        """The share of answers that were not the first of their row."""
        counts = self.answers()
        return 1 - len(counts) / max(1, counts.total())

    def logged(self, words: str) -> int:
        """How often any process said this."""
        return sum(process.text().count(words) for process in self.processes)

    def describe(self) -> str:
        """The state of things, for the message of a test that waited in vain."""
        with self.ctx.database.read() as tx:
            batch = [
                dict(row._mapping) for row in tx.execute(sa.select(jobs.c.id, jobs.c.status, jobs.c.stop, jobs.c.rows, jobs.c.settled))
            ]
            open_ones = [dict(row._mapping) for row in tx.execute(sa.select(shards).where(shards.c.status != ShardStatus.DONE))]
        tails = "\n".join(f"--- {process.name} ({process.exit_code})\n{process.text()[-1200:]}" for process in self.processes[-5:])
        return f"{batch}\n{open_ones}\n{tails}"

    def close(self) -> None:
        for process in self.processes:
            process.send(signal.SIGKILL)
        for process in self.processes:
            process.wait(10)


@contextmanager
def installed(settings: Settings, place: Path) -> Iterator[Installation]:
    with opened(settings, settings.redis_url) as ctx:
        installation = Installation(ctx, place)
        try:
            yield installation
        finally:
            installation.close()
