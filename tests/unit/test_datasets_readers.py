"""Datasets in: every kind is read twice alike, and every damage is named by row and column."""

from __future__ import annotations

import datetime
import io
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.datasets import source
from specbatch.datasets.dataset import CHUNK_ROWS, Dataset, digest, infer_schema
from specbatch.errors import InvalidRequest, SpecbatchError, UsageError

ROWS: list[dict[str, Any]] = [{"id": number, "name": f"n{number}"} for number in range(CHUNK_ROWS + 7)]
TYPED = pa.table(
    {
        "id": pa.array([1, 2, 3], pa.int16()),
        "at": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5)] * 3, pa.timestamp("us", tz="UTC")),
        "price": pa.array([Decimal("1.10"), None, Decimal("3.00")], pa.decimal128(10, 2)),
        "who": pa.array([{"name": "Ana", "tags": ["x"]}, None, {"name": "Bo", "tags": []}]),
        "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
    }
)


def rows(found: Dataset) -> list[dict[str, Any]]:
    return [row for chunk in found.chunks() for row in chunk.rows]


def write_hugging_face(folder: Path, tables: list[pa.Table]) -> Path:
    """The layout of datasets.Dataset.save_to_disk."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": None}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.fixture(params=["jsonl", "csv", "parquet", "folder", "huggingface", "split"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same rows in every kind."""
    table = pa.Table.from_pylist(ROWS)
    match request.param:
        case "jsonl":
            (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case "csv":
            (tmp_path / "in.csv").write_text("id,name\n" + "".join(f"{row['id']},{row['name']}\n" for row in ROWS))
        case "parquet":
            pq.write_table(table, tmp_path / "in.parquet")
        case "folder":
            (tmp_path / "in").mkdir()
            pq.write_table(table.slice(0, 5), tmp_path / "in" / "0.parquet")
            pq.write_table(table.slice(5), tmp_path / "in" / "1.parquet")
        case "huggingface":
            write_hugging_face(tmp_path / "in", [table.slice(0, 5), table.slice(5)])
        case "split":
            write_hugging_face(tmp_path / "in" / "train", [table])
            (tmp_path / "in" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return next(tmp_path.glob("in*"))


def test_every_kind_gives_its_rows_in_order_and_twice_alike(path: Path) -> None:
    found = source.at(path)
    expected = [{**row, "id": str(row["id"])} for row in ROWS] if path.suffix == ".csv" else ROWS
    assert rows(found) == expected
    assert rows(found) == expected
    assert all(len(chunk.rows) <= CHUNK_ROWS for chunk in found.chunks())


def test_typed_kinds_keep_their_types(tmp_path: Path) -> None:
    pq.write_table(TYPED, tmp_path / "in.parquet")
    for found in (source.at(tmp_path / "in.parquet"), source.at(write_hugging_face(tmp_path / "hf", [TYPED]))):
        assert found.schema == TYPED.schema
        tables = [chunk.table for chunk in found.chunks()]
        assert pa.concat_tables(tables) == TYPED
        assert rows(found)[0]["who"] == {"name": "Ana", "tags": ["x"]}


def test_nanoseconds_are_microseconds_in_python_and_stay_in_arrow(tmp_path: Path) -> None:
    moments = {
        "at": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC")),
        "long": pa.array([1_001, 0], pa.duration("ns")),
        "clock": pa.array([1_001, 0], pa.time64("ns")),
        "id": pa.array([1, 2]),
    }
    pq.write_table(pa.table(moments), tmp_path / "in.parquet")
    [chunk] = source.at(tmp_path / "in.parquet").chunks()
    assert chunk.table == pa.table(moments)
    assert chunk.rows[0]["at"] == datetime.datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=datetime.UTC)
    assert chunk.rows[0]["long"] == datetime.timedelta(microseconds=1)
    assert chunk.rows[0]["clock"] == datetime.time(0, 0, 0, 1)
    assert [row["id"] for row in chunk.rows] == [1, 2]


def test_standard_input_can_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"a":1}\n{"a":2}\n')))
    with source.opened(Path("-")) as found:
        assert rows(found) == rows(found) == [{"a": 1}, {"a": 2}]
        assert found.name == "stdin"


def test_csv_keeps_text_as_written(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b'\xef\xbb\xbfcode,said\r\n007,"a ""b"",\nc"\r\n\r\n1e5,\r\n')
    assert rows(source.at(tmp_path / "in.csv")) == [{"code": "007", "said": 'a "b",\nc'}, {"code": "1e5", "said": ""}]


