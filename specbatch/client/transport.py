"""What a client needs of the services, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from specbatch.service.batches import NewBatch
from specbatch.wire import BatchObject, FileObject, ResultObject


class Transport(Protocol):
    """Every verb raises SpecbatchError: ServiceUnavailable where trying again may help."""

    model: str  # what a request without a model is sent to

    def upload(self, name: str, chunks: Iterable[bytes]) -> FileObject: ...

    def delete(self, file_id: str) -> None: ...

    def create(self, new: NewBatch, run_key: str | None) -> BatchObject: ...

    def find(self, run_key: str) -> BatchObject | None:
        """The newest batch that was created under this key and not let go."""

    def let_go(self, batch_id: str) -> None:
        """Its key means a new batch from now on."""

    def get(self, batch_id: str) -> BatchObject: ...

    def cancel(self, batch_id: str) -> BatchObject: ...

    def outcomes(self, batch_id: str, after: int, limit: int) -> list[ResultObject]:
        """Rows in the order they were settled, from the one after sequence number `after`."""

    def attend(self, batch: BatchObject) -> str:
        """Called now and then while somebody waits for a batch; says what is waited for, in words."""

    def close(self) -> None: ...
