"""What measurements belong to: the device that one engine runs on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from specbatch import machine
from specbatch.settings import Settings

TWO = "0, GPU-870a, NVIDIA H200\n1, GPU-9e71, NVIDIA L4\n"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    machine._device.cache_clear()
    yield
    machine._device.cache_clear()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*given: Any, **named: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(machine.ASK, 0, stdout=TWO)

    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", told)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "parallel", "device"),
    [
        (None, 1, "NVIDIA H200"),  # the other GPU is another worker's
        ("0", 1, "NVIDIA H200"),
        ("1", 1, "NVIDIA L4"),
        ("GPU-9e71", 1, "NVIDIA L4"),
        ("0,1", 2, "2 x NVIDIA H200"),
        (None, 2, "2 x NVIDIA H200"),
        ("MIG-1", 1, "NVIDIA H200"),
    ],
)
def test_the_device_is_what_the_engine_runs_on(monkeypatch: pytest.MonkeyPatch, visible: str | None, parallel: int, device: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.this_machine(Settings(tensor_parallel_size=parallel)).device == device


def test_a_gpu_that_cannot_be_asked_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **named: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", fails)
    assert machine.this_machine(Settings()).device == "GPU"


def test_without_a_gpu_it_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    assert "CPU" in machine.this_machine(Settings()).device
