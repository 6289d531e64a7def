"""A target and the model that drafts for it, as the settings name them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import httpx
from huggingface_hub.errors import HfHubHTTPError

from specbatch import compat, gpus
from specbatch.domain import Mode
from specbatch.errors import UsageError
from specbatch.serving import slots
from specbatch.settings import BUILTIN_FOLDER, BUILTIN_MODEL, Settings

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # configs and tokenizers: no weights


def second_model(settings: Settings, mode: Mode) -> str | None:
    """The draft or the head that a mode needs, as configured."""
    if mode is Mode.DRAFT_MODEL:
        return settings.draft
    return settings.eagle if mode in (Mode.EAGLE, Mode.EAGLE3) else None


def check(settings: Settings, target: str, draft: str, mode: Mode, *, device_memory_bytes: int | None = None) -> compat.Report:
    """`compat.check` of two folders or ids as an engine with these settings would load them. Raises UsageError."""
    return compat.check(
        target,
        draft,
        mode=mode,
        tensor_parallel=settings.tensor_parallel_size,
        draft_tensor_parallel=draft_tensor_parallel(settings),
        device_memory_bytes=device_memory_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_model_len=settings.max_model_len,
        max_num_seqs=slots(settings),
        dtype=settings.dtype,
        quantization=settings.quantization,
        draft_quantization=settings.draft_quantization,
    )


def misfits(settings: Settings, model: str, modes: Iterable[Mode]) -> dict[Mode, str]:
    """Mode -> what keeps its draft or head from this model, as far as the files on this machine tell: nothing is fetched."""
    target = _local(settings, model)
    found = {}
    for mode in modes:
        second = second_model(settings, mode)
        if second is not None and compat.cached(target) and compat.cached(second):
            try:
                refusal = check(settings, target, second, mode, device_memory_bytes=gpus.memory_bytes()).refusal
            except UsageError as wrong:
                refusal = wrong.message
            if refusal:
                found[mode] = refusal
    return found


def demand(settings: Settings, model: str, mode: Mode) -> compat.Demand | None:
    """What a mode takes of each device. None where its models' files are not on this machine: nothing is fetched."""
    second = second_model(settings, mode)
    try:
        models = [(compat.locate(_local(settings, model)), settings.tensor_parallel_size)]
        models += [(compat.locate(second), draft_tensor_parallel(settings))] if second else []
        return compat.demand(models, dtype=settings.dtype, max_model_len=settings.max_model_len)
    except UsageError:
        return None


def _local(settings: Settings, model: str) -> str:
    return str(settings.cache_dir / BUILTIN_FOLDER) if model == BUILTIN_MODEL else model


def draft_tensor_parallel(settings: Settings) -> int:
    """vLLM takes no other size for a standalone draft than its target's."""
    return settings.draft_tensor_parallel_size or settings.tensor_parallel_size


def readable(model: str) -> bool:
    """Whether a model's small files can be read here; those of an id are fetched if they are not. False where there is no network."""
    if Path(model).expanduser().exists() or compat.cached(model):
        return True
    if os.environ.get("HF_HUB_OFFLINE") == "1" or model.count("/") != 1:
        return False
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(model, allow_patterns=SMALL_FILES)
    except (OSError, HfHubHTTPError, httpx.HTTPError, ValueError):
        return False
    return compat.cached(model)
