"""What killed processes leave in the folder of files: removed when it is old, and only when it is nobody's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from specbatch import models as tables
from specbatch.context import Context, opened
from specbatch.errors import ServiceUnavailable
from specbatch.service import files, orphans
from specbatch.settings import Settings
from specbatch.store import files as stored
from tests.server_fixtures import jsonl, line, wait_until
from worker.reconciler import Reconciler

DAY = 86_400.0
LOST = f"file-{'0' * 24}"
TORSO = f"{LOST}.00000000.part"


@pytest.fixture
def folder(ctx: Context) -> Path:
    """The folder of files, known to the database for a week."""
    ctx.settings.files_dir.mkdir(parents=True)
    assert orphans.drop(ctx) == 0
    return aged(ctx.settings.files_dir / orphans.OWNER, 7 * DAY).parent


def aged(path: Path, seconds: float) -> Path:
    """The file as if its last byte had been written so long ago; made where it is not there."""
    path.touch()
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {orphans.OWNER}


def uploaded(ctx: Context) -> Path:
    return files.path(ctx, files.upload(ctx, "in.jsonl", "batch", [jsonl(line("a"))]).id)


def test_old_orphans_go_and_all_else_stays(ctx: Context, folder: Path) -> None:
    known, expired = aged(uploaded(ctx), 2 * DAY), aged(uploaded(ctx), 2 * DAY)
    with ctx.database.write() as tx:
        tx.execute(sa.update(tables.files).where(tables.files.c.id == expired.name).values(expires_at=0.0))
    aged(folder / LOST, 1.1 * DAY)
    aged(folder / TORSO, 1.1 * DAY)
    fresh = [aged(folder / f"file-{'1' * 24}", 0.9 * DAY), aged(folder / f"file-{'1' * 24}.11111111.part", 0.9 * DAY)]
    foreign = [aged(folder / name, 2 * DAY) for name in ("README", "file-notes.jsonl", f"{LOST}.bak")]
    assert orphans.drop(ctx) == 2
    assert left(folder) == {path.name for path in (known, expired, *fresh, *foreign)}
    assert orphans.drop(ctx) == 0


def test_an_upload_in_progress_is_never_touched(ctx: Context, folder: Path) -> None:
    """While its bytes come, and between its last byte and its row."""
    aged(folder / TORSO, 2 * DAY)
    dropped: list[int] = []

    def chunks() -> Iterator[bytes]:
        yield jsonl(line("a"))
        dropped.append(orphans.drop(ctx))
        yield jsonl(line("b"))

    add = stored.add

    def late(*given: Any, **named: Any) -> stored.File:
        dropped.append(orphans.drop(ctx))
        return add(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "add", late)
        uploading = files.upload(ctx, "in.jsonl", "batch", chunks())
    assert dropped == [1, 0]
    assert files.content(ctx, uploading.id).read_bytes() == jsonl(line("a"), line("b"))


def test_a_pass_has_an_end(ctx: Context, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "MOST", 5)
    monkeypatch.setattr(orphans, "SOME", 2)
    for number in range(12):
        aged(folder / f"file-{number:024x}", 2 * DAY)
    assert [orphans.drop(ctx) for _ in range(4)] == [5, 5, 2, 0]
    assert left(folder) == set()


def test_files_of_another_database_are_left_alone(ctx: Context, folder: Path, tmp_path: Path) -> None:
    """The folder outlives a change of SPECBATCH_DATABASE_URL; what was written before it is not the new database's to judge."""
    aged(folder / LOST, 2 * DAY)
    aged(folder / TORSO, 2 * DAY)
    (folder / orphans.OWNER).write_text("postgresql://elsewhere/specbatch")
    assert orphans.drop(ctx) == 1
    assert left(folder) == {LOST}
    assert orphans.drop(ctx) == 0


def test_a_file_written_anew_during_the_pass_stays(ctx: Context, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second attempt to finalize takes the place of a first one that died a day ago."""
    aged(folder / LOST, 2 * DAY)
    known = stored.known

    def slowly(tx: sa.Connection, ids: list[str]) -> set[str]:
        found = known(tx, ids)
        files.write_output(ctx, LOST, [b"answer\n"])
        return found

    monkeypatch.setattr(stored, "known", slowly)
    assert orphans.drop(ctx) == 0
    assert (folder / LOST).read_bytes() == b"answer\n"


def test_the_reconciler_removes_them(settings: Settings, folder: Path) -> None:
    lost = aged(folder / LOST, 2 * DAY)
    with opened(settings, settings.redis_url) as ctx:
        reconciler = Reconciler(ctx)
        running = threading.Thread(target=reconciler.run)
        running.start()
        try:
            wait_until(lambda: not lost.exists())
        finally:
            reconciler.stop()
            running.join()
    assert left(folder) == set()


def test_nothing_goes_while_the_database_is_silent(ctx: Context, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> set[str]:
        raise ServiceUnavailable("the database does not answer", code="database_unavailable")

    aged(folder / LOST, 2 * DAY)
    monkeypatch.setattr(stored, "known", silent)
    with pytest.raises(ServiceUnavailable):
        orphans.drop(ctx)
    assert left(folder) == {LOST}
