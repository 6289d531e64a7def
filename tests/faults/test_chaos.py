"""A short chaos run; `make chaos` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import chaos


@pytest.mark.postgres
@pytest.mark.timeout(400)
def test_a_little_chaos(tmp_path: Path) -> None:
    """Default settings, three workers, a fault every other second for twenty."""
    tally = chaos.run(seed=5, minutes=1 / 3, database="postgres", home=tmp_path, pause=2.0)
    assert tally["faults_injected"] > 3
    assert tally["rows"] > 100
