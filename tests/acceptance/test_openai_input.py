"""Files as people send them, through the official client: each code of the validation table, and each body that real files contain."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Batch

from specbatch.context import opened
from specbatch.domain import Mode
from specbatch.lines import MOST_LEVELS
from specbatch.service import shards
from specbatch.service.files import FIRST_LINE_BYTES
from tests.server_fixtures import CHAT, MOST_ROWS, Server, jsonl, line, wait_until

ENDED = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def submit(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in line("x").items() if key != name}


def body_without(name: str) -> dict[str, Any]:
    return {**line("x"), "body": {key: value for key, value in line("x")["body"].items() if key != name}}


GOOD = line("good")
Expected = tuple[str, str | None, int | None]

# Lines of a file -> (code, param, line) of every entry in the batch's errors.
INVALID: dict[str, tuple[bytes, list[Expected]]] = {
    "not json": (jsonl(GOOD, "{nonsense"), [("invalid_json_line", None, 2)]),
    "a list": (jsonl(GOOD, "[1,2,3]"), [("invalid_json_line", None, 2)]),
    "null": (jsonl(GOOD, "null"), [("invalid_json_line", None, 2)]),
    "a string": (jsonl(GOOD, '"hello"'), [("invalid_json_line", None, 2)]),
    "a blank line between": (jsonl(GOOD, "", line("b")), [("invalid_json_line", None, 2)]),
    "NaN": (jsonl(GOOD, json.dumps(line("b", temperature=float("nan")))), [("invalid_json_line", None, 2)]),
    "1e999": (jsonl(GOOD, json.dumps(line("b", temperature=0.5)).replace("0.5", "1e999")), [("invalid_json_line", None, 2)]),
    "deep nesting": (
        jsonl(GOOD, json.dumps(line("b", x=0)).replace(": 0", ": " + "[" * 200 + "]" * 200)),
        [("invalid_json_line", None, 2)],
    ),
    "deeper than any parser": (jsonl(GOOD, "[" * 200_000), [("invalid_json_line", None, 2)]),
    "no custom_id": (jsonl(GOOD, without("custom_id")), [("missing_required_parameter", "custom_id", 2)]),
    "no method": (jsonl(GOOD, without("method")), [("missing_required_parameter", "method", 2)]),
    "no url": (jsonl(GOOD, without("url")), [("missing_required_parameter", "url", 2)]),
    "no body": (jsonl(GOOD, without("body")), [("missing_required_parameter", "body", 2)]),
    "a body that is a string": (jsonl(GOOD, {**line("b"), "body": "hi"}), [("invalid_type", "body", 2)]),
    "no model": (jsonl(GOOD, body_without("model")), [("invalid_request", "body.model", 2)]),
    "no messages": (jsonl(GOOD, body_without("messages")), [("invalid_request", "body.messages", 2)]),
    "another url": (jsonl(GOOD, line("b", url="/v1/completions")), [("invalid_url", "url", 2)]),
    "GET": (jsonl(GOOD, {**line("b"), "method": "GET"}), [("invalid_value", "method", 2)]),
    "an unknown model": (jsonl(GOOD, line("b", model="gpt-4o")), [("model_not_found", "body.model", 2)]),
    "streaming": (jsonl(GOOD, line("b", stream=True)), [("streaming_unsupported", "body.stream", 2)]),
    "a duplicate": (jsonl(GOOD, line("b"), line("good")), [("duplicate_custom_id", "custom_id", 3)]),
    "NUL in custom_id": (jsonl(GOOD, line("a\0")), [("invalid_type", "custom_id", 2)]),
    "a surrogate in custom_id": (jsonl(GOOD, line("\ud800")), [("invalid_type", "custom_id", 2)]),
    "a number as custom_id": (jsonl(GOOD, {**line("b"), "custom_id": 7}), [("invalid_type", "custom_id", 2)]),
    "too many": (jsonl(*(line(str(number)) for number in range(MOST_ROWS + 1))), [("too_many_requests", None, None)]),
    "all at once": (
        jsonl(line("a"), "nope", line("a"), line("b", model="gpt-4o", stream=True), without("custom_id")),
        [
            ("invalid_json_line", None, 2),
            ("duplicate_custom_id", "custom_id", 3),
            ("streaming_unsupported", "body.stream", 4),
            ("model_not_found", "body.model", 4),
            ("missing_required_parameter", "custom_id", 5),
        ],
    ),
}

# OpenAI's words, for those problems that have them.
MESSAGES = {
    "not json": "This line is not parseable as valid JSON.",
    "no custom_id": "Missing required parameter: 'custom_id'.",
    "no body": "Missing required parameter: 'body'.",
    "no model": "Model parameter is required.",
    "no messages": "Messages parameter is required.",
    "another url": "The URL provided for this request does not match the batch endpoint.",
    "an unknown model": "The provided model 'gpt-4o' is not supported by the Batch API.",
    "streaming": "Chat Completions: Streaming is not supported in the Batch API.",
}

# Lines of a file -> custom_id -> the status of its answer.
VALID: dict[str, tuple[bytes, dict[str, int]]] = {
    "separators that are no newlines": (
        b'{"custom_id":"a\xe2\x80\xa8b\xc2\x85c","method":"POST","url":"/v1/chat/completions",'
        b'"body":{"model":"default","messages":[{"role":"user","content":"x\xe2\x80\xa9y\x7f"}]}}\n',
        {"a\u2028b\u0085c": 200},
    ),
    "a byte order mark": (b"\xef\xbb\xbf" + jsonl(line("a")), {"a": 200}),
    "CRLF": (jsonl(line("a"), line("b")).replace(b"\n", b"\r\n"), {"a": 200, "b": 200}),
    "blank last lines": (jsonl(line("a")) + b"\n \r\n\n", {"a": 200}),
    "no last newline": (jsonl(line("a"), line("b")).rstrip(), {"a": 200, "b": 200}),
    "NUL in content": (jsonl(line("a", content="x\0y")), {"a": 200}),
    "a lone surrogate in content": (jsonl(line("a", content="\ud800"), line("b", content="😀")), {"a": 400, "b": 200}),
    "duplicate keys": (
        jsonl(GOOD) + jsonl(json.dumps(line("first")).replace('"custom_id": "first"', '"custom_id": "first", "custom_id": "last"')),
        {"good": 200, "last": 200},
    ),
    "max_tokens of zero and less": (
        jsonl(line("a", max_tokens=0), line("b", max_tokens=-5), line("c", max_tokens=5)),
        {"a": 400, "b": 400, "c": 200},
    ),
    "max_tokens beyond the context": (jsonl(line("a", max_tokens=10_000_000), line("b")), {"a": 400, "b": 200}),
    "null content": (
        jsonl(
            {
                **line("a"),
                "body": {"model": "default", "messages": [{"role": "assistant", "content": None}, {"role": "user", "content": "hi"}]},
            }
        ),
        {"a": 200},
    ),
    "many levels": (jsonl(json.dumps(line("a", x=0)).replace(": 0", ": " + "[" * (MOST_LEVELS - 3) + "]" * (MOST_LEVELS - 3))), {"a": 200}),
    "a long custom_id": (jsonl(line("é" * 512)), {"é" * 512: 200}),
    "constraints, tools and sampling": (
        jsonl(
            *(
                line(name, structured_outputs={name: value})
                for name, value in (("regex", "a+"), ("choice", ["a"]), ("grammar", "root ::= 'a'"))
            ),
            line("tools", tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"),
            line("sampling", n=2, seed=1, stop=["x"], logprobs=True, top_logprobs=2, presence_penalty=1, logit_bias={"7": -100}),
        ),
        {"regex": 200, "choice": 200, "grammar": 200, "tools": 200, "sampling": 200},
    ),
}


@pytest.fixture(scope="module")
def submitted(client: openai.OpenAI) -> dict[str, Batch]:
    """All of them at once: they are validated and run while the first ones are looked at."""
    return {name: submit(client, content) for name, (content, _) in (INVALID | VALID).items()}


@pytest.mark.parametrize("name", INVALID)
def test_every_offending_line_is_listed(client: openai.OpenAI, submitted: dict[str, Batch], name: str) -> None:
    batch = ended(client, submitted[name])
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert [(error.code, error.param, error.line) for error in batch.errors.data or []] == INVALID[name][1]
    assert all((error.message or "").startswith(MESSAGES.get(name, "")) and error.message for error in batch.errors.data or [])


def test_two_models_in_a_file(client: openai.OpenAI, server: Server) -> None:
    with opened(server.settings) as ctx:
        shards.alive(ctx, "of another model", model="org/other", names=["other"], modes=[Mode.PLAIN], withheld={}, mode=None)
    batch = ended(client, submit(client, jsonl(GOOD, line("b", model="other"))))
    assert batch.errors is not None
    (error,) = batch.errors.data or []
    assert (batch.status, error.code, error.param, error.line) == ("failed", "mismatched_model", "body.model", 2)
    assert error.message == "The model 'other' does not match the rest of the batch, which uses 'default'."


@pytest.mark.parametrize("name", VALID)
def test_every_good_line_is_answered(client: openai.OpenAI, submitted: dict[str, Batch], name: str) -> None:
    batch = ended(client, submitted[name])
    assert (batch.status, batch.errors) == ("completed", None)
    found: dict[str, int] = {}
    for file_id, good in ((batch.output_file_id, True), (batch.error_file_id, False)):
        for each in client.files.content(file_id).content.split(b"\n")[:-1] if file_id else []:
            answer = json.loads(each)
            found[answer["custom_id"]] = answer["response"]["status_code"]
            assert (answer["response"]["status_code"] < 400) is good
    assert found == VALID[name][1]


def test_a_file_without_requests(client: openai.OpenAI) -> None:
    """A short one is refused when it is uploaded; of a long one only the beginning is looked at then."""
    batch = ended(client, submit(client, b"\n" * (FIRST_LINE_BYTES + 1)))
    assert batch.errors is not None
    assert [(error.code, error.line) for error in batch.errors.data or []] == [("empty_file", None)]


def test_a_file_that_is_gone_before_it_is_read(client: openai.OpenAI, server: Server) -> None:
    reconciler = server.pid("reconciler")
    os.kill(reconciler, signal.SIGSTOP)
    try:
        batch = submit(client, jsonl(line("a")))
        client.files.delete(batch.input_file_id)
    finally:
        os.kill(reconciler, signal.SIGCONT)
    batch = ended(client, batch)
    assert batch.status == "failed"
    assert batch.errors is not None
    (error,) = batch.errors.data or []
    assert (error.code, error.param, error.line) == ("invalid_request", "file_id", None)
    assert error.message == f"Cannot find file {batch.input_file_id}, or it is not accessible"


def test_a_file_deleted_while_its_batch_runs(client: openai.OpenAI) -> None:
    batch = submit(client, jsonl(line("a"), line("b", metadata={"x-delay-ms": "1500"})))
    wait_until(lambda: client.batches.retrieve(batch.id).status != "validating")
    client.files.delete(batch.input_file_id)
    batch = ended(client, batch)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)


def test_the_same_file_in_two_batches(client: openai.OpenAI) -> None:
    first = submit(client, jsonl(line("a")))
    second = client.batches.create(input_file_id=first.input_file_id, endpoint=CHAT, completion_window="24h")
    first, second = ended(client, first), ended(client, second)
    assert (first.status, second.status) == ("completed", "completed")
    assert first.output_file_id != second.output_file_id


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "hi"}, "text_completion"),
        ("/v1/embeddings", {"input": "hi"}, "list"),
        ("/v1/responses", {"input": "hi"}, "response"),
        ("/v1/score", {"text_1": "hi", "text_2": ["a", "b"]}, "list"),
        ("/v1/rerank", {"query": "hi", "documents": ["a", "b"]}, None),
    ],
)
def test_other_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any], kind: str | None) -> None:
    request = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "default", **body}}
    batch = ended(client, submit(client, jsonl(request), endpoint=endpoint))
    assert batch.status == "completed"
    assert batch.output_file_id is not None
    answer = json.loads(client.files.content(batch.output_file_id).content)
    assert answer["response"]["body"].get("object") == kind
