"""Sees to it that a batch has an engine: somebody's, or one that is started here."""

from __future__ import annotations

import time

from specbatch.context import Context
from specbatch.domain import JobStatus, Mode
from specbatch.processes import Crew
from specbatch.service import reports
from specbatch.serving import resolve_model
from specbatch.settings import Settings
from specbatch.wire import BatchObject

VALIDATION_SECONDS = 3.0  # an engine is worth starting once the lines are known to be good, or this long in coming
LOOK_SECONDS = 1.0


class Staff:
    """For the batches of one command or client. `mode` is the mode that its rows were asked to run in; without one, a worker that
    serves all of this machine's modes is started where none serves the model."""

    def __init__(self, ctx: Context, crew: Crew, settings: Settings, mode: Mode | None = None) -> None:
        self._ctx, self._crew, self._mode = ctx, crew, mode
        self._model = resolve_model(settings)
        self._began_at = time.monotonic()
        self._looked_at = -LOOK_SECONDS
        self._note = ""

    def see_to(self, batch: BatchObject) -> str:
        """What is waited for, in words; nothing where all is well. Raises the error of a process of ours that cannot go on."""
        self._crew.check()
        now = time.monotonic()
        validating = batch.status is JobStatus.VALIDATING and now - self._began_at < VALIDATION_SECONDS
        if validating or batch.status not in (JobStatus.VALIDATING, JobStatus.IN_PROGRESS):
            return ""
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._note = self._look(batch)
        return self._note

    def _look(self, batch: BatchObject) -> str:
        model = batch.model or self._model
        alive = {mode for name, mode in reports.engines_alive(self._ctx) if name == model}
        if (alive and self._mode is None) or self._mode in alive:
            return ""
        if model != self._model:
            return f"waiting for a worker that serves {model}"
        name = "worker" if self._mode is None else f"worker-{self._mode}"
        if name not in self._crew:
            self._crew.start(name, "worker", **({} if self._mode is None else {"SPECBATCH_MODES": self._mode.value}))
        return f"starting an engine for {model}" + (f" ({self._mode})" if self._mode else "")
