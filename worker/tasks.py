"""The one task: a message names a shard, and the runner does what SQL says is left of it."""

from __future__ import annotations

from celery import Celery
from celery.exceptions import Reject
from celery.worker import state
from celery.worker.request import Request
from kombu.asynchronous import get_event_loop
from tenacity import Retrying, retry_if_exception_type, wait_random_exponential

from specbatch.queue import RUN_SHARD
from worker.runner import Runner


class ShardRequest(Request):
    """Acknowledges however long Redis is down. Celery tries once and forgets: the message then fills a place in the consumer's window
    for ever, and a worker whose shards all end while Redis is down never asks for another."""

    acknowledged: bool

    def acknowledge(self) -> None:
        if not self.acknowledged:
            patiently = Retrying(
                retry=retry_if_exception_type(self._connection_errors),
                wait=wait_random_exponential(multiplier=0.2, max=2),
                stop=lambda _: state.should_stop is not None or state.should_terminate is not None,
                retry_error_callback=lambda _: None,
            )
            patiently(self.message.ack)
            self.acknowledged = True
            # The consumer, which sleeps up to a second when its window is full, asks for the next message at once.
            get_event_loop().call_soon(lambda: None)


def register(app: Celery, runner: Runner) -> None:
    @app.task(name=RUN_SHARD, ignore_result=True, Request=ShardRequest)
    def run_shard(job_id: str, shard_no: int) -> None:
        if not runner.run(job_id, shard_no):
            raise Reject("this worker stops", requeue=True)
