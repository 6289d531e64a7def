"""Files as SQL knows them. Their bytes lie on disk, under the same id."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from specbatch.database import Record, now, record, records
from specbatch.models import files

File = Record


def add(tx: sa.Connection, file_id: str, *, purpose: str, filename: str, size: int, expires_seconds: float | None = None) -> File:
    values = {"id": file_id, "purpose": purpose, "filename": filename, "bytes": size, "created_at": now()}
    if expires_seconds is not None:
        values["expires_at"] = now() + expires_seconds
    return tx.execute(sa.insert(files).values(values).returning(files)).one()._asdict()


def get(tx: sa.Connection, file_id: str) -> File | None:
    return record(tx.execute(sa.select(files).where(files.c.id == file_id, _alive())))


def page(tx: sa.Connection, *, purpose: str | None, after: File | None, limit: int, newest_first: bool) -> list[File]:
    key = sa.tuple_(files.c.created_at, files.c.id)
    order = (files.c.created_at.desc(), files.c.id.desc()) if newest_first else (files.c.created_at, files.c.id)
    query = sa.select(files).where(_alive()).order_by(*order).limit(limit)
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    if after is not None:
        behind = sa.tuple_(after["created_at"], after["id"])
        query = query.where(key < behind if newest_first else key > behind)
    return records(tx.execute(query))


def delete(tx: sa.Connection, file_id: str) -> bool:
    return tx.execute(sa.delete(files).where(files.c.id == file_id)).rowcount == 1


def expired(tx: sa.Connection, limit: int) -> list[str]:
    return list(tx.execute(sa.select(files.c.id).where(~_alive()).limit(limit)).scalars())


def known(tx: sa.Connection, file_ids: Sequence[str]) -> set[str]:
    """Those of some ids that SQL knows, expired or not."""
    return set(tx.execute(sa.select(files.c.id).where(files.c.id.in_(file_ids))).scalars())


def _alive() -> sa.ColumnElement[bool]:
    return sa.or_(files.c.expires_at.is_(None), files.c.expires_at > now())
