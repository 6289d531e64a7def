"""A JSON Schema for answers: what the engine is held to, what each answer is checked against, and the columns it becomes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from specbatch.errors import UsageError
from specbatch.lines import compact

SCALARS = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(), "null": pa.null()}
MOST_REFERENCES = 32  # one behind the other; more are a circle
_INT64 = 2**63


class AnswerSchema:
    """`fields`: column -> Arrow type. An object's properties are the columns; any other schema gives one column, named by the caller."""

    def __init__(self, document: Mapping[str, Any], name: str) -> None:
        """Raises UsageError for what is not JSON Schema, or refers to what is not in it; `name` is what messages call it."""
        self.document = dict(document)
        try:
            compact(self.document)
        except (TypeError, ValueError, RecursionError) as wrong:
            raise UsageError(f"{name} holds a value that JSON has no form for: {wrong}") from None
        kind = validator_for(document, default=Draft202012Validator)
        try:
            kind.check_schema(document)
        except SchemaError as wrong:
            raise UsageError(f"{name} is not valid JSON Schema: {wrong.message} (at {wrong.json_path})") from None
        lost = next(_unresolvable(document, str(kind.META_SCHEMA.get("$schema"))), None)
        if lost is not None:
            raise UsageError(f"{name}: the reference {lost!r} leads nowhere in it: put what it means under $defs, and refer to that")
        self._validator = kind(document, registry=Registry())  # the default one asks the network for what it does not know
        root = _resolved(document, document)
        properties = root.get("properties", {})
        self.is_object = root.get("type") == "object" or bool(properties)
        if self.is_object and not properties:
            raise UsageError(f"{name} names no properties: list them, each becomes a column")
        self.fields = (
            {column: _type(part, document, frozenset({id(root)})) for column, part in properties.items()} if self.is_object else {}
        )
        self.whole = _type(root, document)

    def response_format(self) -> dict[str, Any]:
        """OpenAI's parameter that holds an engine to the schema."""
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.document, "strict": True}}

    def parse(self, text: str) -> tuple[Any, str | None]:
        """(value, None) of an answer, or (None, why it is not what the schema asks for)."""
        try:
            value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError) as wrong:
            return None, f"not JSON: {wrong}"
        try:
            failure = best_match(self._validator.iter_errors(value))
        except Exception as wrong:  # whatever the library meets: a number that overflows, a circle of references
            return None, f"cannot be checked against the schema: {type(wrong).__name__}: {wrong}"
        if failure is not None:
            return None, f"not as the schema asks: {failure.message} (at {failure.json_path})"
        try:
            return self._typed(value), None
        except (ValueError, TypeError, OverflowError, RecursionError) as wrong:
            return None, f"does not fit its column: {wrong}"

    def _typed(self, value: Any) -> Any:
        if not self.is_object:
            return _fit(value, self.whole)
        if not isinstance(value, dict):
            raise ValueError("the columns are properties of an object, and the answer is none")
        return {column: _fit(value.get(column), kind) for column, kind in self.fields.items()}


def read(path: Path, what: str = "--schema") -> AnswerSchema:
    """Raises UsageError for a file that cannot be read, is no JSON, or is no JSON Schema."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise UsageError(f"{what}: cannot read {path}: {failure.strerror}") from None
    except ValueError as wrong:
        raise UsageError(f"{what}: {path} is not JSON: {wrong}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{what}: {path} must hold a JSON Schema, which is an object")
    return AnswerSchema(document, str(path))


def _type(schema: Any, root: Mapping[str, Any], above: frozenset[int] = frozenset()) -> pa.DataType:
    """The Arrow type that holds every value of a schema; JSON text where there is none. `above`: the schemas that this one is part of."""
    part = _resolved(schema, root)
    if id(part) in above:
        return pa.string()  # it refers to itself: no type is that deep
    above = above | {id(part)}
    kinds = part.get("type")
    if isinstance(kinds, list):
        rest = [kind for kind in kinds if kind != "null"]
        kinds = rest[0] if len(rest) == 1 else None
    for choice in ("anyOf", "oneOf"):
        options = [option for option in part.get(choice, []) if _resolved(option, root).get("type") != "null"]
        if kinds is None and len(options) == 1:
            return _type(options[0], root, above)
    if kinds in SCALARS:
        return SCALARS[kinds]
    if kinds == "array" and isinstance(part.get("items"), dict):
        return pa.list_(_type(part["items"], root, above))
    if kinds == "object" and part.get("properties"):
        return pa.struct([(name, _type(each, root, above)) for name, each in part["properties"].items()])
    return pa.string()


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema behind its local references."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        found: Any = root
        for step in reference.split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
        schema = found
    return {}


def _unresolvable(document: Mapping[str, Any], dialect: str) -> Iterator[str]:
    """The references in a schema to what is not in it."""
    root = specification_with(dialect, default=DRAFT202012).create_resource(document)
    left: list[tuple[Resource[Any], Any]] = [(root, Registry[Any]().with_resource("", root).resolver_with_root(root))]
    while left:
        part, resolver = left.pop()
        for name in ("$ref", "$dynamicRef"):
            reference = part.contents.get(name) if isinstance(part.contents, Mapping) else None
            if isinstance(reference, str):
                try:
                    resolver.lookup(reference)
                except Unresolvable:
                    yield reference
        left += [(each, resolver.in_subresource(each)) for each in part.subresources()]


def _fit(value: Any, kind: pa.DataType) -> Any:
    """A value of a schema as its column holds it. Raises ValueError for an integer of more than 64 bits."""
    if value is None:
        return None
    if pa.types.is_int64(kind):
        if not -_INT64 <= value < _INT64:
            raise ValueError(f"{value} needs more than 64 bits")
        return int(value)
    if pa.types.is_float64(kind):
        return float(value)
    if pa.types.is_list(kind):
        return [_fit(each, kind.value_type) for each in value]
    if pa.types.is_struct(kind):
        return {field.name: _fit(value.get(field.name), field.type) for field in kind}
    return json.dumps(value, ensure_ascii=False) if pa.types.is_string(kind) and not isinstance(value, str) else value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
