"""`generate`, end to end with the scripted engine: files in, files out, killed and continued, and bad input told in one line."""

from __future__ import annotations

import datetime
import json
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import specbatch
from specbatch.cli import app
from specbatch.context import opened
from specbatch.domain import TERMINAL
from specbatch.service import batches
from specbatch.settings import Settings
from tests.commands import Commands, family, gone, read_lines, wait_for
from worker.engine.faults import JOURNAL_VARIABLE

TYPED = pa.table(
    {
        "id": pa.array(range(40), pa.int16()),
        "topic": pa.array([f"topic {number % 4}" for number in range(40)]).dictionary_encode(),
        "at": pa.array([datetime.datetime(2026, 1, 2)] * 40, pa.timestamp("ms")),
    }
)
TWO_COLUMNS = ("--prompt", "Say something about {{ topic }}, number {{ id }}.", "--max-tokens", "8")


@pytest.fixture
def cli(settings: Settings) -> Commands:
    return Commands(settings.model_copy(update={"stop_seconds": 2.0, "sweep_seconds": 0.2}))


@pytest.fixture
def embedded(tmp_path: Path) -> Settings:
    """SQLite and a Valkey of one's own."""
    changes = {"sweep_seconds": 0.2, "stop_seconds": 2.0, "shard_rows": 16, "shards_in_flight": 1, "lease_seconds": 2.0}
    return Settings(data_dir=tmp_path / "home", engine="scripted", **changes)  # type: ignore[arg-type]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    pq.write_table(TYPED, tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_types_survive_from_parquet_to_parquet(cli: Commands, parquet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    told = cli.json("generate", parquet, "-o", out, *TWO_COLUMNS, "--mode", "ngram")
    found = pq.read_table(out)
    assert found.select(TYPED.column_names) == TYPED
    assert found.schema.field("topic").type == TYPED.schema.field("topic").type
    rows = found.to_pylist()
    assert all(row["text"] and row["finish_reason"] == "length" and row["generated_tokens"] == 8 for row in rows)
    assert {row["mode"] for row in rows} == {"ngram"}
    assert 0 < rows[0]["acceptance_rate"] < 1
    assert told == {
        "output": str(out),
        "invalid": None,
        "rows": 40,
        "aside": 0,
        "prompt_tokens": sum(row["prompt_tokens"] for row in rows),
        "cached_tokens": 0,
        "generated_tokens": 320,
    }
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.parquet"]


