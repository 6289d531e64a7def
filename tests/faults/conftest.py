"""Installations that tests break. Leases and sweeps are short, so that recovery takes seconds; the defaults are measured by chaos.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from specbatch.settings import Settings
from tests.faults.installation import Installation, installed
from tests.faults.services import Valkey

Install = Callable[..., Installation]


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A Valkey of this test's own."""
    server = Valkey()
    yield server
    server.close()


@pytest.fixture
def install(tmp_path: Path, valkey: Valkey) -> Iterator[Install]:
    """Make an installation on a migrated database; its processes end with the test."""
    with ExitStack() as stack:

        def _install(database_url: str, **changes: Any) -> Installation:
            quick: dict[str, Any] = {
                "data_dir": tmp_path,
                "database_url": database_url,
                "redis_url": valkey.url,
                "engine": "scripted",
                "modes": ("plain",),
                "shard_rows": 10,
                "shards_in_flight": 3,
                "lease_seconds": 1.5,
                "sweep_seconds": 0.25,
                "stop_seconds": 5.0,
            }
            return stack.enter_context(installed(Settings(**(quick | changes)), tmp_path))

        yield _install
