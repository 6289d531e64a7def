"""What can be had: the models that requests may name, and the modes that workers offer for them."""

from __future__ import annotations

import sqlalchemy as sa

from specbatch.context import Context
from specbatch.domain import Mode
from specbatch.policy import Offer
from specbatch.serving import offered_modes, resolve_model, served_names
from specbatch.store import workers

ALIVE_SECONDS = 20.0  # a worker gives a sign every 5 s
RESTART_SECONDS = 120.0  # longer than a worker takes to start anew
REMEMBER_SECONDS = 86_400.0


def models(ctx: Context, tx: sa.Connection) -> dict[str, str]:
    """Every name a request may use -> the model behind it: this machine's own, and that of each worker seen within a day."""
    names = dict.fromkeys(served_names(ctx.settings), resolve_model(ctx.settings))
    for worker in workers.alive(tx, REMEMBER_SECONDS):
        names |= dict.fromkeys(worker["names"], worker["model"])
    return names


def offer(ctx: Context, tx: sa.Connection, model: str) -> Offer:
    """What the workers of a model offer now; while none is there, what the last ones offered, or this machine's own settings."""
    own = resolve_model(ctx.settings) == model
    for seconds in (ALIVE_SECONDS, RESTART_SECONDS) if own else (ALIVE_SECONDS, RESTART_SECONDS, REMEMBER_SECONDS):
        if serving := [worker for worker in workers.alive(tx, seconds) if worker["model"] == model]:
            modes = frozenset(Mode(mode) for worker in serving for mode in worker["modes"])
            reasons = {Mode(mode): why for worker in serving for mode, why in worker["withheld"].items()}
            return Offer(modes, {mode: why for mode, why in reasons.items() if mode not in modes})
    return Offer(frozenset(offered_modes(ctx.settings)) if own else frozenset())
