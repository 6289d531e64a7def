"""Templates: sandboxed, and loud about what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbatch.datasets.templates import Condition, Template, chat
from specbatch.errors import InvalidRequest, SpecbatchError, UsageError

ROW: dict[str, Any] = {"title": "A", "tags": ["x", "ü"], "who": {"name": "Ana"}, "n": 3, "gap": None, "raw": b"\x00", "odd name": "o"}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ title }}: {{ n + 1 }}", "A: 4"),
        ("{{ tags }} {{ who }}", '["x", "ü"] {"name": "Ana"}'),
        ("{{ who.name }} {{ row['odd name'] }} {{ row.title }}", "Ana o A"),
        ("{{ gap or 'nothing' }}", "nothing"),
        ("{% if absent is defined %}{{ absent }}{% else %}-{% endif %}", "-"),
        ("{% for tag in tags %}[{{ tag }}]{% endfor %}", "[x][ü]"),
    ],
)
def test_render(source: str, text: str) -> None:
    assert Template(source, "--prompt").render(ROW, "row 1") == text


@pytest.mark.parametrize(
    ("source", "said", "column"),
    [
        ("{{ titel }}", "in.csv, row 7: --prompt: there is no column 'titel'; did you mean 'title' (its columns: title, tags", "titel"),
        ("{{ gap }}", "row 7: --prompt: column 'gap' is null: write {{ column or '' }}", "gap"),
        ("{{ raw }}", "row 7: --prompt: column 'raw' is bytes: it has no form as text", "raw"),
        ("{{ who.age }}", "row 7: --prompt: 'dict object' has no attribute 'age'", None),
        ("{{ title + 1 }}", "row 7: --prompt: TypeError: can only concatenate str", None),
        ("{{ ''.__class__.__mro__ }}", "is unsafe: templates are sandboxed", None),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big", None),
        ("{% do tags.append(1) %}", "line 1 of the template", None),
        ("{{ tags.append(1) }}", "templates are sandboxed", None),
    ],
)
def test_what_is_wrong_is_named(source: str, said: str, column: str | None) -> None:
    with pytest.raises(SpecbatchError) as caught:
        Template(source, "--prompt").render(ROW, "in.csv, row 7")
    assert said in caught.value.message
    assert caught.value.param == column
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("source", ["{{ a", "{% if %}", "{{ a | nofilter }}"])
def test_a_syntax_error_is_told_before_any_row(source: str) -> None:
    with pytest.raises(UsageError, match="--prompt, line 1 of the template"):
        Template(source, "--prompt")


def test_conditions() -> None:
    assert Condition("n > 2 and title == 'A'").holds(ROW, "row 1")
    assert not Condition("gap is not none").holds(ROW, "row 1")
    assert Condition("row['odd name'] == 'o'").holds(ROW, "row 1")
    with pytest.raises(InvalidRequest, match="row 1: --where: there is no column 'm'"):
        Condition("m > 2").holds(ROW, "row 1")
    with pytest.raises(InvalidRequest, match="row 1: --where: TypeError"):
        Condition("title > 2").holds(ROW, "row 1")
    with pytest.raises(UsageError, match="--where, line 1"):
        Condition("n >")


def test_a_chat_of_a_prompt_and_a_system_message(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Hi {{ title }}")
    assert chat(f"@{tmp_path / 'p.txt'}", "Be {{ n }}").render(ROW, "row 1") == [
        {"role": "system", "content": "Be 3"},
        {"role": "user", "content": "Hi A"},
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat.json", '[{"role":"system","content":"S"},{"role":"user","content":"{{ title }}"}]'),
        ("chat.json", '{"messages":[{"role":"system","content":"S"},{"role":"user","content":"{{ title }}"}]}'),
        ("chat.toml", '[[messages]]\nrole = "system"\ncontent = "S"\n[[messages]]\nrole = "user"\ncontent = """{{ title }}"""\n'),
    ],
)
def test_a_file_may_hold_a_chat(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    found = chat(f"@{tmp_path / name}")
    assert found.render(ROW, "row 1") == [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}]
    assert found.source() == [["system", "S"], ["user", "{{ title }}"]]
    with pytest.raises(UsageError, match="has a system message of its own"):
        chat(f"@{tmp_path / name}", "another")


@pytest.mark.parametrize("content", ["[]", "{", '[{"role":"user"}]', '[{"role":"king","content":"x"}]', '[{"role":"user","content":1}]'])
def test_a_file_that_holds_no_chat(tmp_path: Path, content: str) -> None:
    (tmp_path / "chat.json").write_text(content)
    with pytest.raises(UsageError, match=r"chat\.json must hold messages"):
        chat(f"@{tmp_path / 'chat.json'}")


def test_a_template_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"--prompt: cannot read absent\.txt"):
        chat("@absent.txt")
