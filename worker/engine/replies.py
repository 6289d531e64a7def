"""Refusals in OpenAI's form, the same from every engine."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from specbatch.domain import Measurement, Reply

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
MODEL_NOT_FOUND = "model_not_found"
CONTENT = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}


def error_reply(status_code: int, message: str, *, param: str | None = None, code: str | None = None) -> Reply:
    """A Reply whose body is {"error": {message, type, param, code}}; the type follows from the status, as in OpenAI's API."""
    kind = "server_error" if status_code >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return Reply(status_code, {"error": error}, Measurement())


def unknown_model(name: object) -> Reply:
    return error_reply(HTTPStatus.NOT_FOUND, f"The model `{name}` does not exist.", param="model", code=MODEL_NOT_FOUND)


def unknown_endpoint(endpoint: str, offered: tuple[str, ...]) -> Reply:
    said = f"This engine does not answer {endpoint}; it answers {', '.join(offered)}."
    return error_reply(HTTPStatus.NOT_FOUND, said, code="invalid_url")


def missing_content(endpoint: str, body: dict[str, Any]) -> Reply | None:
    """400 for a body without what its endpoint is about; vLLM would speak of a NoneType."""
    param = CONTENT.get(endpoint)
    if param is None or body.get(param) is not None:
        return None
    return error_reply(HTTPStatus.BAD_REQUEST, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def streaming() -> Reply:
    return error_reply(HTTPStatus.BAD_REQUEST, "Streaming is not supported in a batch: remove stream.", param="stream")


def invalid_body(wrong: ValidationError) -> Reply:
    """400 for a body that its request type refuses. `param` is the first field at fault."""
    errors = wrong.errors(include_url=False, include_context=False, include_input=False)
    said = list(dict.fromkeys(f"{_place(error['loc'])}{error['msg'].removeprefix('Value error, ')}" for error in errors))
    param = str(errors[0]["loc"][0]) if errors and errors[0]["loc"] else None
    return error_reply(HTTPStatus.BAD_REQUEST, "; ".join(said[:5]), param=param)


def unreadable_body(slip: Exception) -> Reply:
    """400 for a body on which a validator stumbled instead of saying what it lacks."""
    return error_reply(HTTPStatus.BAD_REQUEST, f"This request is malformed: reading it failed with {type(slip).__name__}: {slip}.")


def _place(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in loc) + ": " if loc else ""
