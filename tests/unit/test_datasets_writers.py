"""Datasets out: whole or not at all, in parts above a size, with their types."""

from __future__ import annotations

import datetime
import json
import math
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.datasets import source
from specbatch.datasets.formats import check_parquet
from specbatch.datasets.writers import Destination, Writer
from specbatch.errors import InvalidRequest, UsageError

SCHEMA = pa.schema([("a", pa.int16()), ("text", pa.string())])
ROWS: list[dict[str, Any]] = [{"a": number, "text": f"t{number}"} for number in range(10)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_come_back(tmp_path: Path, suffix: str) -> None:
    out = Destination(tmp_path / f"out{suffix}")
    with Writer(out, SCHEMA) as writer:
        writer.write(ROWS[:4])
        writer.write(ROWS[4:])
        assert not out.path.exists()
    assert [row for chunk in source.at(out.path).chunks() for row in chunk.rows] == ROWS
    assert [path.name for path in tmp_path.iterdir()] == [out.path.name]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_large_output_becomes_a_folder_that_is_a_dataset(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.datasets.formats.GROUP_ROWS", 1)
    out = Destination(tmp_path / f"out{suffix}")
    for _ in range(2):  # the second replaces the first
        with Writer(out, SCHEMA, part_bytes=1) as writer:
            for row in ROWS:
                writer.write([row])
        assert sorted(path.name for path in out.path.iterdir()) == [f"part-{number:05d}{suffix}" for number in range(10)]
        assert [row for chunk in source.at(out.path).chunks() for row in chunk.rows] == ROWS
    with Writer(out, SCHEMA) as writer:
        writer.write(ROWS)
    assert out.path.is_file()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, suffix: str) -> None:
    out = Destination(tmp_path / f"out{suffix}")
    out.path.write_text("before")

    def fail_half_way() -> None:
        with Writer(out, SCHEMA) as writer:
            writer.write(ROWS)
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert out.path.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == [out.path.name]


def test_arrow_types_survive(tmp_path: Path) -> None:
    table = pa.table({"price": pa.array([Decimal("1.10")], pa.decimal128(10, 2)), "kind": pa.array(["x"]).dictionary_encode()})
    schema = pa.schema([*table.schema, ("text", pa.string())])
    with Writer(Destination(tmp_path / "out.parquet"), schema) as writer:
        writer.write([{**row, "text": "t"} for row in table.to_pylist()], table)
    assert pq.read_schema(tmp_path / "out.parquet").types == schema.types
    assert pq.read_table(tmp_path / "out.parquet").select(["price", "kind"]) == table


def test_dictionaries_that_grow_from_chunk_to_chunk_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.datasets.formats.GROUP_ROWS", 3000)
    table = pa.table({"kind": pa.array([f"kind {number // 700}" for number in range(5000)]).dictionary_encode()})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=900)
    with Writer(Destination(tmp_path / "out.parquet"), table.schema) as writer:
        for chunk in source.at(tmp_path / "in.parquet").chunks():
            writer.write(chunk.rows, chunk.table)
    made = pq.read_table(tmp_path / "out.parquet")
    assert made.schema.types == table.schema.types
    assert made["kind"].to_pylist() == table["kind"].to_pylist()


def test_a_value_that_does_not_fit_its_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="column 'a' of the output"), Writer(Destination(tmp_path / "out.parquet"), SCHEMA) as writer:
        writer.write([{"a": 10**6, "text": "t"}])


@pytest.mark.parametrize("kind", [pa.struct([]), pa.list_(pa.struct([])), pa.month_day_nano_interval()])
def test_a_column_that_parquet_cannot_hold_is_named_before_anything_is_written(tmp_path: Path, kind: pa.DataType) -> None:
    schema = pa.schema([("a", pa.int16()), ("meta", kind)])
    with pytest.raises(InvalidRequest, match=r"column 'meta' cannot be in Parquet: .*[^.]\. Leave it out with --keep, or write JSONL"):
        check_parquet(schema)
    with pytest.raises(pa.ArrowException), Writer(Destination(tmp_path / "out.parquet"), schema):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_json_has_no_form_for(tmp_path: Path) -> None:
    row = {
        "at": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 1, 2),
        "long": datetime.timedelta(minutes=1),
        "price": Decimal("1.10"),
        "raw": b"\x00\xff",
        "odd": [math.nan, {"x": math.inf}],
        "half": "\ud800",
    }
    with Writer(Destination(tmp_path / "out.jsonl"), None) as writer:
        writer.write([row])
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {
        "at": "2026-01-02T03:04:05+00:00",
        "day": "2026-01-02",
        "long": 60.0,
        "price": "1.10",
        "raw": "AP8=",
        "odd": [None, {"x": None}],
        "half": "\ud800",
    }


def test_places_that_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"name the output \*.jsonl or \*.parquet"):
        Destination(tmp_path / "out.txt")
    with pytest.raises(UsageError, match="there is no directory"):
        Destination(tmp_path / "absent" / "out.jsonl")
    with pytest.raises(UsageError, match=r"the output .* is the input"):
        Destination(tmp_path / "in.jsonl", [tmp_path / "in.jsonl"])
    with pytest.raises(UsageError, match=r"the output .* is inside the input"):
        Destination(tmp_path / "out.jsonl", [tmp_path])
    (tmp_path / "in.invalid.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"kept aside go to .*in\.invalid\.jsonl, which is a folder: move it"):
        Destination(tmp_path / "in.parquet")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="cannot be written to"):
        Destination(tmp_path / "out.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_file_beside_the_output_may_not_be_the_input(tmp_path: Path, suffix: str) -> None:
    given = tmp_path / "t.invalid.jsonl"
    given.write_text("{}\n")
    with pytest.raises(UsageError, match=r"go to .*t\.invalid\.jsonl, beside the output, and that is the input: choose another output"):
        Destination(tmp_path / f"t{suffix}", [given])


def test_only_the_kind_of_an_output_gives_way_to_the_name_beside_it(tmp_path: Path) -> None:
    names = [Destination(tmp_path / name).invalid.name for name in ("m.qwen.jsonl", "m.llama.jsonl", "m.v1.5.PARQUET")]
    assert names == ["m.qwen.invalid.jsonl", "m.llama.invalid.jsonl", "m.v1.5.invalid.jsonl"]
