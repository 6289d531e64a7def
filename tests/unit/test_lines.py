"""Output lines: a stored body is spliced in as it is, and the line stays one line of valid JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from specbatch.lines import answer, compact, dump, parse

BODIES: list[Any] = [
    {"text": 'a "quoted"\nline\r\u2028 and \\ and \0 and \u00e9 \U0001f600'},
    {"lone": "\ud800", "huge": 2**80, "deep": [[[{}]]], "small": 1e-320},
    {1: "a key that is no string", None: True},
    [],
    "",
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("custom_id", ["a", "\u00e9\n\U0001f600", ""])
def test_a_line_is_one_line_of_json(body: object, custom_id: str) -> None:
    line = dump("batch_1f", 7, custom_id, 200, compact(body), None, None)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert json.loads(line) == {
        "id": "batch_req_1f_7",
        "custom_id": custom_id or None,
        "response": {"status_code": 200, "request_id": "req_1f_7", "body": json.loads(json.dumps(body))},
        "error": None,
    }


def test_a_row_without_a_response_has_an_error() -> None:
    row = {"job_id": "batch_1f", "row_index": 0, "custom_id": "a", "status_code": None, "body": None}
    line = answer({**row, "error_code": "batch_expired", "error_message": 'too "late"\n', "sequence": 3})
    assert line == {
        "id": "batch_req_1f_0",
        "custom_id": "a",
        "response": None,
        "error": {"code": "batch_expired", "message": 'too "late"\n'},
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, {"x": [-math.inf]}])
def test_what_json_does_not_know_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        compact(value)


@pytest.mark.parametrize("value", [{"x": object()}, {(1, 2): 3}, b"bytes"])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        compact(value)


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_a_constraint_that_vllm_would_ignore_is_refused(name: str) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "a"}], name: "b"}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()
    _, (problem,) = parse(line, 3, "/v1/chat/completions", 10_000)
    assert (problem.code, problem.param, problem.line) == ("unsupported_parameter", f"body.{name}", 3)
    assert '"structured_outputs": {"' + name.removeprefix("guided_") in problem.message
