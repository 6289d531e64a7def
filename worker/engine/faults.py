"""The scripted engine's faults.

A request asks for its own in `metadata`: {"x-fault": "die"} ends the engine, `exit` the process, `refuse` is a 400, `error` a 500,
`hang` waits until it is cancelled. With `_once` behind it, a fault happens to the first engine that sees this body and to no later one,
in any process that shares the data directory. {"x-delay-ms": "50"} sets a row's own time.
SPECBATCH_SCRIPTED_JOURNAL names a file to which every engine appends a line for each request that it starts, and that it has answered.
SPECBATCH_SCRIPTED_FAULTS holds the engine's: `start` (it cannot start), `die:500` and `error:100` (every so many answers), comma-separated.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from specbatch.errors import UsageError
from specbatch.settings import Settings

FAULTS_VARIABLE = "SPECBATCH_SCRIPTED_FAULTS"
JOURNAL_VARIABLE = "SPECBATCH_SCRIPTED_JOURNAL"
PERIODIC = ("die", "error")


class Faults:
    """Raises UsageError for a variable that it cannot read."""

    def __init__(self, settings: Settings) -> None:
        self._marks = settings.home / "scripted-faults"
        self._every = _read(os.environ.get(FAULTS_VARIABLE, ""))
        journal = os.environ.get(JOURNAL_VARIABLE)
        self._journal = Path(journal).open("ab", buffering=0) if journal else None  # noqa: SIM115 - appended to as long as the engine lives

    @property
    def at_start(self) -> bool:
        return "start" in self._every

    def note(self, event: str, request_id: str) -> None:
        """One write a line: several processes share the journal."""
        if self._journal is not None:
            self._journal.write(f"{time.time():.3f} {os.getpid()} {event} {request_id}\n".encode())

    def choose(self, asked: object, body: dict[str, object], answers: int) -> str | None:
        """The fault of this request, the engine's `answers`th; what it asks for comes before the engine's own."""
        if isinstance(asked, str):
            fault = asked.removesuffix("_once")
            if fault == asked or self._first_time(fault, body):
                return fault
        return next((name for name in PERIODIC if name in self._every and answers % self._every[name] == 0), None)

    def _first_time(self, fault: str, body: dict[str, object]) -> bool:
        """A mark on disk, so that a fault which ends the process is not met again by the next one."""
        text = json.dumps([fault, body], sort_keys=True)
        mark = self._marks / hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        self._marks.mkdir(parents=True, exist_ok=True)
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _read(text: str) -> dict[str, int]:
    every: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, period = part.partition(":")
        if name not in (*PERIODIC, "start") or not (period or "1").isdigit() or period == "0":
            raise UsageError(f"{FAULTS_VARIABLE}: {part!r} is not one of start, die:N, error:N")
        every[name] = int(period or "1")
    return every
