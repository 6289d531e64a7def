"""The faults of the chaos run: what each breaks, who mends it and when, and how the recovery is timed."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import sqlalchemy as sa

from specbatch.domain import TERMINAL
from specbatch.errors import Conflict, ServiceUnavailable
from specbatch.models import jobs, shards
from specbatch.service import batches
from tests.faults.installation import CHAT, Installation
from tests.faults.processes import Process
from tests.faults.services import Postgres, Valkey

RESTART_SECONDS = (1.0, 4.0)


class Scene:
    """The installation while it is being broken. All mending is due at a time, and done by `look`."""

    def __init__(self, here: Installation, valkey: Valkey, postgres: Postgres | None, dice: random.Random, workers: int) -> None:
        self.here, self.valkey, self.postgres, self.dice = here, valkey, postgres, dice
        self.reconcilers = [here.reconciler() for _ in range(2)]
        self.workers = [here.start("worker", "worker.__main__", *self._clock(number)) for number in range(workers)]
        self.api = here.start("api", "api.__main__")
        self._http = httpx.Client(base_url=f"http://{here.settings.host}:{here.settings.port}", timeout=10)
        for worker in self.workers:
            worker.says("worker.steps: ready")
        self.batches: dict[str, int] = {}  # id -> rows that kill every engine
        self.over: set[str] = set()
        self.injected: Counter[str] = Counter()
        self.recoveries: list[tuple[str, float]] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._watched: list[tuple[str, float, Callable[[], bool]]] = []
        self.awaited: set[int] = set()  # workers that are down and whose return is due
        self.valkey_down = self.postgres_down = False

    def _clock(self, number: int) -> Sequence[tuple[str, str]]:
        return (("skew_clock", "300"),) if number == 0 else ()

    def inject(self, name: str) -> None:
        with suppress(ServiceUnavailable):
            if FAULTS[name][1](self):
                self.injected[name] += 1

    def later(self, seconds: float, mend: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, mend))

    def watch(self, name: str, recovered: Callable[[], bool]) -> None:
        """Time from now until this is so."""
        self._watched.append((name, time.monotonic(), recovered))

    def look(self) -> None:
        """Mend what is due, note what has recovered."""
        now = time.monotonic()
        due = [mend for at, mend in self._due if at <= now]
        self._due = [(at, mend) for at, mend in self._due if at > now]
        for mend in due:
            mend()
        for number, worker in enumerate(self.workers):
            if not self.up(worker) and number not in self.awaited:  # one of its rows ended it
                self.awaited.add(number)
                self.later(self.dice.uniform(*RESTART_SECONDS), partial(self.revive_worker, number))
        if not self.postgres_down:
            still = []
            for name, since, recovered in self._watched:
                if recovered():
                    self.recoveries.append((name, now - since))
                else:
                    still.append((name, since, recovered))
            self._watched = still

    def calm(self) -> None:
        """Mend everything now."""
        while self._due:
            self._due = [(0.0, mend) for _, mend in self._due]
            self.look()

    def close(self) -> None:
        self._http.close()

    def open_batches(self) -> int:
        self.over |= {job_id for job_id in self.batches if job_id not in self.over and self.here.ended(job_id)}
        return len(self.batches) - len(self.over)

    def all_over(self) -> bool:
        self.look()
        return self.open_batches() == 0

    def submit(self, lines: list[dict[str, Any]]) -> None:
        """Over HTTP; an API that is down is asked again at the next look."""
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        with suppress(httpx.HTTPError, ValueError):
            uploaded = self._http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).raise_for_status().json()
            new = {"input_file_id": uploaded["id"], "endpoint": CHAT, "completion_window": "24h", "mode": "plain"}
            made = self._http.post("/v1/batches", json=new).raise_for_status().json()
            self.batches[made["id"]] = sum(line["body"]["metadata"].get("x-fault") == "die" for line in lines)

    def up(self, process: Process) -> bool:
        return process.exit_code is None

    def revive_worker(self, number: int) -> None:
        self.awaited.discard(number)
        self.workers[number] = self.here.start("worker", "worker.__main__", *self._clock(number))

    def more_claims(self) -> Callable[[], bool]:
        """Whether any shard has been claimed since now."""
        before: int | None = None

        def count() -> int:
            with self.here.ctx.database.read() as tx:
                return int(tx.execute(sa.select(sa.func.coalesce(sa.func.sum(shards.c.attempt), 0))).scalar_one())

        with suppress(ServiceUnavailable):
            before = count()
        return lambda: before is None or count() > before

    def ask_http(self) -> bool:
        with suppress(httpx.HTTPError):
            return self._http.get("/healthz").status_code == 200
        return False


def kill_worker(scene: Scene) -> bool:
    victim = scene.dice.choice(scene.workers)
    if not scene.up(victim) or scene.postgres_down:
        return False
    victim.kill()
    held = scene.here.held_by(victim)
    if held:
        scene.watch("kill_worker", partial(scene.here.passed_on, held))
    return True


def stop_worker(scene: Scene) -> bool:
    """SIGTERM in the middle of its shards."""
    victim = scene.dice.choice(scene.workers)
    if not scene.up(victim):
        return False
    victim.send(signal.SIGTERM)
    return True


def freeze_worker(scene: Scene) -> bool:
    """SIGSTOP for longer than a lease: it wakes as a zombie, and writes."""
    victim = scene.dice.choice(scene.workers)
    if not scene.up(victim) or scene.postgres_down:
        return False
    held = scene.here.held_by(victim)
    if not held:
        return False
    victim.send(signal.SIGSTOP)
    scene.watch("freeze_worker", partial(scene.here.passed_on, held))
    scene.later(scene.here.settings.lease_seconds + scene.dice.uniform(3.0, 8.0), lambda: victim.send(signal.SIGCONT))
    return True


def kill_reconciler(scene: Scene) -> bool:
    number = scene.dice.randrange(len(scene.reconcilers))
    victim = scene.reconcilers[number]
    if not scene.up(victim):
        return False
    victim.kill()

    def revive() -> None:
        scene.reconcilers[number] = scene.here.reconciler()

    scene.later(scene.dice.uniform(*RESTART_SECONDS), revive)
    return True


def kill_api(scene: Scene) -> bool:
    if not scene.up(scene.api):
        return False
    scene.api.kill()

    def revive() -> None:
        scene.api = scene.here.start("api", "api.__main__")
        scene.watch("api_restarted", scene.ask_http)

    scene.later(scene.dice.uniform(*RESTART_SECONDS), revive)
    return True


def kill_valkey(scene: Scene) -> bool:
    return _restart_valkey(scene, forget=False)


def wipe_valkey(scene: Scene) -> bool:
    """It comes back without anything that it held."""
    return _restart_valkey(scene, forget=True)


def _restart_valkey(scene: Scene, *, forget: bool) -> bool:
    if scene.valkey_down:
        return False
    scene.valkey.kill()
    scene.valkey_down = True
    if forget:
        scene.valkey.forget()

    def revive() -> None:
        scene.valkey.start()
        scene.valkey_down = False
        scene.watch("valkey_forgot" if forget else "valkey_restarted", scene.more_claims())

    scene.later(scene.dice.uniform(*RESTART_SECONDS), revive)
    return True


def flush_valkey(scene: Scene) -> bool:
    return not scene.valkey_down and bool(scene.valkey.client.flushall())


def cut_connections(scene: Scene) -> bool:
    return not scene.valkey_down and scene.valkey.cut_connections() > 0


def repeat_messages(scene: Scene) -> bool:
    """Every waiting message twice, and in another order."""
    return not scene.valkey_down and _rearrange(scene, lambda messages: scene.dice.sample(messages * 2, 2 * len(messages)))


def lose_messages(scene: Scene) -> bool:
    """A third of the waiting messages."""
    return not scene.valkey_down and _rearrange(scene, lambda messages: [each for each in messages if scene.dice.random() > 1 / 3])


def _rearrange(scene: Scene, change: Callable[[list[Any]], list[Any]]) -> bool:
    changed = False
    for name in scene.valkey.queues():
        messages: list[Any] = scene.valkey.client.lrange(name, 0, -1)
        if messages and (new := change(messages)) != messages:
            with scene.valkey.client.pipeline() as together:
                together.delete(name)
                if new:
                    together.rpush(name, *new)
                together.execute()
            changed = True
    return changed


def kill_postgres(scene: Scene) -> bool:
    if scene.postgres is None or scene.postgres_down:
        return False
    scene.postgres.kill()
    scene.postgres_down = True

    def revive() -> None:
        assert scene.postgres is not None
        scene.postgres.start()
        scene.postgres_down = False
        scene.watch("postgres_restarted", scene.more_claims())

    # At once: this process asks the database too, and until then may do nothing else.
    time.sleep(scene.dice.uniform(*RESTART_SECONDS))
    revive()
    return True


def cut_postgres(scene: Scene) -> bool:
    """Every connection ends, whatever it is doing."""
    if scene.postgres is None or scene.postgres_down:
        return False
    with suppress(ServiceUnavailable), scene.here.ctx.database.write() as tx:
        tx.execute(
            sa.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()")
        )
    return True


def cancel_batch(scene: Scene) -> bool:
    job_id = _some_batch(scene)
    if job_id is None:
        return False
    try:
        batches.cancel(scene.here.ctx, job_id)
    except Conflict:
        return False
    return True


def expire_batch(scene: Scene) -> bool:
    job_id = _some_batch(scene)
    if job_id is None:
        return False
    with scene.here.ctx.database.write() as tx:
        tx.execute(sa.update(jobs).where(jobs.c.id == job_id).values(expires_at=0.0))
    return True


def _some_batch(scene: Scene) -> str | None:
    alive = [job_id for job_id in scene.batches if batches.get(scene.here.ctx, job_id).status not in TERMINAL]
    return scene.dice.choice(alive) if alive else None


FAULTS: dict[str, tuple[int, Callable[[Scene], bool]]] = {  # how often, relative to the others
    "kill_worker": (4, kill_worker),
    "stop_worker": (2, stop_worker),
    "freeze_worker": (2, freeze_worker),
    "kill_reconciler": (2, kill_reconciler),
    "kill_api": (1, kill_api),
    "kill_valkey": (1, kill_valkey),
    "wipe_valkey": (1, wipe_valkey),
    "flush_valkey": (1, flush_valkey),
    "cut_connections": (2, cut_connections),
    "repeat_messages": (2, repeat_messages),
    "lose_messages": (2, lose_messages),
    "kill_postgres": (1, kill_postgres),
    "cut_postgres": (2, cut_postgres),
    "cancel_batch": (1, cancel_batch),
    "expire_batch": (1, expire_batch),
}
