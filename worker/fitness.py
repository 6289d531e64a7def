"""Which configured modes can be served at all, told from packages and the files of both models before an engine starts."""

from __future__ import annotations

from collections.abc import Sequence

from specbatch import compat, gpus, pairing
from specbatch.domain import Mode
from specbatch.errors import SpecbatchError
from specbatch.serving import resolve_model, suffix_missing
from specbatch.settings import BUILTIN_MODEL, Settings
from worker import builtin


def report(settings: Settings, mode: Mode) -> compat.Report | None:
    """Target against the draft or head of a mode. None for a mode without one, and where the files of one cannot be had: vLLM will say.

    Raises UsageError for a folder that is no model.
    """
    second = pairing.second_model(settings, mode)
    if second is None:
        return None
    model = resolve_model(settings)
    target = str(builtin.folder(settings.cache_dir)) if model == BUILTIN_MODEL else model
    if not (pairing.readable(target) and pairing.readable(second)):
        return None
    return pairing.check(settings, target, second, mode, device_memory_bytes=gpus.memory_bytes())


def unfit(settings: Settings, modes: Sequence[Mode]) -> dict[Mode, str]:
    """Mode -> why it is withheld, naming both values of each failing point."""
    if settings.engine == "scripted":
        return {}
    reasons: dict[Mode, str] = {}
    for mode in modes:
        if mode is Mode.SUFFIX and (missing := suffix_missing()) is not None:
            reasons[mode] = missing
            continue
        try:
            found = report(settings, mode)
        except SpecbatchError as wrong:
            reasons[mode] = wrong.message
        else:
            if found is not None and not found.compatible:
                reasons[mode] = found.refusal
    return reasons
