"""Bytes that nobody would delete: half-written files of processes that were killed, and files that SQL does not know."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from specbatch.context import Context
from specbatch.store import files

AGE_SECONDS = 86_400.0  # without a byte written: an upload between its bytes and its row is younger
MOST = 10_000  # removed in one pass
SOME = 500  # looked up in one transaction
OURS = re.compile(r"file-[0-9a-f]{24}(\.[0-9a-f]{8}\.part)?")
OWNER = ".database"  # names the database that the folder's files are known to; its age is that of this acquaintance


def drop(ctx: Context) -> int:
    """Remove old orphans from the folder of files, at most MOST; answers how many. Raises ServiceUnavailable, and removes nothing then.

    Files older than the acquaintance of folder and database are left alone: they may be another database's, as after a change of
    SPECBATCH_DATABASE_URL.
    """
    folder = ctx.settings.files_dir
    if not folder.is_dir():
        return 0
    since, until = _acquainted(ctx, folder), time.time() - AGE_SECONDS
    old = (path for path, written in _ours(folder) if written < until and (_is_torso(path) or written >= since))
    dropped = 0
    while dropped < MOST and (some := list(islice(old, min(SOME, MOST - dropped)))):
        with ctx.database.read() as tx:
            known = files.known(tx, [path.name for path in some])
        for path in some:
            written = None if path.name in known else _written(path)
            if written is not None and written < until:  # written again meanwhile, it is an output file about to be announced
                path.unlink(missing_ok=True)
                dropped += 1
    return dropped


def _ours(folder: Path) -> Iterator[tuple[Path, float]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if OURS.fullmatch(entry.name) and (written := _written(path)) is not None:
                yield path, written


def _is_torso(path: Path) -> bool:
    return path.suffix == ".part"


def _written(path: Path) -> float | None:
    """When its last byte was written; None when it is gone."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return None


def _acquainted(ctx: Context, folder: Path) -> float:
    """Since when this database has known the folder's files: the epoch's seconds, now for a folder that was another's, or nobody's."""
    mark = folder / OWNER
    name = ctx.database.url.render_as_string(hide_password=True)
    if not mark.exists() or mark.read_text(encoding="utf-8") != name:
        mark.write_text(name, encoding="utf-8")
    return mark.stat().st_mtime
