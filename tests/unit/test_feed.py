"""Rows on their way through the engine: what is tried again, what is not, and what an answer that cannot be stored costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch.domain import Claim, Mode, Outcome, Reply, Row, RowResult, TaskType
from specbatch.settings import Settings
from worker.engine.base import Engine, EngineDied
from worker.engine.scripted import ScriptedEngine
from worker.feed import TRIES, Feed
from worker.host import EngineHost

CHAT = "/v1/chat/completions"


class Counting(ScriptedEngine):
    asked: Counter[str]

    async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
        self.asked[request_id] += 1
        reply = await super().answer(request_id, endpoint, body)
        return Reply(200, {"value": float("inf")}) if (body.get("metadata") or {}).get("x-infinite") else reply


@pytest.fixture
def asked() -> Counter[str]:
    return Counter()


@pytest.fixture
def feed(tmp_path: Path, asked: Counter[str]) -> Iterator[Feed]:
    def make(settings: Settings, mode: Mode) -> Engine:
        engine = Counting(settings, mode)
        engine.asked = asked
        return engine

    host = EngineHost(Settings(data_dir=tmp_path, engine="scripted"), Mode.PLAIN, make)
    host.start()
    yield Feed(host, Claim("batch_x", 0, 1, CHAT, Mode.PLAIN, TaskType.CHAT))
    host.stop()


def row(index: int, **metadata: Any) -> Row:
    body = {"model": "default", "messages": [{"role": "user", "content": f"hello {index}"}], "max_tokens": 4, "metadata": metadata}
    return Row(index, f"row-{index}", body)


def ended(feed: Feed, *rows: Row) -> dict[int, RowResult]:
    feed.push(rows)
    arrivals = [feed.next(30.0) for _ in rows]
    assert all(isinstance(arrival, RowResult) for arrival in arrivals), arrivals
    return {arrival.row_index: arrival for arrival in arrivals if isinstance(arrival, RowResult)}


def test_the_servers_failures_are_tried_again_and_the_callers_are_not(feed: Feed, asked: Counter[str]) -> None:
    found = ended(feed, row(0), row(1, **{"x-fault": "error_once"}), row(2, **{"x-fault": "error"}), row(3, **{"x-fault": "refuse"}))
    assert [found[index].outcome for index in range(4)] == [Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.FAILED, Outcome.REFUSED]
    assert [found[index].status_code for index in range(4)] == [200, 200, 500, 400]
    assert {name.split("-")[1]: times for name, times in asked.items()} == {"0": 1, "1": 2, "2": TRIES, "3": 1}


def test_a_rows_load_is_what_the_engine_decodes_and_not_what_waits_inside(feed: Feed) -> None:
    """Speeds are compared at like loads: a worker hands an engine of 4 far more than that."""
    object.__setattr__(feed._host.settings, "max_num_seqs", 4)
    found = ended(feed, *(row(index, **{"x-delay-ms": 50}) for index in range(20)))
    assert max(result.load or 0 for result in found.values()) == 4


def test_an_answer_that_json_cannot_hold_fails_its_row_alone(feed: Feed) -> None:
    found = ended(feed, row(0), row(1, **{"x-infinite": True}))
    assert (found[0].outcome, found[1].outcome) == (Outcome.SUCCEEDED, Outcome.FAILED)
    assert found[1].error is not None
    assert found[1].error[0] == "internal_error"


def test_an_engine_that_dies_says_so_once_for_each_row(feed: Feed) -> None:
    feed.push([row(0, **{"x-fault": "die"})])
    assert isinstance(feed.next(30.0), EngineDied)


def test_cancelled_rows_never_arrive(feed: Feed) -> None:
    feed.push([row(0, **{"x-fault": "hang"}), row(1)])
    first = feed.next(30.0)
    assert isinstance(first, RowResult)
    assert first.row_index == 1
    feed.cancel()
    feed.push([row(2)])
    last = feed.next(30.0)
    assert isinstance(last, RowResult)
    assert last.row_index == 2
    assert feed.arrived() == []
