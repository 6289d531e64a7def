"""Second thoughts: queued shards leave a mode that nobody offers any more, or that turned out not to pay, while their batch runs."""

from __future__ import annotations

from collections import Counter

from specbatch import policy
from specbatch.context import Context
from specbatch.domain import Mode, TaskType
from specbatch.service import offers, tuning
from specbatch.serving import slots
from specbatch.settings import Settings
from specbatch.store import history, shards

AT_ONCE = 100  # shards in a transaction: their rows are written too, and workers wait for SQLite's one writer


def reconsider(ctx: Context) -> int:
    """Decide again for every kind of queued shard. Answers how many shards were sent to another mode."""
    with ctx.database.read() as tx:
        kinds = shards.kinds(tx)
    together: Counter[tuple[str, Mode]] = Counter()  # rows that one engine will decode, whatever their task
    for model, mode, _, _, rows in kinds:
        together[model, mode] += rows
    return sum(_reconsider(ctx, model, mode, task, named, together[model, mode]) for model, mode, task, named, _ in kinds)


def _reconsider(ctx: Context, model: str, mode: Mode, task: TaskType, named: bool, rows: int) -> int:
    with ctx.database.read() as tx:
        offer = offers.lately(tx, model)
        if not offer.available:
            return 0
        load = most_at_once(ctx.settings, rows)
        past = history.windows(tx, model, offer.available | {mode, Mode.PLAIN}, {task: load})
        table = tuning.table(tx, model)
    served = mode in offer.available
    demoted = policy.slowdown(mode, task, past) or policy.rejection(mode, task, past)
    if served and (named or not demoted):
        return 0
    decision = policy.decide(task, {}, load, offer, past, table)
    if decision.mode is mode:
        return 0
    why = decision.reason if served else f"{mode} is not served: {offer.withheld.get(mode, 'no worker offers it')}. {decision.reason}"
    leave = 1 if served else 0  # of what was only demoted, each batch leaves one shard behind, to see whether that still holds
    moved = 0
    while True:
        with ctx.database.write() as tx:
            some = shards.redirect(tx, model, mode, task, named=named, to=decision.mode, why=why, leave=leave, limit=AT_ONCE)
        moved += some
        if some < AT_ONCE:
            return moved


def most_at_once(settings: Settings, rows: int) -> int:
    return max(1, min(slots(settings), rows))
