"""`specbatch.Client`: submit requests, wait for them, read their results as they come."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from specbatch.client.batch import Batch
from specbatch.client.local import Local
from specbatch.client.remote import Remote
from specbatch.client.transport import Transport
from specbatch.domain import Mode, TaskType
from specbatch.errors import InvalidRequest, UsageError
from specbatch.service.batches import NewBatch
from specbatch.settings import Settings, load

CHUNK_BYTES = 1024**2
CHAT = "/v1/chat/completions"
Requests = str | Path | Iterable[Mapping[str, Any]]


class Client:
    """Batches on a server, or without a URL on this machine, where what is missing is started: `with Client() as client`.

    >>> with Client() as client:
    ...     batch = client.submit([{"messages": [{"role": "user", "content": "Hello"}]}])
    ...     for result in batch.results():
    ...         print(result.custom_id, result.response)
    """

    def __init__(self, url: str | None = None, *, api_key: str | None = None, **settings: Any) -> None:
        """`settings` are those of the command line, by name (`model=`, `data_dir=`, `engine=`, ...); a server has its own.

        Raises UsageError for a wrong setting, ServiceUnavailable where the database or Redis does not answer.
        """
        if url is not None and settings:
            raise UsageError(f"a server has settings of its own: leave {', '.join(settings)} out, or leave the URL out")
        self._connect(load(**settings), url, api_key)

    @classmethod
    def of(cls, settings: Settings, url: str | None = None, api_key: str | None = None) -> Client:
        """A client of settings that were read already."""
        client = cls.__new__(cls)
        client._connect(settings, url, api_key)
        return client

    def _connect(self, settings: Settings, url: str | None, api_key: str | None) -> None:
        self.settings = settings
        self.transport: Transport = Local(settings, _say) if url is None else Remote(url, api_key)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what was started here. Batches stay in the database, and go on when somebody waits for them again."""
        self.transport.close()

    def submit(
        self,
        requests: Requests,
        *,
        endpoint: str = CHAT,
        mode: Mode | str | None = None,
        task: TaskType | str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Batch:
        """Queue requests: a file of OpenAI batch lines, or mappings that are such lines or bodies alone.

        A body alone gets its place as custom_id, from 0, and the model that is served, where it names none. Raises InvalidRequest
        for what is no request; what is wrong with single lines is in the batch's `errors`, once it is validated.
        """
        if isinstance(requests, str | Path):
            path = Path(requests)
            file = self.transport.upload(f"{path.stem or 'requests'}.jsonl", _read(path))
        else:
            lines = (_line(request, number, endpoint, self.transport.model) for number, request in enumerate(requests))
            file = self.transport.upload("requests.jsonl", _some(lines))
        named = dict(metadata or {}) | ({"task": TaskType(task).value} if task is not None else {})
        new = NewBatch(input_file_id=file.id, endpoint=endpoint, mode=None if mode is None else Mode(mode), metadata=named or None)
        return Batch(self.transport, self.transport.create(new, None))

    def batch(self, batch_id: str) -> Batch:
        """A batch that was submitted before. Raises NotFound."""
        return Batch(self.transport, self.transport.get(batch_id))


def _line(request: Mapping[str, Any], number: int, endpoint: str, model: str) -> bytes:
    line = dict(request)
    if "body" not in line:
        line = {"custom_id": str(number), "method": "POST", "url": endpoint, "body": {"model": model, **request}}
    try:
        return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError) as wrong:
        raise InvalidRequest(f"request {number} cannot be written as JSON: {wrong}") from None


def _some(lines: Iterator[bytes]) -> Iterator[bytes]:
    while some := b"".join(itertools.islice(lines, 1000)):
        yield some


def _read(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as failure:
        raise UsageError(f"cannot read {path}: {failure.strerror}") from None


def _say(message: str) -> None:
    from specbatch.cli.render import say

    say(message)
