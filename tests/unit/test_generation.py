"""A run against services in memory: cut off at every call it makes, it ends with every row once, in order."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from specbatch.client import Client
from specbatch.datasets import source
from specbatch.datasets.writers import Destination
from specbatch.domain import JobStatus
from specbatch.errors import Conflict, InvalidRequest, ServiceUnavailable, UsageError
from specbatch.generation.generated import Generated, generate, produce
from specbatch.generation.recipe import Recipe, recipe_of
from specbatch.generation.requests import Parts
from specbatch.generation.spool import Spool
from specbatch.settings import Settings
from tests.generation_fixtures import Services

ROWS = 11


class Cut(BaseException):
    """As a kill: nothing in the product catches it."""


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Services:
    """What every client connects to."""
    made = Services()

    def connect(client: Client, settings: Settings, url: str | None, api_key: str | None) -> None:
        client.settings, client.transport = settings, made

    monkeypatch.setattr(Client, "_connect", connect)
    monkeypatch.setattr("specbatch.client.batch.PAGE_ROWS", 2)
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": number, "group": number % 3}) + "\n" for number in range(ROWS)))
    return path


def recipe(**changes: Any) -> Recipe:
    words: dict[str, Any] = {
        "prompt": "{{ group }} asks {{ outline }}",
        "system": None,
        "steps": {"outline": "{{ id }}?"},
        "columns": {},
        "name": "text",
        "schema": None,
        "samples": 2,
        "seed": 5,
        "keep": ["id"],
        "where": None,
        "limit": None,
        "mode": None,
        "sampling": {},
    }
    return recipe_of(**(words | changes))


def make(
    tmp_path: Path, data: Path, asked: Recipe, *, overwrite: bool = False, say: list[str] | None = None, out: str = "out.jsonl"
) -> Generated:
    said = say if say is not None else []
    settings = Settings(data_dir=tmp_path / "home", max_batch_rows=4)
    destination = Destination(tmp_path / out, [data])
    with source.opened(data) as dataset:
        return produce(settings, dataset, asked, destination, overwrite=overwrite, url=None, say=said.append, show=lambda *_: None)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


EXPECTED = [(number, sample, f"<{number}?>", f"<{number % 3} asks <{number}?>>") for number in range(ROWS) for sample in range(2)]


def columns(path: Path) -> list[tuple[int, int, str, str]]:
    return [(row["id"], row["sample"], row["outline"], row["text"]) for row in rows(path)]


def test_every_row_once_and_in_order(tmp_path: Path, data: Path, services: Services) -> None:
    made = make(tmp_path, data, recipe())
    assert columns(made.path) == EXPECTED
    assert len(made) == 2 * ROWS
    assert [row["id"] for row in made] == [number for number, *_ in EXPECTED]
    assert all(len(lines) <= 4 for lines in services.files.values())
    assert services.keys == {}


def test_cut_off_at_any_call_it_goes_on(tmp_path: Path, data: Path, services: Services) -> None:
    cuts = 0
    services.cut_at, services.cut = 1, Cut
    while True:
        services.calls = 0
        try:
            make(tmp_path, data, recipe())
            break
        except Cut:
            cuts += 1
            services.cut_at += 1
            assert not (tmp_path / "out.jsonl").exists()
            assert not list(tmp_path.glob("*.part"))
    assert cuts > 10
    assert columns(tmp_path / "out.jsonl") == EXPECTED
    asked = [custom_id for batch in services.batches.values() for custom_id in batch.answered]
    assert len(asked) == 2 * len(EXPECTED), "an answer was asked for twice"


def test_cut_off_once_at_each_call(tmp_path: Path, data: Path, services: Services) -> None:
    """Each run from the beginning, with one cut at another place."""
    make(tmp_path, data, recipe())
    for place in range(1, services.calls + 1):
        services.reset(cut_at=place, cut=Cut)
        home = tmp_path / str(place)
        home.mkdir()
        with pytest.raises(Cut):
            make(home, data, recipe())
        services.cut_at = 0
        make(home, data, recipe())
        assert columns(home / "out.jsonl") == EXPECTED


def test_seeds_belong_to_rows_whatever_the_selection(tmp_path: Path, data: Path, services: Services) -> None:
    make(tmp_path, data, recipe())
    whole = {(row["id"], row["sample"]): (row["seed"], row["outline_seed"]) for row in rows(tmp_path / "out.jsonl")}
    assert len({seed for pair in whole.values() for seed in pair}) == 4 * ROWS
    assert all(0 <= seed < 2**53 for pair in whole.values() for seed in pair)
    make(tmp_path, data, recipe(where="id > 4", limit=3), overwrite=True)
    part = {(row["id"], row["sample"]): (row["seed"], row["outline_seed"]) for row in rows(tmp_path / "out.jsonl")}
    assert list(part) == [(number, sample) for number in (5, 6, 7) for sample in (0, 1)]
    assert all(whole[key] == seeds for key, seeds in part.items())


def test_a_complete_output_is_not_made_again(tmp_path: Path, data: Path, services: Services) -> None:
    first = make(tmp_path, data, recipe())
    said: list[str] = []
    batches = len(services.batches)
    again = make(tmp_path, data, recipe(), say=said)
    assert again.found
    assert again.tally == first.tally
    assert "is complete already" in said[0]
    assert len(services.batches) == batches
    make(tmp_path, data, recipe(), overwrite=True)
    assert len(services.batches) == 2 * batches


def test_an_output_of_another_recipe_is_not_replaced_unasked(tmp_path: Path, data: Path, services: Services) -> None:
    make(tmp_path, data, recipe())
    with pytest.raises(UsageError, match=r"out\.jsonl exists: add --overwrite"):
        make(tmp_path, data, recipe(prompt="{{ outline }}"))
    (tmp_path / "home").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"out\.jsonl exists: add --overwrite"):
        make(tmp_path, data, recipe())


def test_an_output_that_something_else_made_meanwhile_is_not_replaced(
    tmp_path: Path, data: Path, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    services.cut_at, services.cut = 12, Cut
    with pytest.raises(Cut):
        make(tmp_path, data, recipe())
    services.cut_at = 0
    out.write_text("precious\n")
    with pytest.raises(UsageError, match=r"out\.jsonl was made by something else .*: move it, and give the same command again"):
        make(tmp_path, data, recipe())
    out.unlink()

    def meanwhile(*_: Any) -> str:
        out.write_text("precious too\n")
        return ""

    with monkeypatch.context() as patched:
        patched.setattr(Services, "get", lambda self, batch_id, get=Services.get: (meanwhile(), get(self, batch_id))[1])
        with pytest.raises(UsageError, match=r"out\.jsonl was made by something else"):
            make(tmp_path, data, recipe())
    assert out.read_text() == "precious too\n"
    out.unlink()
    said: list[str] = []
    make(tmp_path, data, recipe(), say=said)
    assert said[0].startswith("continuing the interrupted run")
    assert columns(out) == EXPECTED


def test_killed_when_the_output_is_in_place_it_goes_on(
    tmp_path: Path, data: Path, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: Any) -> None:
        raise Cut

    out, said = tmp_path / "out.jsonl", list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(Services, "let_go", cut)
        for _ in range(2):  # the second finds an output that is the first one's
            with pytest.raises(Cut):
                make(tmp_path, data, recipe(), say=said)
            assert columns(out) == EXPECTED
    assert said[-1].startswith("continuing the interrupted run")
    out.unlink()
    with monkeypatch.context() as patched:
        patched.setattr("specbatch.generation.run.Run.finish", cut)
        with pytest.raises(Cut):
            make(tmp_path, data, recipe())
    out.write_text("precious\n")  # what was this run's own once is not for ever
    with pytest.raises(UsageError, match="was made by something else"):
        make(tmp_path, data, recipe())
    out.unlink()
    make(tmp_path, data, recipe())
    assert columns(out) == EXPECTED


def test_a_complete_output_with_other_columns_is_not_what_is_asked_for(tmp_path: Path, data: Path, services: Services) -> None:
    make(tmp_path, data, recipe())
    for keep in (None, [], ["group"]):
        with pytest.raises(UsageError, match=r"out\.jsonl is complete, and --keep is not as it was: --overwrite"):
            make(tmp_path, data, recipe(keep=keep))
    assert make(tmp_path, data, recipe()).found
    make(tmp_path, data, recipe(keep=["group"]), overwrite=True)
    assert make(tmp_path, data, recipe(keep=["group"])).found


def test_what_a_killed_command_left_beside_the_output_goes(tmp_path: Path, data: Path, services: Services) -> None:
    (tmp_path / ".out.jsonl.0123abcd.part").mkdir()
    (tmp_path / ".out.jsonl.0123abcd.part" / "part-00000.jsonl").write_text("{}")
    (tmp_path / ".out.jsonl.4567cdef.part").write_text("{}")
    others = {".out.jsonl.mine.part", ".out.jsonl.2.jsonl.0123abcd.part", ".out.parquet.0123abcd.part"}
    for name in others:
        (tmp_path / name).write_text("{}")
    make(tmp_path, data, recipe())
    assert {path.name for path in tmp_path.glob(".*")} == others


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt": "{{ group }} {{ outline }}"}, "the template changed"),
        ({"sampling": {"temperature": 0.5}}, "the sampling changed"),
        ({"seed": 6, "where": "id > 1"}, "the sampling, selection of rows changed"),
    ],
)
def test_a_changed_recipe_begins_anew_and_says_so(
    tmp_path: Path, data: Path, services: Services, changes: dict[str, Any], named: str
) -> None:
    services.hold = True
    services.cut_at, services.cut = 12, Cut
    with pytest.raises(Cut):
        make(tmp_path, data, recipe())
    begun = set(services.batches)
    services.hold, services.cut_at = False, 0
    said: list[str] = []
    make(tmp_path, data, recipe(**changes), say=said)
    assert named in said[0]
    assert "a new run begins" in said[0]
    assert {services.batches[each].state.status for each in begun} == {JobStatus.CANCELLED}


def test_an_interrupted_overwrite_goes_on_and_keeps_the_old_output_until_the_end(tmp_path: Path, data: Path, services: Services) -> None:
    (tmp_path / "out.jsonl").write_text("precious\n")
    services.cut_at, services.cut = 12, Cut
    with pytest.raises(Cut):
        make(tmp_path, data, recipe(), overwrite=True)
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"
    services.cut_at = 0
    said: list[str] = []
    make(tmp_path, data, recipe(), overwrite=True, say=said)
    assert said[0].startswith("continuing the interrupted run")
    assert columns(tmp_path / "out.jsonl") == EXPECTED


def test_rows_of_a_cancelled_batch_are_asked_for_again(tmp_path: Path, data: Path, services: Services) -> None:
    services.cut_short = JobStatus.CANCELLED
    with pytest.raises(Conflict, match=r"was cancelled before all its rows were answered: the same command asks for the others again"):
        make(tmp_path, data, recipe())
    make(tmp_path, data, recipe())
    assert columns(tmp_path / "out.jsonl") == EXPECTED
    asked = [custom_id for batch in services.batches.values() for custom_id in batch.answered]
    assert len(asked) == 2 * len(EXPECTED), "rows of batches that were still to be read were asked for again"


def test_rows_of_a_batch_whose_window_passed_are_asked_for_in_another(tmp_path: Path, data: Path, services: Services) -> None:
    services.cut_short = JobStatus.EXPIRED
    make(tmp_path, data, recipe())
    assert columns(tmp_path / "out.jsonl") == EXPECTED
    asked = [custom_id for batch in services.batches.values() for custom_id in batch.answered]
    assert len(asked) == 2 * len(EXPECTED)


def test_a_refused_batch_says_why(tmp_path: Path, data: Path, services: Services) -> None:
    services.refuse = "The provided model 'm' is not supported"
    with pytest.raises(InvalidRequest, match="was refused: The provided model 'm' is not supported"):
        make(tmp_path, data, recipe())


def test_what_failed_in_one_step_is_not_asked_in_the_next(tmp_path: Path, data: Path, services: Services) -> None:
    services.fail = "<3?>"
    made = make(tmp_path, data, recipe(samples=1))
    assert made.invalid is not None
    assert [row["id"] for row in rows(made.path)] == [number for number in range(ROWS) if number != 3]
    assert rows(made.invalid) == [
        {"row": 4, "sample": 0, "step": "outline", "reason": "refused: it was told to fail", "text": None, "input": {"id": 3}}
    ]
    asked = [custom_id for batch in services.batches.values() for custom_id in batch.answered]
    assert len(asked) == 2 * ROWS - 1


def test_without_an_output_another_question_has_another_place(tmp_path: Path, services: Services) -> None:
    def asked(**changes: Any) -> Generated:
        words: dict[str, Any] = {"data_dir": tmp_path / "home", "model": "one", "prompt": "{{ id }}", "progress": False}
        return generate([{"id": 1, "x": 2}], **(words | changes))

    first = asked()
    assert [row["text"] for row in first] == ["<1>"]
    others: list[dict[str, Any]] = [{"model": "two"}, {"url": "http://a:1"}, {"url": "http://b:1"}, {"keep": []}, {"keep": ["id"]}]
    made = [asked(**changes) for changes in others]
    assert not any(each.found for each in made)
    assert len({each.path for each in (first, *made)}) == 6
    again = asked()
    assert (again.found, again.path) == (True, first.path)
    assert all(asked(**changes).found for changes in others)


SHAPED: dict[str, Any] = {"type": "object", "properties": {"word": {"type": "string"}, "size": {"type": "number"}}}


@pytest.mark.parametrize(
    ("out", "halves"),
    [("out.jsonl", True), ("out.parquet", False)],  # JSON has a form for half of a character, and Parquet has none
)
def test_an_odd_answer_goes_aside_alone(tmp_path: Path, data: Path, services: Services, out: str, halves: bool) -> None:
    services.answers = {str(number): f'{{"word":"w{number}","size":{number}}}' for number in range(ROWS)}
    services.answers |= {"2": '{"word":"\\ud83d","size":1}', "5": f'{{"size":{"9" * 401}}}', "7": '{"size":1e999}'}
    made = make(tmp_path, data, recipe(prompt="{{ id }}", steps={}, samples=1, schema=SHAPED), out=out)
    odd = [5, 7] if halves else [2, 5, 7]
    assert [(row["id"], row["size"]) for row in made if row["id"] != 2] == [(each, each) for each in range(ROWS) if each not in {2, *odd}]
    assert made.tally.rows == len(list(made)) == ROWS - len(odd)
    assert made.tally.aside == len(odd)
    assert made.invalid is not None
    aside = rows(made.invalid)
    assert [row["row"] for row in aside] == [each + 1 for each in odd]
    assert [row["text"] for row in aside] == [services.answers[str(each)] for each in odd]
    assert halves or "column 'word' of the output" in aside[0]["reason"]


def test_half_of_a_character_goes_aside(tmp_path: Path, data: Path, services: Services) -> None:
    services.answers = {"4": "a \ud83d"}
    made = make(tmp_path, data, recipe(prompt="{{ id }}", steps={}, samples=1))
    assert [row["id"] for row in made] == [number for number in range(ROWS) if number != 4]
    assert made.invalid is not None
    assert [row["reason"] for row in rows(made.invalid)] == ["the answer holds half of a character, which no file of text can: a \\ud83d"]


def test_an_input_that_changes_meanwhile_is_not_joined_to_answers_of_before(
    tmp_path: Path, data: Path, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data.read_text()

    def change(*_: Any) -> str:
        data.write_text(before.replace('"group": 1', '"group": 2'))
        return ""

    with monkeypatch.context() as patched:
        patched.setattr(Services, "attend", change)
        with pytest.raises(UsageError, match=r"in\.jsonl changed while answers to it were generated: put it back"):
            make(tmp_path, data, recipe())
    assert not (tmp_path / "out.jsonl").exists()
    data.write_text(before)
    make(tmp_path, data, recipe())
    assert columns(tmp_path / "out.jsonl") == EXPECTED


def test_a_row_at_fault_leaves_nothing_behind(tmp_path: Path, services: Services) -> None:
    data = tmp_path / "in.jsonl"
    data.write_text("".join(json.dumps({"id": number} if number != 9 else {"no": 9}) + "\n" for number in range(ROWS)))
    with pytest.raises(InvalidRequest, match=r"in\.jsonl, row 10: --keep: there is no column 'id'"):
        make(tmp_path, data, recipe(prompt="{{ id }}", steps={}))
    assert services.files == {}
    assert services.batches == {}
    assert not (tmp_path / "out.jsonl").exists()


def test_two_commands_do_not_write_one_output(tmp_path: Path, data: Path, services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*_: Any) -> None:
        with pytest.raises(UsageError, match=r"another command writes .*out\.jsonl right now"):
            make(tmp_path, data, recipe())

    monkeypatch.setattr(Services, "attend", meanwhile)
    make(tmp_path, data, recipe())


def test_a_damaged_spool_is_named(tmp_path: Path, data: Path, services: Services) -> None:
    make(tmp_path, data, recipe())
    [spool] = (tmp_path / "home" / "generate").glob("*.db")
    spool.write_bytes(b"no database at all" * 1000)
    with pytest.raises(ServiceUnavailable, match=rf"{spool}, where the answers for .*out\.jsonl are kept.* damaged, remove it"):
        make(tmp_path, data, recipe())
    spool.unlink()
    make(tmp_path, data, recipe(), overwrite=True)


def test_a_full_disk_is_told_and_the_same_command_goes_on(
    tmp_path: Path, data: Path, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(self: Spool, connection: sqlite3.Connection) -> None:
        """SQLite says of a file that may not grow what it says of a full disk."""
        connection.execute("PRAGMA max_page_count=1")
        self._sql = connection

    services.answers = {f"{number}?": "long " * 5000 for number in range(ROWS)}
    with monkeypatch.context() as patched:
        patched.setattr(Spool, "__init__", small)
        with pytest.raises(ServiceUnavailable, match=r"disk is full.* make room and give the same command again"):
            make(tmp_path, data, recipe())
    said: list[str] = []
    make(tmp_path, data, recipe(), say=said)
    assert said[0].startswith("continuing the interrupted run")
    assert len(rows(tmp_path / "out.jsonl")) == 2 * ROWS


def test_lines_that_begin_alike_stand_together(tmp_path: Path, data: Path, services: Services) -> None:
    asked = recipe(prompt="{{ group }} {{ id }}", steps={}, samples=1)
    settings = Settings(data_dir=tmp_path / "home")
    with source.opened(data) as dataset:
        produce(settings, dataset, asked, Destination(tmp_path / "out.jsonl"), overwrite=False, url=None, say=print, show=lambda *_: None)
    [lines] = services.files.values()
    groups = [line["body"]["messages"][0]["content"].split()[0] for line in lines]
    assert groups == sorted(groups)
    assert [row["id"] for row in rows(tmp_path / "out.jsonl")] == list(range(ROWS))


@pytest.mark.parametrize(("window", "part"), [(1, 100), (3, 100), (3, 5), (100, 4), (100, 100)])
def test_parts_hold_every_line_and_no_more_rows_than_they_may(window: int, part: int) -> None:
    lines = [(json.dumps({"x": number % 4}), number) for number in range(23)]
    found = [b"".join(chunks).decode().splitlines() for chunks in Parts(iter(lines), window, part)]
    positions = [[int(json.loads(line)["custom_id"]) for line in each] for each in found]
    assert sorted(position for each in positions for position in each) == list(range(23))
    assert all(len(each) <= part for each in positions)
    if window == 1:
        assert positions[0] == list(range(23))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": None, "steps": {}}, "nothing to generate: give --prompt, or --step NAME=TEMPLATE"),
        ({"sampling": {"temperature": 0}, "seed": None}, "--n 2 with --temperature 0 gives the same text 2 times"),
        ({"sampling": {"stream": True}}, "--param stream: this command sets it itself"),
        ({"columns": {"text": "x"}}, "two columns of the output would be named 'text'"),
        ({"name": "outline"}, "two columns of the output would be named 'outline'"),
        ({"sampling": {"temperature": math.nan}}, "--param temperature: Out of range float values are not JSON compliant"),
        ({"sampling": {"stop": {"a"}}}, "--param stop: Object of type set is not JSON serializable: give a value that JSON has a form for"),
        ({"limit": 0}, "--n and --limit are at least 1"),
    ],
)
def test_recipes_that_cannot_be_meant(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        recipe(**changes)
    assert said in caught.value.message
