"""The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves to this process, as the driver's tool tells. No driver is loaded here."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DEVICES = Path("/dev")
NODES = ("nvidia[0-9]*", "kfd")  # NVIDIA's device files, and the compute node of AMD's driver
ASK = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits")
ANSWER_SECONDS = 30.0  # without its persistence daemon, NVIDIA's driver is loaded for each question


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory_bytes` is None where the driver does not tell: a GPU that shares the machine's memory has none of its own."""

    name: str
    memory_bytes: int | None


def has_gpu(devices: Path = DEVICES) -> bool:
    """Whether this machine shows a GPU. Reads the names of device files only."""
    return any(True for pattern in NODES for _ in devices.glob(pattern))


def visible() -> tuple[Gpu, ...]:
    """In the order in which an engine takes them. Empty without one, or without nvidia-smi.

    A name in CUDA_VISIBLE_DEVICES that nvidia-smi does not list stands for a part of some GPU: then all of them count.
    """
    return _visible(os.environ.get("CUDA_VISIBLE_DEVICES"))


def memory_bytes() -> int | None:
    """Of the smallest visible GPU; None where nothing is known."""
    return min((gpu.memory_bytes for gpu in visible() if gpu.memory_bytes is not None), default=None)


@cache
def _visible(named: str | None) -> tuple[Gpu, ...]:
    if not has_gpu():
        return ()
    try:
        told = subprocess.run(ASK, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    known: dict[str, Gpu] = {}
    found = []
    for line in told.splitlines():
        index, uuid, mebibytes, name = line.split(", ", 3)
        gpu = Gpu(name, int(mebibytes) * 1024**2 if mebibytes.isdigit() else None)
        known |= {index: gpu, uuid: gpu}
        found.append(gpu)
    chosen = [name.strip() for name in (named or "").split(",") if name.strip()]
    return tuple(known[name] for name in chosen) if chosen and all(name in known for name in chosen) else tuple(found)
