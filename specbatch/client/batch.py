"""A batch in the hands of a program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from specbatch.client.transport import Transport
from specbatch.domain import TERMINAL, JobStatus
from specbatch.errors import ServiceUnavailable
from specbatch.following import PATIENCE_SECONDS, POLL_SECONDS, readings
from specbatch.wire import BatchObject, ResultObject

PAGE_ROWS = 1000
Progress = Callable[[BatchObject, str], None]


class Batch:
    """`state` is what was last read of it; `refresh` reads again."""

    def __init__(self, transport: Transport, state: BatchObject) -> None:
        self._transport = transport
        self.state = state

    def __repr__(self) -> str:
        counts = self.state.request_counts
        return f"<Batch {self.id}: {self.status}, {counts.completed + counts.failed} of {counts.total} rows>"

    @property
    def id(self) -> str:
        return self.state.id

    @property
    def status(self) -> JobStatus:
        return self.state.status

    def refresh(self) -> BatchObject:
        self.state = self._transport.get(self.id)
        return self.state

    def cancel(self) -> BatchObject:
        """Ask it to end; rows that are done keep their answers. Raises Conflict for a batch that has ended otherwise."""
        self.state = self._transport.cancel(self.id)
        return self.state

    def wait(self, progress: bool | Progress = True) -> BatchObject:
        """Until it has ended, whatever its ending: look at `status` and `request_counts`.

        `progress` shows a bar or a line now and then on stderr, or is called with each reading and what is waited for. Raises
        EngineStartError or ServiceUnavailable when a process that was started for it cannot go on.
        """
        with shown() if progress is True else nullcontext(progress or silent) as show:
            for state in readings(lambda: self._transport.get(self.id)):
                self.state = state
                show(state, self._transport.attend(state))
        return self.state

    def results(self, after: int = 0) -> Iterator[ResultObject]:
        """Each row's ending as it comes, in the order they were settled, until the batch has ended.

        `after` is the `sequence` of the last result that was seen: an interrupted reader goes on behind it.
        """
        for page in self.pages(after):
            yield from page

    def pages(self, after: int = 0, progress: Progress | None = None) -> Iterator[list[ResultObject]]:
        """The same, as many at a time as there are; never an empty page."""
        show = progress or silent
        seen_at = time.monotonic()
        while True:
            try:
                ended = self.refresh().status in TERMINAL  # asked before the rows are: those of an ended batch are complete
                page = self._transport.outcomes(self.id, after, PAGE_ROWS)
            except ServiceUnavailable:
                if time.monotonic() - seen_at > PATIENCE_SECONDS:
                    raise
                time.sleep(POLL_SECONDS)
                continue
            seen_at = time.monotonic()
            if page:
                yield page
                after = page[-1].sequence
            if ended and len(page) < PAGE_ROWS:
                show(self.state, "")
                return
            show(self.state, self._transport.attend(self.state))
            if len(page) < PAGE_ROWS:
                time.sleep(POLL_SECONDS)


def silent(state: BatchObject, note: str) -> None: ...


class shown:
    """A bar or lines on stderr while it is open."""

    def __enter__(self) -> Progress:
        from specbatch.cli.watch import display  # a program that shows nothing need not load what draws it

        self._display = display()
        return self._display.__enter__().show

    def __exit__(self, *failure: object) -> None:
        self._display.__exit__(None, None, None)
