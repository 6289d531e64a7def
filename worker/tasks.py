"""The one task: a message names a shard, and the runner does what SQL says is left of it."""

from __future__ import annotations

from celery import Celery
from celery.exceptions import Reject

from specbatch.queue import RUN_SHARD
from worker.runner import Runner


def register(app: Celery, runner: Runner) -> None:
    @app.task(name=RUN_SHARD, ignore_result=True)
    def run_shard(job_id: str, shard_no: int) -> None:
        if not runner.run(job_id, shard_no):
            raise Reject("this worker stops", requeue=True)
