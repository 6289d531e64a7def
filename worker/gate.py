"""Who may use the engine: any number of shards together, or one suspect alone, so that an engine's death names its cause."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Gate:
    """A lock for many or for one. Who waits to be alone goes before newcomers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False
        self._waiting_alone = 0

    @property
    def inside(self) -> int:
        return self._inside + self._alone

    @contextmanager
    def together(self) -> Iterator[bool]:
        """Always entered, in the end: what is inside alone has an end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting_alone)
            self._inside += 1
        try:
            yield True
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, every_seconds: float, while_waiting: Callable[[], bool]) -> Iterator[bool]:
        """Wait until nobody is inside, calling `while_waiting` now and then; False, without entering, once that says to give up."""
        entered = self._enter_alone(every_seconds, while_waiting)
        try:
            yield entered
        finally:
            if entered:
                with self._changed:
                    self._alone = False
                    self._changed.notify_all()

    def _enter_alone(self, every_seconds: float, while_waiting: Callable[[], bool]) -> bool:
        with self._changed:
            self._waiting_alone += 1
        try:
            while True:
                with self._changed:
                    if self._changed.wait_for(lambda: not self._inside and not self._alone, every_seconds):
                        self._alone = True
                        return True
                if not while_waiting():
                    return False
        finally:
            with self._changed:
                self._waiting_alone -= 1
                self._changed.notify_all()
