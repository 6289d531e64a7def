"""Engines behind one protocol: vLLM, and a scripted one for speed and faults."""

from __future__ import annotations

from specbatch.domain import Mode
from specbatch.settings import Settings
from worker.engine.base import Engine


def build(settings: Settings, mode: Mode) -> Engine:
    """An engine that is not started yet. vLLM is imported only where it is asked for: that alone takes seconds."""
    if settings.engine == "scripted":
        from worker.engine.scripted import ScriptedEngine

        return ScriptedEngine(settings, mode)
    from worker.engine.vllm import VllmEngine

    return VllmEngine(settings, mode)
