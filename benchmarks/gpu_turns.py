"""Engines that share a GPU: all start together, then each works alone while the others wait. A start takes minutes, a measurement seconds.

Run as a module it is worker.tune in turns: it takes a trial from standard input. GPU_TURNS names the file that holds the turn.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from specbatch import errand, logs
from specbatch.settings import load
from specbatch.trial import Measured, Started, Trial
from worker import tune

FILE = "GPU_TURNS"


@contextmanager
def starting() -> Iterator[Callable[[], Callable[[], None]]]:
    """While an engine starts, nobody measures. Yields how to wait for a turn, which returns how to end it: GPU_TURNS names the file."""
    with Path(os.environ.get(FILE, os.devnull)).open("a") as turn:
        _lock(turn, fcntl.LOCK_SH)

        def wait() -> Callable[[], None]:
            _lock(turn, fcntl.LOCK_EX)
            return lambda: _lock(turn, fcntl.LOCK_UN)

        yield wait


def _lock(turn: IO[str], kind: int) -> None:
    if turn.name != os.devnull:
        fcntl.flock(turn, kind)


def main() -> None:
    settings = load()
    logs.configure(settings)
    trial = Trial.model_validate_json(errand.receive())
    left = len(trial.points)
    with starting() as wait:
        end: Callable[[], None] | None = None

        def tell(event: Started | Measured) -> None:
            nonlocal end, left
            print(event.model_dump_json(), flush=True)
            if isinstance(event, Started):
                end = wait()
            else:
                left -= 1
                if left == 0 and end is not None:
                    end()  # the engine's end disturbs nobody

        asyncio.run(tune.run(trial, settings, tell))


if __name__ == "__main__":
    main()
