"""The workers that are alive: what they serve, and in which modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from specbatch.database import Database, Record, now, records, unlocked
from specbatch.domain import Mode
from specbatch.models import workers

Worker = Record


def seen(
    database: Database,
    tx: sa.Connection,
    worker_id: str,
    *,
    model: str,
    names: Sequence[str],
    modes: Sequence[Mode],
    withheld: Mapping[Mode, str],
    mode: Mode | None,
    endpoints: Sequence[str] | None,
) -> None:
    """A sign of life; the first one registers the worker. Endpoints that are not known now stay as they were."""
    facts = {"model": model, "names": list(names), "modes": list(modes), "withheld": dict(withheld), "mode": mode}
    if endpoints is not None:
        facts["endpoints"] = list(endpoints)
    statement = database.insert(workers).values(id=worker_id, started_at=now(), seen_at=now(), **facts)
    tx.execute(statement.on_conflict_do_update(index_elements=[workers.c.id], set_={**facts, "seen_at": now()}))


def alive(tx: sa.Connection, within_seconds: float) -> list[Worker]:
    return records(tx.execute(sa.select(workers).where(workers.c.seen_at > now() - within_seconds).order_by(workers.c.started_at)))


def forget(tx: sa.Connection, after_seconds: float) -> None:
    silent = unlocked(tx, sa.select(workers.c.id).where(workers.c.seen_at < now() - after_seconds))
    tx.execute(sa.delete(workers).where(workers.c.id.in_(silent)))
