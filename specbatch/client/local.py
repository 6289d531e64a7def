"""The services of this machine: the database read and written here, queue, reconciler and worker started where they are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from specbatch import services
from specbatch.context import opened
from specbatch.domain import Mode
from specbatch.processes import Crew
from specbatch.service import batches, files
from specbatch.service.batches import NewBatch
from specbatch.serving import resolve_model
from specbatch.settings import Settings
from specbatch.staff import Staff
from specbatch.wire import BatchObject, FileObject, ResultObject


class Local:
    """What it starts ends with `close`, or with this process, however that goes; an embedded Valkey that was not closed, with the next
    command in its data directory."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.model = resolve_model(settings)
        self._settings, self._say = settings, say
        self._open = ExitStack()
        services.migrate(settings)
        self._ctx = self._open.enter_context(opened(settings))
        self._crew: Crew | None = None
        self._staff: dict[Mode | None, Staff] = {}
        self._modes: dict[str, Mode | None] = {}  # of the batches that were created here

    def upload(self, name: str, chunks: Iterable[bytes]) -> FileObject:
        return files.upload(self._ctx, name, "batch", chunks)

    def delete(self, file_id: str) -> None:
        files.delete(self._ctx, file_id)

    def create(self, new: NewBatch, run_key: str | None) -> BatchObject:
        batch = batches.submit(self._ctx, new, run_key)
        self._modes[batch.id] = new.mode
        self.attend(batch)
        return batch

    def find(self, run_key: str) -> BatchObject | None:
        return batches.interrupted(self._ctx, run_key)

    def let_go(self, batch_id: str) -> None:
        batches.delivered(self._ctx, batch_id)

    def get(self, batch_id: str) -> BatchObject:
        return batches.get(self._ctx, batch_id)

    def cancel(self, batch_id: str) -> BatchObject:
        return batches.cancel(self._ctx, batch_id)

    def outcomes(self, batch_id: str, after: int, limit: int) -> list[ResultObject]:
        return [ResultObject.of(row) for row in batches.outcomes(self._ctx, batch_id, after=after, limit=limit)]

    def attend(self, batch: BatchObject) -> str:
        mode = self._modes.get(batch.id)
        if mode not in self._staff:
            self._staff[mode] = Staff(self._ctx, self._started_crew(), self._settings, mode)
        return self._staff[mode].see_to(batch)

    def close(self) -> None:
        self._open.close()

    def _started_crew(self) -> Crew:
        if self._crew is None:
            redis_url = self._open.enter_context(services.redis(self._settings))
            self._crew = self._open.enter_context(Crew(self._settings, redis_url, self._say))
            self._crew.start("reconciler", "worker.reconciler")
        return self._crew
