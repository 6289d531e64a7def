"""JSON Schemas for answers: refused when they are none, and true to their columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from specbatch.datasets.schema import AnswerSchema, read
from specbatch.errors import UsageError

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": ["integer", "null"]},
        "score": {"type": "number"},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "home": {"$ref": "#/$defs/place"},
        "mood": {"enum": ["good", "bad"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SCHEMA = AnswerSchema(PERSON, "person.json")


def test_columns_have_the_types_of_the_properties() -> None:
    assert SCHEMA.fields == {
        "name": pa.string(),
        "age": pa.int64(),
        "score": pa.float64(),
        "ok": pa.bool_(),
        "tags": pa.list_(pa.string()),
        "home": pa.struct([("city", pa.string())]),
        "mood": pa.string(),
        "note": pa.string(),
        "any": pa.string(),
    }


def test_an_answer_becomes_columns() -> None:
    answer = {"name": "Ana", "age": 3.0, "score": 1, "home": {"city": "Lisbon"}, "any": [1, {"x": "ü"}]}
    value, why = SCHEMA.parse(json.dumps(answer))
    assert why is None
    expected = dict.fromkeys(SCHEMA.fields) | answer | {"age": 3, "any": '[1, {"x": "ü"}]'}
    assert value == expected
    assert [type(value[name]) for name in ("age", "score")] == [int, float]
    for name, kind in SCHEMA.fields.items():
        assert pa.array([value[name]], kind).to_pylist() == [expected[name]]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"name": "An', "not JSON"),
        ('{"name": NaN}', "not JSON"),
        ('{"name": 1}', "not as the schema asks: 1 is not of type 'string' (at $.name)"),
        ('{"age": 1}', "not as the schema asks: 'name' is a required property"),
        ('{"name":"A","age":9223372036854775808}', "does not fit its column: 9223372036854775808 needs more than 64 bits"),
        ("[" * 100_000, "not JSON"),
        ('{"name":"A","score":1e999}', "not JSON: the number 1e999 is too large"),
        ('{"name":"A","score":%s}' % ("9" * 401), "does not fit its column: int too large"),
    ],
)
def test_an_answer_that_is_none_says_why(text: str, why: str) -> None:
    value, told = SCHEMA.parse(text)
    assert value is None
    assert told is not None
    assert why in told


BARE: dict[str, Any] = {"properties": {"n": {"type": "integer"}}}  # without a type it holds for whatever is no object


@pytest.mark.parametrize(
    ("document", "text", "why"),
    [
        (BARE, "5", "does not fit its column: the columns are properties of an object"),
        (BARE, "null", "does not fit its column: the columns are properties of an object"),
        ({"type": "number", "multipleOf": 0.5}, "1e999", "not JSON: the number 1e999 is too large"),
        ({"type": "number", "multipleOf": 0.1}, "9" * 401, "cannot be checked against the schema: OverflowError"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "5", "cannot be checked against the schema: RecursionError"),
    ],
)
def test_an_odd_answer_is_told_and_never_raised(document: dict[str, Any], text: str, why: str) -> None:
    value, told = AnswerSchema(document, "s").parse(text)
    assert value is None
    assert told is not None
    assert why in told


@pytest.mark.parametrize(
    "document",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/absent"}}},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, {"$ref": "https://example.org/other.json"}]}},
        {"type": "object", "properties": {"a": {"$dynamicRef": "#absent"}}},
    ],
)
def test_a_reference_that_leads_nowhere_is_told_before_anything_is_generated(document: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"s\.json: the reference '.*' leads nowhere in it: put what it means under \$defs"):
        AnswerSchema(document, "s.json")


def test_references_that_lead_somewhere_are_followed() -> None:
    inner = {"$id": "inner", "type": "object", "$defs": {"q": {"type": "integer"}}, "properties": {"z": {"$ref": "#/$defs/q"}}}
    whole = {"$id": "http://example.org/s", "type": "object", "properties": {"p": {"$ref": "inner"}}, "$defs": {"i": inner}}
    schema = AnswerSchema(whole | {"examples": [{"$ref": "no reference, but data"}]}, "s")
    assert schema.parse('{"p":{"z":1}}')[1] is None
    assert "'x' is not of type 'integer'" in (schema.parse('{"p":{"z":"x"}}')[1] or "")


def test_a_schema_that_is_no_object_is_one_column() -> None:
    labels = AnswerSchema({"type": "array", "items": {"type": "integer"}}, "s")
    assert (labels.is_object, labels.whole) == (False, pa.list_(pa.int64()))
    assert labels.parse("[1,2]") == ([1, 2], None)


def test_a_schema_that_refers_to_itself_is_text_where_it_does() -> None:
    both = {"left": {"$ref": "#"}, "right": {"$ref": "#/$defs/tree"}}
    tree = {"type": "object", "properties": both, "$defs": {"tree": {"type": "object", "properties": both}}}
    fields = AnswerSchema(tree, "s").fields
    assert fields["left"] == pa.string()
    assert fields["right"] == pa.struct([("left", pa.string()), ("right", pa.string())])
    circle = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert AnswerSchema(circle, "s").fields == {"a": pa.string()}
    value, why = AnswerSchema(tree, "s").parse('{"left":{"left":{}},"right":{}}')
    assert (value, why) == ({"left": '{"left": {}}', "right": {"left": None, "right": None}}, None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON Schema, which is an object"),
        ('{"type": "objekt"}', "is not valid JSON Schema: 'objekt' is not valid"),
        ('{"type": "object"}', "names no properties"),
        ('{"enum": [NaN]}', "s.json holds a value that JSON has no form for: Out of range float values"),
    ],
)
def test_what_is_no_schema_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        read(tmp_path / "s.json")
    assert said in caught.value.message
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "absent.json")
