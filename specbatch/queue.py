"""The queue: messages that carry `(job_id, shard_no)` and nothing else. SQL is the truth, a message is a hint; losing one is harmless."""

from __future__ import annotations

import re
from collections.abc import Iterable

import redis
from celery import Celery
from kombu.exceptions import OperationalError
from kombu.utils.url import url_to_parts
from redis.backoff import NoBackoff
from redis.retry import Retry

from specbatch.domain import Mode
from specbatch.errors import ServiceUnavailable

RUN_SHARD = "specbatch.run_shard"
LOST_FIRST, IN_TURN = 0, 3  # Celery on Redis keeps a list for each priority, and empties that of the lowest number first


def queue_name(model: str, mode: Mode) -> str:
    """One queue for each (model, mode), because an engine serves one of each."""
    return f"specbatch.{re.sub(r'[^A-Za-z0-9._-]+', '-', model).strip('-')}.{mode}"


def lists(model: str, mode: Mode) -> tuple[str, str]:
    """The Redis lists behind a queue, by kombu's names: what was lost, and what waits its turn."""
    name = queue_name(model, mode)
    return name, f"{name}\x06\x16{IN_TURN}"


def celery_app(redis_url: str) -> Celery:
    """Celery as Redis needs it; each setting answers a fault that was measured (docs/adr/0003-queue.md)."""
    app = Celery("specbatch", broker=redis_url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": 3600,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "socket_timeout": 5,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 25,
        },
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5},
    )
    return app


class Queue:
    """The publishing side."""

    def __init__(self, redis_url: str) -> None:
        self._app = celery_app(redis_url)
        self._redis = _client(redis_url)

    def publish(self, shards: Iterable[tuple[str, int, str, Mode]], *, again: bool = False) -> None:
        """Send (job_id, shard_no, model, mode) to their queues. `again`: they were lost once, and go before all that wait.

        Raises ServiceUnavailable; what was not sent is sent by a later sweep.
        """
        priority = LOST_FIRST if again else IN_TURN
        try:
            with self._app.producer_pool.acquire(block=True, timeout=5) as producer:
                for job_id, shard_no, model, mode in shards:
                    self._app.send_task(
                        RUN_SHARD, args=(job_id, shard_no), queue=queue_name(model, mode), priority=priority, producer=producer
                    )
        except (OperationalError, redis.RedisError, OSError) as failure:
            raise ServiceUnavailable(
                f"Redis does not answer: {failure}; shards stay in the database and are sent again", code="redis_unavailable"
            ) from failure

    def depth(self, model: str, mode: Mode) -> int:
        """Messages that wait, without those that a worker holds."""
        try:
            return sum(int(self._redis.llen(name)) for name in lists(model, mode))
        except (redis.RedisError, OSError) as failure:
            raise ServiceUnavailable(f"Redis does not answer: {failure}", code="redis_unavailable") from failure

    def ping(self) -> None:
        try:
            self._redis.ping()
        except (redis.RedisError, OSError) as failure:
            raise ServiceUnavailable(f"Redis does not answer: {failure}", code="redis_unavailable") from failure

    def close(self) -> None:
        self._app.close()
        self._redis.close()


def _client(url: str) -> redis.Redis:
    once = Retry(NoBackoff(), 0)  # by default a server that hangs is asked four times
    if url.startswith("redis+socket://"):
        parts = url_to_parts(url)
        return redis.Redis(unix_socket_path=f"/{parts.path.lstrip('/')}", socket_timeout=5, socket_connect_timeout=5, retry=once)
    return redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5, retry=once)
