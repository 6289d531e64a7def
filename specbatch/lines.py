"""Lines of batch files: requests in, outcomes out. Lines end at a newline byte and nowhere else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

# Endpoint -> the parameters it cannot do without, beside the model. /v1/score takes several pairs of them: the engine judges.
ENDPOINTS = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/embeddings": ("input",),
    "/v1/responses": ("input",),
    "/v1/score": (),
    "/v1/rerank": ("query", "documents"),
}
POOLED = frozenset({"/v1/embeddings", "/v1/score", "/v1/rerank"})  # they generate nothing: a draft has nothing to speed up
MOST_QUOTED = 100  # characters of a name, in a message
MOST_LEVELS = 128  # of lists and objects in each other: parsers after this one recurse, and each has a limit of its own


@dataclass(frozen=True, slots=True)
class Problem:
    """An entry of a batch's `errors.data`."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def entry(self) -> dict[str, Any]:
        return {"code": self.code, "message": storable(self.message), "param": storable(self.param or "") or None, "line": self.line}


@dataclass(frozen=True, slots=True)
class Request:
    custom_id: str
    model: str
    body: dict[str, Any]


def read(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes without the newline) of each line.

    A line longer than `max_bytes` comes cut, one byte over. Blank last lines are skipped.
    """
    with path.open("rb") as file:
        number = 0
        content = 0  # the number of the latest line that held something
        while line := file.readline(max_bytes + 1):
            number += 1
            cut = len(line) > max_bytes and not line.endswith(b"\n")
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not cut and not line.strip():
                continue
            for blank in range(content + 1, number):
                yield blank, b""
            content = number
            handed = [line]
            del line
            yield number, handed.pop()  # a line may be large: whoever reads it can let go of it
            while cut:
                rest = file.readline(max_bytes + 1)
                cut = len(rest) > max_bytes and not rest.endswith(b"\n")


def parse(line: bytes, number: int, endpoint: str, max_bytes: int) -> tuple[Request | None, list[Problem]]:
    """A line as a request, and everything that is wrong with it. The request comes too where only its body is at fault."""
    if len(line) > max_bytes:
        return None, [Problem("invalid_request", f"This line is longer than {max_bytes} bytes.", None, number)]
    value = load(line, number)
    if isinstance(value, Problem):
        return None, [value]
    problems = [
        Problem("missing_required_parameter", f"Missing required parameter: '{name}'.", name, number)
        for name in ("custom_id", "method", "url", "body")
        if value.get(name) is None
    ]
    problems += _envelope_problems(value, number, endpoint)
    body = value.get("body")
    if isinstance(body, dict):
        problems += _body_problems(body, number, endpoint)
    custom_id = value.get("custom_id")
    if not _is_storable(custom_id):
        return None, problems
    return Request(
        custom_id, str(body.get("model") or "") if isinstance(body, dict) else "", body if isinstance(body, dict) else {}
    ), problems


def load(line: bytes, number: int) -> dict[str, Any] | Problem:
    """The object that a line holds, or why it holds none. What Python would read and JSON does not know (NaN, infinity) is refused."""
    said = "This line is not parseable as valid JSON"
    try:
        # Given bytes, json would guess UTF-16 and UTF-32 too.
        value = _decode(line.decode())
    except _NotANumber as wrong:
        return Problem("invalid_json_line", f"{said}: {wrong}.", None, number)
    except (ValueError, RecursionError):
        return Problem("invalid_json_line", f"{said}.", None, number)
    if not isinstance(value, dict):
        return Problem("invalid_json_line", "This line is valid JSON, but not an object.", None, number)
    if line.count(b"[") + line.count(b"{") > MOST_LEVELS and _levels(value) > MOST_LEVELS:
        return Problem("invalid_json_line", f"This line nests lists and objects deeper than {MOST_LEVELS} levels.", None, number)
    return value


class _NotANumber(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _NotANumber(f"it holds {name}")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _NotANumber(f"the number {text[:40]} is too large")
    return value


_decode = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite).decode


def _levels(value: object) -> int:
    depth, layer = 0, [value]
    while layer:
        layer = [child for each in layer for child in _children(each)]
        depth += 1
    return depth - 1


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _envelope_problems(value: Mapping[str, Any], number: int, endpoint: str) -> Iterator[Problem]:
    if value.get("custom_id") is not None and not _is_storable(value["custom_id"]):
        yield Problem(
            "invalid_type",
            "custom_id must be a non-empty string of at most 512 characters without NUL or lone surrogates.",
            "custom_id",
            number,
        )
    if value.get("method") not in (None, "POST"):
        yield Problem("invalid_value", "The method must be 'POST'.", "method", number)
    if value.get("url") not in (None, endpoint):
        yield Problem("invalid_url", "The URL provided for this request does not match the batch endpoint.", "url", number)
    if value.get("body") is not None and not isinstance(value["body"], dict):
        yield Problem("invalid_type", "The body must be a JSON object.", "body", number)


def _body_problems(body: Mapping[str, Any], number: int, endpoint: str) -> Iterator[Problem]:
    if not isinstance(body.get("model"), str) or not body["model"]:
        yield Problem("invalid_request", "Model parameter is required.", "body.model", number)
    for name in ENDPOINTS[endpoint]:
        if body.get(name) is None:
            yield Problem("invalid_request", f"{name.capitalize()} parameter is required.", f"body.{name}", number)
    for name in body:
        if name.startswith("guided_"):
            kind = name.removeprefix("guided_")[:MOST_QUOTED]
            said = f'vLLM no longer reads guided_{kind} and would answer without it: write "structured_outputs": {{"{kind}": ...}} instead.'
            yield Problem("unsupported_parameter", said, f"body.guided_{kind}", number)
    if body.get("stream"):
        yield Problem("streaming_unsupported", "Chat Completions: Streaming is not supported in the Batch API.", "body.stream", number)


def storable(text: str) -> str:
    """Text that may quote anything, as every database keeps it: a lone surrogate has no UTF-8, and PostgreSQL's text no NUL."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def quoted(name: str) -> str:
    """A name out of a line, cut to what a message can bear: some are as long as the line."""
    return f"'{name}'" if len(name) <= MOST_QUOTED else f"'{name[:MOST_QUOTED]}...'"


def _is_storable(custom_id: object) -> TypeGuard[str]:
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512 or "\0" in custom_id:
        return False
    return not holds_lone_surrogate(custom_id)


def holds_lone_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def compact(value: Any) -> str:
    """The form in which bodies are stored, and spliced into lines: ASCII, without a newline. ValueError for NaN and infinity."""
    return _encode(value)


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def dump(
    job_id: str,
    row_index: int,
    custom_id: str,
    status_code: int | None,
    body: str | None,
    error_code: str | None,
    error_message: str | None,
) -> bytes:
    """A settled row as OpenAI's output line. Its body is JSON already."""
    number = f"{job_id.removeprefix('batch_')}_{row_index}"
    name = compact(custom_id or None)  # a line that validation let through may have no id that could be kept
    response = "null" if body is None else f'{{"status_code":{status_code},"request_id":"req_{number}","body":{body}}}'
    error = "null" if error_code is None else compact({"code": error_code, "message": error_message})
    return f'{{"id":"batch_req_{number}","custom_id":{name},"response":{response},"error":{error}}}\n'.encode()


def answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same line of a row by column name, as an object."""
    columns = ("job_id", "row_index", "custom_id", "status_code", "body", "error_code", "error_message")
    line: dict[str, Any] = json.loads(dump(*(row[name] for name in columns)))
    return line
