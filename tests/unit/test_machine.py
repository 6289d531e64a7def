"""The GPUs that are this process's own, and what measurements belong to: the device that one engine runs on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specbatch import gpus, machine
from specbatch.settings import Settings

MIB = 1024**2
TWO = "0, GPU-870a, 143771, NVIDIA H200\n1, GPU-9e71, 23034, NVIDIA L4\n"
Driver = Callable[[str], None]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Sets what nvidia-smi answers, on a machine with a GPU."""
    gpus._visible.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "has_gpu", lambda: True)

    def answers(told: str) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess(gpus.ASK, 0, stdout=told))

    yield answers
    gpus._visible.cache_clear()


@pytest.mark.parametrize(
    ("visible", "parallel", "device", "mebibytes"),
    [
        (None, 1, "NVIDIA H200", 23034),  # an engine takes the first; nobody knows which: the smallest is sure to be enough
        ("0", 1, "NVIDIA H200", 143771),
        ("1", 1, "NVIDIA L4", 23034),
        ("GPU-9e71", 1, "NVIDIA L4", 23034),
        ("1, 0", 1, "NVIDIA L4", 23034),
        ("0,1", 2, "2 x NVIDIA H200", 23034),
        (None, 2, "2 x NVIDIA H200", 23034),
        ("MIG-1", 1, "NVIDIA H200", 23034),
        ("", 1, "NVIDIA H200", 23034),
    ],
)
def test_what_is_visible_counts(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, visible: str | None, parallel: int, device: str, mebibytes: int
) -> None:
    driver(TWO)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.this_machine(Settings(tensor_parallel_size=parallel)).device == device
    assert gpus.memory_bytes() == mebibytes * MIB


@pytest.mark.parametrize("told", ["[N/A]", "[Not Supported]"])
def test_a_gpu_that_shares_the_machines_memory_has_none_of_its_own(driver: Driver, told: str) -> None:
    driver(f"0, GPU-1, {told}, NVIDIA GB10\n")
    assert gpus.visible() == (gpus.Gpu("NVIDIA GB10", None),)
    assert gpus.memory_bytes() is None


@pytest.mark.parametrize("failure", [FileNotFoundError(), subprocess.CalledProcessError(9, "nvidia-smi"), subprocess.TimeoutExpired("", 1)])
def test_a_gpu_that_cannot_be_asked_has_no_name(driver: Driver, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fails(*given: Any, **named: Any) -> None:
        raise failure

    driver("")
    monkeypatch.setattr(subprocess, "run", fails)
    assert machine.this_machine(Settings()).device == "GPU"
    assert gpus.memory_bytes() is None


@pytest.mark.usefixtures("driver")
def test_without_a_gpu_it_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "has_gpu", lambda: False)
    assert "CPU" in machine.this_machine(Settings()).device
    assert gpus.memory_bytes() is None
