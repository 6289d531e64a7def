"""Announcements of ended batches: written with the ending itself, delivered afterwards, at least once."""

from __future__ import annotations

import sqlalchemy as sa

from specbatch.database import Record, now, record, unlocked
from specbatch.models import webhooks


def add(tx: sa.Connection, event_id: str, *, job_id: str, kind: str, url: str) -> None:
    tx.execute(sa.insert(webhooks).values(id=event_id, job_id=job_id, type=kind, url=url, created_at=now(), due_at=now()))


def is_due(tx: sa.Connection) -> bool:
    return bool(tx.execute(sa.select(sa.exists().where(webhooks.c.due_at <= now()))).scalar_one())


def take(tx: sa.Connection, seconds: float) -> Record | None:
    """The announcement that is due longest, put off for so long: whoever delivers it says sooner how that went."""
    due = unlocked(tx, sa.select(webhooks.c.id).where(webhooks.c.due_at <= now()).order_by(webhooks.c.due_at).limit(1))
    statement = sa.update(webhooks).where(webhooks.c.id.in_(due)).values(attempts=webhooks.c.attempts + 1, due_at=now() + seconds)
    return record(tx.execute(statement.returning(webhooks)))


def delivered(tx: sa.Connection, event_id: str) -> None:
    tx.execute(sa.update(webhooks).where(webhooks.c.id == event_id).values(delivered_at=now(), due_at=None, failure=None))


def failed(tx: sa.Connection, event_id: str, failure: str, delay: float, patience: float) -> bool:
    """Try again after `delay` seconds, unless the event is older than `patience` seconds: then False, it is given up."""
    again = sa.case((webhooks.c.created_at + patience > now(), now() + delay), else_=None)
    statement = sa.update(webhooks).where(webhooks.c.id == event_id).values(failure=failure, due_at=again).returning(webhooks.c.due_at)
    return tx.execute(statement).scalar_one_or_none() is not None
