"""What `tune` measured, by model, draft, device and release of vLLM."""

from __future__ import annotations

from dataclasses import asdict

import sqlalchemy as sa

from specbatch.database import Database, Record, now, records
from specbatch.machine import Machine
from specbatch.models import speeds
from specbatch.tuning import Speed


def put(database: Database, tx: sa.Connection, model: str, draft: str, machine: Machine, speed: Speed) -> None:
    """Keep a point; the same point measured again replaces the older one."""
    values = {name: value for name, value in asdict(speed).items() if name in speeds.c}
    values |= {"model": model, "draft": draft, "device": machine.device, "vllm": machine.vllm, "measured_at": now()}
    key = [column.name for column in speeds.primary_key]
    statement = database.insert(speeds).values(values)
    tx.execute(statement.on_conflict_do_update(index_elements=key, set_={name: values[name] for name in values if name not in key}))


def of_model(tx: sa.Connection, model: str) -> list[Record]:
    """Every point of a model, the latest first."""
    return records(tx.execute(sa.select(speeds).where(speeds.c.model == model).order_by(speeds.c.measured_at.desc())))
