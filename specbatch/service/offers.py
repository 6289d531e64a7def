"""What can be had: the models that requests may name, and the modes that workers offer for them."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from specbatch import pairing
from specbatch.context import Context
from specbatch.domain import Mode
from specbatch.policy import Offer
from specbatch.serving import names_of, offered_modes, resolve_model, served_names
from specbatch.store import workers

RESTART_SECONDS = 120.0  # a worker gives a sign every 5 s, from before its engine starts
REMEMBER_SECONDS = 86_400.0


def models(ctx: Context, tx: sa.Connection, named: str | None = None) -> dict[str, str]:
    """Every name a request may use -> the model behind it.

    Of several models that share a name (all share `default`), the one wins that this batch was submitted for (`named`), then the one
    that is configured here, one whose engine runs, this machine's default, and one that a worker has served within a day.
    """
    running = [worker for worker in workers.alive(tx, RESTART_SECONDS) if worker["mode"]]
    own = dict.fromkeys(served_names(ctx.settings), resolve_model(ctx.settings))
    names = _names(workers.alive(tx, REMEMBER_SECONDS)) | own | _names(running)
    if ctx.settings.model is not None:
        names |= own
    return names if named is None else names | dict.fromkeys(names_of(named), named)


def _names(serving: Iterable[workers.Worker]) -> dict[str, str]:
    return {name: worker["model"] for worker in serving for name in worker["names"]}


def endpoints(tx: sa.Connection) -> dict[str, frozenset[str]]:
    """The endpoints that each model answers, for those of which an engine has run within a day."""
    found: dict[str, frozenset[str]] = {}
    for worker in workers.alive(tx, REMEMBER_SECONDS):
        if worker["endpoints"]:
            found[worker["model"]] = found.get(worker["model"], frozenset()) | frozenset(worker["endpoints"])
    return found


def offer(ctx: Context, tx: sa.Connection, model: str) -> Offer:
    """What the workers of a model offer; while none is there, this machine's own settings, or what the last workers offered."""
    if (found := lately(tx, model)).modes:
        return found
    if resolve_model(ctx.settings) == model:
        modes = frozenset(offered_modes(ctx.settings))
        return Offer(modes, {} if ctx.settings.engine == "scripted" else pairing.misfits(ctx.settings, model, modes))
    return lately(tx, model, REMEMBER_SECONDS)


def lately(tx: sa.Connection, model: str, seconds: float = RESTART_SECONDS) -> Offer:
    """What the workers seen within some time offer; a mode that none of them offers comes with the reason, where one gave it."""
    serving = [worker for worker in workers.alive(tx, seconds) if worker["model"] == model]
    modes = frozenset(Mode(mode) for worker in serving for mode in worker["modes"])
    reasons = {Mode(mode): why for worker in serving for mode, why in worker["withheld"].items()}
    return Offer(modes, {mode: why for mode, why in reasons.items() if mode not in modes})