def test_the_digest_follows_the_content_alone(tmp_path: Path) -> None:
    for name, content in (("a", '{"x":1}\n'), ("b", '{"x":1}\n'), ("c", '{"x":2}\n')):
        (tmp_path / f"{name}.jsonl").write_text(content)
    one, same, other = (digest(source.at(tmp_path / f"{name}.jsonl")) for name in "abc")
    assert one == same != other


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.csv", b"a,b\n1,2\n3\n", "row 2: 1 values for 2 columns (column 'b' is missing)"),
        ("in.csv", b"a,b\n1,2,3\n", "row 1: 3 values for 2 columns"),
        ("in.csv", b"a,b\n1,\xff\xfe\n", "byte 0xff is not UTF-8"),
        ("in.csv", b"a,b\n1,\x00\n", "row 1, column 2: a NUL byte"),
        ("in.csv", b'a,b\n1,"2\n', "row 1: unexpected end of data"),
        ("in.csv", b"a,a\n1,2\n", "names column 'a' twice"),
        ("in.csv", b"", "is empty: its first line must name the columns"),
        ("in.jsonl", b'{"a":1}\n{"a":\n', "row 2: This line is not parseable as valid JSON"),
        ("in.jsonl", b'{"a":1}\n[1]\n', "row 2: This line is valid JSON, but not an object"),
        ("in.jsonl", b'{"a":NaN}\n', "row 1: This line is not parseable as valid JSON"),
        ("in.parquet", b"PAR1 and no more", "damaged, cut short, or of another kind"),
        ("in.txt", b"a", "the suffix tells the kind of a dataset"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecbatchError) as caught:
        rows(source.at(tmp_path / name))
    assert said in caught.value.message
    assert caught.value.exit_code == 2


def test_a_parquet_file_cut_short_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    whole = (tmp_path / "in.parquet").read_bytes()
    (tmp_path / "in.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidRequest, match=r"in\.parquet cannot be read; it is damaged, cut short"):
        source.at(tmp_path / "in.parquet")


def test_pages_damaged_behind_a_good_footer_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    whole = bytearray((tmp_path / "in.parquet").read_bytes())
    whole[4:200] = b"\xff" * 196
    (tmp_path / "in.parquet").write_bytes(whole)
    with pytest.raises(InvalidRequest, match=r"in\.parquet cannot be read"):
        rows(source.at(tmp_path / "in.parquet"))


def test_folders_that_are_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no dataset"):
        source.at(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}\n")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match=r"several kinds \(a\.jsonl, b\.parquet\)"):
        source.at(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(InvalidRequest, match="'a' is int64 there and string here"):
        source.at(tmp_path)
    with pytest.raises(UsageError, match="there is no file or folder"):
        source.at(tmp_path / "absent")


def test_several_splits_are_to_be_chosen_from(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InvalidRequest, match=r"holds 2 splits: give one of .*/train, .*/test"):
        source.at(tmp_path)


def test_types_of_an_untyped_dataset_hold_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.datasets.text.CHUNK_ROWS", 1)
    (tmp_path / "in.jsonl").write_text('{"a":1}\n{"a":2.5,"b":["x"]}\n{"b":null,"c":{"d":1}}\n')
    found = infer_schema(source.at(tmp_path / "in.jsonl"))
    assert found.field("a").type == pa.float64()
    assert found.field("b").type == pa.list_(pa.string())
    assert found.field("c").type == pa.struct([("d", pa.int64())])


@pytest.mark.parametrize("size", [1, 10])
def test_values_without_a_common_type_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("specbatch.datasets.text.CHUNK_ROWS", size)
    (tmp_path / "in.jsonl").write_text('{"a":1,"b":1}\n{"a":"x","b":2}\n')
    with pytest.raises(InvalidRequest, match=r"in\.jsonl, rows \d to 2: column 'a' .*Parquet needs one type a column"):
        infer_schema(source.at(tmp_path / "in.jsonl"))
    assert infer_schema(source.at(tmp_path / "in.jsonl"), ["b"]).names == ["b"]


@pytest.mark.parametrize("row", [{"t": "\ud83d"}, {"t": ["\ud83d"]}, {"\ud83d": 1}])
def test_half_of_a_character_has_no_type(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(
        InvalidRequest, match=r"rows 1 to 1: column '.*' holds half of a character .*: correct it, leave it out with --keep"
    ):
        infer_schema(source.at(tmp_path / "in.jsonl"))


def test_rows_of_a_program_must_be_json(tmp_path: Path) -> None:
    from specbatch.datasets.text import write_jsonl

    with pytest.raises(InvalidRequest, match="row 2 cannot be written as JSON"):
        write_jsonl(tmp_path / "in.jsonl", [{"a": 1}, {"a": object()}])
