"""Rows that are written many at a time: as they are, however many, and once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from specbatch.context import Context
from specbatch.database import Database
from specbatch.domain import Measurement, Mode, Outcome, RowResult
from specbatch.lines import compact
from specbatch.models import measurements, results, rows
from specbatch.service import batches, files, ingest
from specbatch.service import shards as service
from specbatch.service.shards import Standing, Taken
from specbatch.serving import resolve_model
from specbatch.settings import Settings
from specbatch.store import bulk
from specbatch.store import rows as stored
from tests.server_fixtures import CHAT, jsonl, line

ODD = "tab\t newline\n return\r back\\slash \\N \\. quote' \" \u00e9 \U0001f600"


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


def row(index: int, **fields: Any) -> dict[str, Any]:
    like = {"job_id": "batch_x", "row_index": index, "shard_no": 0, "custom_id": str(index), "body": "{}"}
    return {**like, "task": "chat", "mode": "plain", "reason": "", **fields}


def test_text_arrives_as_it_is(database: Database) -> None:
    with database.write() as tx:
        stored.add(tx, [row(0, custom_id=ODD, reason="")])
        stored.add(tx, [])
    with database.read() as tx:
        assert tx.execute(sa.select(rows.c.custom_id, rows.c.reason)).all() == [(ODD, "")]


def test_more_rows_than_one_statement_may_name(database: Database) -> None:
    many = bulk.MOST_VARIABLES // len(rows.c) * 2 + 1
    with database.write() as tx:
        stored.add(tx, [row(index) for index in range(many)])
    with database.read() as tx:
        assert tx.execute(sa.select(sa.func.count(), sa.func.max(rows.c.row_index))).one() == (many, many - 1)


def test_the_primary_key_refuses_a_second_row(database: Database) -> None:
    with pytest.raises(IntegrityError), database.write() as tx:
        stored.add(tx, [row(0), row(1), row(0)])
    with database.write() as tx:  # the connection is as good as new
        stored.add(tx, [row(0)])


@pytest.fixture
def taken(database: Database, tmp_path: Path) -> tuple[Context, Taken]:
    ctx = Context(Settings(data_dir=tmp_path, engine="scripted"), database, None)
    uploaded = files.upload(ctx, "in.jsonl", "batch", [jsonl(*(line(name) for name in "abcd"))])
    job_id = batches.submit(ctx, batches.NewBatch(input_file_id=uploaded.id, endpoint=CHAT, mode=Mode.PLAIN)).id
    assert ingest.ingest_next(ctx, "somebody")
    claimed = service.claim(ctx, job_id, 0, model=resolve_model(ctx.settings), mode=Mode.PLAIN, owner="somebody")
    assert claimed is not None
    return ctx, claimed


def ended(index: int) -> RowResult:
    cost = Measurement(prompt_tokens=3, generated_tokens=2, finish_reason=ODD[:8], drafted_tokens=4, steps_by_accepted=(1, 0, 2))
    return RowResult(index, Outcome.SUCCEEDED, 200, compact({"text": ODD}), None, cost, 5)


def test_a_settlement_whose_answer_was_lost_is_repeated_without_effect(taken: tuple[Context, Taken]) -> None:
    ctx, claimed = taken
    some = [ended(index) for index in claimed.owed[:3]]
    for _ in range(2):
        assert service.settle(ctx, claimed.claim, some, owed=4) is Standing.HELD
    assert service.settle(ctx, claimed.claim, [ended(claimed.owed[3])], owed=1) is Standing.HELD
    assert service.settle(ctx, claimed.claim, [], owed=0) is Standing.FENCED, "the shard is done"
    with ctx.database.read() as tx:
        settled = tx.execute(sa.select(results.c.sequence, results.c.body).order_by(results.c.sequence)).all()
        costs = tx.execute(sa.select(measurements.c.load, measurements.c.steps_by_accepted, measurements.c.finish_reason)).all()
    assert [sequence for sequence, _ in settled] == [1, 2, 3, 4]
    assert {body for _, body in settled} == {compact({"text": ODD})}
    assert [(load, steps, reason) for load, steps, reason in costs] == [(5, [1, 0, 2], ODD[:8])] * 4
    job = batches.get(ctx, claimed.claim.job_id)
    assert (job.status, job.request_counts.completed, job.usage.output_tokens) == ("finalizing", 4, 8)


def test_rows_are_read_by_their_shard(taken: tuple[Context, Taken]) -> None:
    ctx, claimed = taken
    assert [each.custom_id for each in service.read_rows(ctx, claimed.claim, [0, 3])] == ["a", "d"], "what lies between was not asked for"
    assert service.read_rows(ctx, claimed.claim, claimed.owed)[1].body["messages"][0]["content"] == "hi"
