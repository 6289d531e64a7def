"""Which configured modes can be served at all, told from the files of target and draft before an engine is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbatch import compat
from specbatch.domain import Mode
from specbatch.errors import SpecbatchError
from specbatch.serving import resolve_model
from specbatch.settings import BUILTIN_MODEL, Settings
from worker import builtin


def report(settings: Settings, mode: Mode) -> compat.Report | None:
    """Target against the draft or head of a mode. None for a mode without one, and where a model is not on this machine yet.

    Raises UsageError for a folder that is no model.
    """
    second = settings.draft if mode is Mode.DRAFT_MODEL else settings.eagle if mode in (Mode.EAGLE, Mode.EAGLE3) else None
    model = resolve_model(settings)
    target = str(builtin.folder(settings.cache_dir)) if model == BUILTIN_MODEL else model
    if second is None or not (_here(target) and _here(second)):
        return None
    return compat.check(
        target,
        second,
        mode=mode,
        tensor_parallel=settings.tensor_parallel_size,
        draft_tensor_parallel=settings.draft_tensor_parallel_size or settings.tensor_parallel_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs or 256,
        dtype=settings.dtype,
        quantization=settings.quantization,
        draft_quantization=settings.draft_quantization,
    )


def unfit(settings: Settings, modes: Sequence[Mode]) -> dict[Mode, str]:
    """Mode -> why it is withheld, naming both values of each failing point."""
    if settings.engine == "scripted":
        return {}
    reasons: dict[Mode, str] = {}
    for mode in modes:
        try:
            found = report(settings, mode)
        except SpecbatchError as wrong:
            reasons[mode] = wrong.message
        else:
            if found is not None and not found.compatible:
                reasons[mode] = "; ".join(failure.message for failure in found.failures)
    return reasons


def _here(model: str) -> bool:
    """Whether the files can be read now: what is an id is fetched by the engine when it starts."""
    return Path(model).expanduser().exists() or compat.cached(model)