def test_steps_columns_samples_and_a_schema(embedded: Settings, tmp_path: Path) -> None:
    cli, out = Commands(embedded), tmp_path / "out.jsonl"
    rows = [{"id": number, "topic": "x " * (9000 if number == 7 else 1)} for number in range(12)]
    schema = {"type": "object", "properties": {"title": {"type": "string"}, "stars": {"type": "integer"}}, "required": ["title"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    words = ("--step", "outline=Outline {{ topic }}", "--prompt", "Write {{ outline }} as {{ tag }}", "--column", "tag=#{{ id }}")
    more = ("--schema", tmp_path / "schema.json", "--n", 2, "--seed", 3, "--keep", "id", "--where", "id > 2", "--limit", 6)
    ended = cli.run("generate", jsonl(tmp_path / "in.jsonl", rows), "-o", out, *words, *more)
    assert ended.returncode == 1, ended.stderr
    made = read_lines(out)
    assert [(row["id"], row["sample"]) for row in made] == [(number, sample) for number in (3, 4, 5, 6, 8) for sample in (0, 1)]
    assert all(isinstance(row["title"], str) and isinstance(row["stars"], int) for row in made)
    assert [row["tag"] for row in made] == [f"#{row['id']}" for row in made]
    assert len({row["outline"] for row in made}) == 10, "samples of a row have seeds of their own"
    assert list(made[0])[:5] == ["id", "tag", "sample", "outline", "outline_finish_reason"]
    aside = read_lines(out.with_suffix(".invalid.jsonl"))
    assert [(row["row"], row["sample"], row["step"]) for row in aside] == [(8, 0, "outline"), (8, 1, "outline")]
    assert "maximum context length" in aside[0]["reason"]
    assert str(out.with_suffix(".invalid.jsonl")) in ended.stderr


def test_answers_that_are_not_as_the_schema_asks_are_kept_aside(embedded: Settings, tmp_path: Path) -> None:
    cli, out = Commands(embedded), tmp_path / "out.parquet"
    schema = {"type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 5}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    words = ("--prompt", "{{ id }}", "--schema", tmp_path / "schema.json", "--max-tokens", "3", "--name", "found")
    rows = jsonl(tmp_path / "in.jsonl", [{"id": number} for number in range(3)])
    ended = cli.run("generate", rows, "-o", out, *words)
    assert ended.returncode == 1
    table = pq.read_table(out)
    assert table.num_rows == 0
    assert table.schema.field("found_words").type == pa.list_(pa.string())
    aside = read_lines(out.with_suffix(".invalid.jsonl"))
    assert [row["input"] for row in aside] == [{"id": 0}, {"id": 1}, {"id": 2}]
    assert all(row["reason"].startswith("not JSON") and row["reason"].endswith("cut at max_tokens") for row in aside)
    assert all(row["text"] for row in aside)


def test_seeds_make_it_repeatable_whatever_the_order(embedded: Settings, parquet: Path, tmp_path: Path) -> None:
    words = ("generate", parquet, *TWO_COLUMNS, "--seed", 11, "--n", 2)
    for name, changes in (("one", {}), ("two", {"shard_rows": 3, "shards_in_flight": 4, "data_dir": tmp_path / "other"})):
        order = () if name == "one" else ("--prefix-window", 1)
        Commands(embedded.model_copy(update=changes)).json(*words, "-o", tmp_path / f"{name}.jsonl", *order)
    one, two = ([(row["text"], row["seed"]) for row in read_lines(tmp_path / f"{name}.jsonl")] for name in ("one", "two"))
    assert one == two
    assert len(set(one)) == len(one)


def test_killed_twice_every_row_is_there_once_and_in_order(embedded: Settings, tmp_path: Path) -> None:
    slow = embedded.model_copy(update={"scripted_delay_ms": 40.0, "max_num_seqs": 8})
    journal, out = tmp_path / "journal", tmp_path / "out.jsonl"
    cli = Commands(slow, **{JOURNAL_VARIABLE: str(journal)})
    rows = jsonl(tmp_path / "in.jsonl", [{"id": number, "group": number % 5} for number in range(300)])
    words = ("generate", rows, "-o", out, "--step", "first={{ group }} {{ id }}", "--prompt", "{{ first }}", "--max-tokens", "3")
    for answered in (60, 380):
        with cli.started(*words) as process:
            wait_for(lambda answered=answered: journal.exists() and done(journal) > answered)  # type: ignore[misc]
            left = family(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert gone(left), "a child outlived the command"
        assert not out.exists()
        assert not list(tmp_path.glob("*.part"))
    ended = cli.run(*words)
    assert ended.returncode == 0, ended.stderr
    assert "continuing the interrupted run" in ended.stderr
    made = read_lines(out)
    assert [row["id"] for row in made] == list(range(300))
    assert all(row["text"] and row["first"] for row in made)
    with opened(slow) as ctx:
        assert [batch.request_counts.completed for batch in batches.page(ctx)] == [300, 300]
    requests = [
        line.split()[-1].rsplit("-", 1)[0] for line in journal.read_text().splitlines() if " answered " in line
    ]  # without the attempt
    assert len(set(requests)) == 600
    assert sum(Counter(requests).values()) - 600 <= 2 * slow.shard_rows, "more was generated again than was in flight"


def done(journal: Path) -> int:
    return journal.read_text().count(" answered ")


def test_an_interrupted_command_says_so_and_a_changed_one_begins_anew(embedded: Settings, tmp_path: Path) -> None:
    slow = embedded.model_copy(update={"scripted_delay_ms": 200.0, "max_num_seqs": 1})
    journal, out = tmp_path / "journal", tmp_path / "out.jsonl"
    cli = Commands(slow, **{JOURNAL_VARIABLE: str(journal)})
    rows = jsonl(tmp_path / "in.jsonl", [{"id": number} for number in range(100)])
    with cli.started("generate", rows, "-o", out, "--prompt", "{{ id }}") as process:
        wait_for(lambda: journal.exists() and done(journal) > 2)
        process.send_signal(signal.SIGINT)
        assert "interrupted: the same command continues where this one stopped" in process.communicate(timeout=60)[1]
        assert process.returncode == 130
    fast = Commands(embedded)
    ended = fast.run("generate", rows, "-o", out, "--prompt", "Now {{ id }}")
    assert ended.returncode == 0, ended.stderr
    assert "the template changed since the interrupted run" in ended.stderr
    assert len(read_lines(out)) == 100
    with opened(embedded) as ctx:
        assert [batch.status in TERMINAL for batch in batches.page(ctx)].count(True) >= 1
        assert "cancel" in batches.page(ctx)[1].status


def test_rows_through_python(embedded: Settings, tmp_path: Path) -> None:
    settings = embedded.model_dump(include={"data_dir", "engine", "sweep_seconds"})
    rows = [{"id": number} for number in range(5)]
    made = specbatch.generate(rows, prompt="{{ id }}", sampling={"max_tokens": 4}, progress=False, **settings)
    assert [row["id"] for row in made] == [0, 1, 2, 3, 4]
    assert len(made) == 5
    assert all(row["text"] for row in made)
    again = specbatch.generate(rows, prompt="{{ id }}", sampling={"max_tokens": 4}, progress=False, **settings)
    assert again.found
    assert list(again) == list(made)
    written = specbatch.generate(rows, tmp_path / "out.parquet", prompt="{{ id }}", progress=False, **settings)
    assert pq.read_table(written.path)["id"].to_pylist() == [0, 1, 2, 3, 4]


PROMPT = ("--prompt", "{{ id }}")
BAD: dict[str, tuple[str, bytes, tuple[str, ...], str]] = {
    "missing column": ("in.jsonl", b'{"id":1}\n{"no":1}\n', PROMPT, "in.jsonl, row 2: --prompt: there is no column 'id'"),
    "null column": ("in.jsonl", b'{"id":null}\n', PROMPT, "in.jsonl, row 1: --prompt: column 'id' is null"),
    "binary csv": ("in.csv", b"id\n\x80\x81\n", PROMPT, "is not UTF-8"),
    "ragged csv": ("in.csv", b"id,b\n1,2\n3\n", PROMPT, "in.csv, row 2: 1 values for 2 columns (column 'b' is missing)"),
    "parquet cut short": ("in.parquet", b"PAR1\x00\x00", PROMPT, "damaged, cut short"),
    "no rows": ("in.csv", b"id\n", PROMPT, "in.csv: no rows: there is nothing to generate"),
    "no rows left": ("in.jsonl", b'{"id":1}\n', (*PROMPT, "--where", "id > 1"), "no row is left by --where"),
    "no schema": ("in.jsonl", b'{"id":1}\n', (*PROMPT, "--schema", "bad.json"), "bad.json is not valid JSON Schema"),
    "no output folder": ("in.jsonl", b'{"id":1}\n', (*PROMPT, "-o", "absent/out.jsonl"), "there is no directory"),
    "output is input": ("in.jsonl", b'{"id":1}\n', (*PROMPT, "-o", "in.jsonl"), "is the input"),
    "the file beside it is input": (
        "in.invalid.jsonl",
        b'{"id":1}\n',
        (*PROMPT, "-o", "in.jsonl"),
        "beside the output, and that is the input",
    ),
    "output of no kind": ("in.jsonl", b'{"id":1}\n', (*PROMPT, "-o", "out.csv"), "name the output *.jsonl or *.parquet"),
    "template": ("in.jsonl", b'{"id":1}\n', ("--prompt", "{{ id"), "--prompt, line 1 of the template"),
    "nothing asked": ("in.jsonl", b'{"id":1}\n', (), "nothing to generate"),
    "column taken": ("in.jsonl", b'{"id":1,"text":2}\n', PROMPT, "row 1: the input has a column 'text'"),
    "parameter": ("in.jsonl", b'{"id":1}\n', (*PROMPT, "--param", "stop"), "--param stop: write it as KEY=JSON"),
    "step without a name": ("in.jsonl", b'{"id":1}\n', (*PROMPT, "--step", "x"), "--step x: write it as NAME=TEMPLATE"),
    "mixed types": ("in.jsonl", b'{"id":1}\n{"id":"x"}\n', (*PROMPT, "-o", "out.parquet"), "column 'id' holds values of several types"),
    "nested in parquet": ("in.jsonl", b'{"id":{"a":1}}\n{"id":{"a":"x"}}\n', (*PROMPT, "-o", "out.parquet"), "column 'id' holds values"),
    "object without fields": ("in.jsonl", b'{"id":1,"m":{}}\n', (*PROMPT, "-o", "out.parquet"), "column 'm' cannot be in Parquet"),
    "half of a character": ("in.jsonl", b'{"id":1,"t":"\\ud83d"}\n', (*PROMPT, "-o", "out.parquet"), "column 't' holds half of a"),
    "not there": ("other.jsonl", b'{"id":1}\n', PROMPT, "there is no file or folder in.jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, content, words, said = BAD[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBATCH_ENGINE", "scripted")
    Path(file).write_bytes(content)
    Path("bad.json").write_text('{"type": "objekt"}')
    given = "in.jsonl" if name == "not there" else file
    output = () if "-o" in words else ("-o", "out.jsonl")
    ended = CliRunner().invoke(app, ["--data-dir", "home", "generate", given, *output, *words], catch_exceptions=False)
    assert ended.exit_code == 2, ended.stderr
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*out*"))
    assert Path(file).read_bytes() == content
    if Path("home/specbatch.db").exists():
        with opened(Settings(data_dir=Path("home"))) as ctx:
            assert batches.page(ctx) == []
        assert not list(Path("home/files").glob("*"))
