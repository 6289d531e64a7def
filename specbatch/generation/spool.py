"""What a run knows of itself, in one SQLite file for each output: which batches it submitted, how far they were read, and their answers.

Everything is written in transactions that a kill at any moment leaves whole: a page of answers and the mark up to where it was read are
one of them. It is a file of this command's own, not the product's database: that one may be on another machine.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specbatch.errors import ServiceUnavailable, UsageError

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS parts (
    step INTEGER NOT NULL, number INTEGER NOT NULL, file_id TEXT NOT NULL, batch_id TEXT, seen INTEGER NOT NULL DEFAULT 0,
    ended INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (step, number)
);
CREATE TABLE IF NOT EXISTS answers (
    step INTEGER NOT NULL, position INTEGER NOT NULL, text TEXT, reason TEXT, finish_reason TEXT, prompt_tokens INTEGER,
    cached_tokens INTEGER, generated_tokens INTEGER, mode TEXT, acceptance_rate REAL, model TEXT, PRIMARY KEY (step, position)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A row's ending in one step: its text, or the reason why there is none."""

    position: int
    text: str | None
    reason: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    mode: str | None = None
    acceptance_rate: float | None = None
    model: str | None = None


_columns = attrgetter(*(each.name for each in fields(Answer)))


@dataclass(frozen=True, slots=True)
class Part:
    """One batch of a step. `seen`: the sequence number up to which its results are here."""

    step: int
    number: int
    file_id: str
    batch_id: str | None
    seen: int
    ended: bool


class Spool:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection

    def fact(self, name: str) -> Any:
        found = self._sql.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else json.loads(found[0])

    def note(self, **facts: Any) -> None:
        with self._sql:
            self._sql.executemany("REPLACE INTO facts VALUES (?, ?)", [(name, json.dumps(value)) for name, value in facts.items()])

    def begin(self, **facts: Any) -> None:
        """Forget everything, and begin a run."""
        with self._sql:
            for table in ("facts", "parts", "answers"):
                self._sql.execute(f"DELETE FROM {table}")
        self.note(**facts)

    def parts(self, step: int | None = None) -> list[Part]:
        query = "SELECT step, number, file_id, batch_id, seen, ended FROM parts WHERE ? IS NULL OR step = ? ORDER BY step, number"
        found = self._sql.execute(query, (step, step))
        return [Part(step, number, file_id, batch_id, seen, bool(ended)) for step, number, file_id, batch_id, seen, ended in found]

    def rendered(self, step: int, file_ids: Sequence[str]) -> None:
        """The requests that a step still lacks are uploaded."""
        number = len(self.parts(step))
        rows = [(step, number + offset, file_id) for offset, file_id in enumerate(file_ids)]
        with self._sql:
            self._sql.executemany("INSERT INTO parts (step, number, file_id) VALUES (?, ?, ?)", rows)
            self._sql.execute("REPLACE INTO facts VALUES (?, 'true')", (f"rendered {step}",))

    def submitted(self, part: Part, batch_id: str) -> None:
        with self._sql:
            self._sql.execute("UPDATE parts SET batch_id = ? WHERE step = ? AND number = ?", (batch_id, part.step, part.number))

    def read(self, part: Part, answers: Sequence[Answer], seen: int) -> None:
        """A page of results, and how far it reaches."""
        with self._sql:
            self._sql.executemany(
                "REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [(part.step, *_columns(answer)) for answer in answers]
            )
            self._sql.execute("UPDATE parts SET seen = ? WHERE step = ? AND number = ?", (seen, part.step, part.number))

    def ended(self, part: Part, *, complete: bool) -> None:
        """A batch that ended without an answer for each row leaves its step to be rendered again, for the rows that lack one."""
        with self._sql:
            self._sql.execute("UPDATE parts SET ended = 1 WHERE step = ? AND number = ?", (part.step, part.number))
            if not complete:
                self._sql.execute("DELETE FROM facts WHERE name = ?", (f"rendered {part.step}",))

    def between(self, step: int, first: int, last: int) -> Mapping[int, Answer]:
        """The answers of a step from position `first` to `last`, both included."""
        columns = "position, text, reason, finish_reason, prompt_tokens, cached_tokens, generated_tokens, mode, acceptance_rate, model"
        query = f"SELECT {columns} FROM answers WHERE step = ? AND position BETWEEN ? AND ?"
        return {row[0]: Answer(*row) for row in self._sql.execute(query, (step, first, last))}

    def publishing(self) -> None:
        """From here on a file in the output's place is this run's own."""
        self._sql.execute("PRAGMA synchronous=FULL")  # the file's name may outlive a power cut, so this note has to
        self.note(publishing=True)

    def finish(self, **facts: Any) -> None:
        """The output is in its place: only what it was made from is remembered."""
        with self._sql:
            self._sql.execute("DELETE FROM answers")
            self._sql.execute("DELETE FROM parts")
        self.note(finished=True, **facts)
        self._sql.execute("VACUUM")


@contextmanager
def opened(path: Path, output: Path) -> Iterator[Spool]:
    """The spool of one output.

    Raises UsageError while another command writes that output, ServiceUnavailable where the file cannot be read or written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"another command writes {output} right now: wait for it, or stop it") from None
    try:
        connection = sqlite3.connect(path)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")  # a lost page is read again: the mark is lost with it
            connection.executescript(_TABLES)
            yield Spool(connection)
        finally:
            connection.close()
    except sqlite3.Error as failure:  # also one of the body: nothing else there speaks SQLite without SQLAlchemy between
        raise ServiceUnavailable(
            f"{path}, where the answers for {output} are kept, cannot be read or written: {failure}. Where its disk is full, make room "
            "and give the same command again: it goes on. Where the file is damaged, remove it: the same command begins anew"
        ) from failure
    finally:
        lock.release()
