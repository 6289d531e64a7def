"""The drawing of the state machines says what the code does."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

from specbatch.domain import JOB_TRANSITIONS, TERMINAL, JobStatus, Outcome, ShardStatus

TEXT = (Path(__file__).parents[2] / "docs" / "state_machine.md").read_text()
Arrow = tuple[str, str]


def drawing(title: str) -> list[Arrow]:
    block = re.search(rf"## {title}\n.*?```mermaid\nstateDiagram-v2\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None, f"no drawing under {title}"
    return re.findall(r"^ +(\S+) --> ([^\s:]+)", block[1], re.MULTILINE)


def test_the_batch_machine_is_drawn_as_it_is_guarded() -> None:
    arrows = drawing("Batch")
    assert len(arrows) == len(set(arrows))
    inner = {arrow for arrow in arrows if "[*]" not in arrow}
    assert inner == {(before.value, after.value) for before, following in JOB_TRANSITIONS.items() for after in following}
    assert {before for before, after in arrows if after == "[*]"} == {status.value for status in TERMINAL}
    assert [after for before, after in arrows if before == "[*]"] == [JobStatus.VALIDATING.value]


def test_the_other_drawings_have_every_state() -> None:
    assert {state for arrow in drawing("Shard") for state in arrow} == {"[*]", *(status.value for status in ShardStatus)}
    assert {after for before, after in drawing("Row") if before == "owed"} == {outcome.value for outcome in Outcome}


def test_every_function_that_is_named_exists() -> None:
    named = set(re.findall(r"\b((?:service|store|worker)\.[a-z_]+\.[A-Za-z_.]+[A-Za-z_])", TEXT))
    assert len(named) > 20
    for name in named:
        package, module, *rest = name.split(".")
        home = importlib.import_module(f"{package}.{module}" if package == "worker" else f"specbatch.{package}.{module}")
        assert callable(reduce(getattr, rest, home)), name
