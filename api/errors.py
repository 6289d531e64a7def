"""Every answer that is not 2xx, in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from specbatch.errors import InvalidRequest, NotFound, ServiceUnavailable, SpecbatchError


class AsciiJSONResponse(JSONResponse):
    """Escapes everything beyond ASCII: a lone surrogate that a user sent, and that a message quotes, has no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class UnsupportedMediaType(SpecbatchError):
    status_code = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


def answer(error: SpecbatchError, headers: Mapping[str, str] | None = None) -> Response:
    return _response(error.status_code, error.message, error.type, error.code, error.param, headers)


def register(app: FastAPI) -> None:
    app.add_exception_handler(SpecbatchError, _own)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)


def _response(
    status: int, message: str, type_: str, code: str | None = None, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    content = {"error": {"message": message, "type": type_, "param": param, "code": code}}
    return AsciiJSONResponse(content, status, headers=dict(headers or {}))


def _own(_: Request, error: Exception) -> Response:
    assert isinstance(error, SpecbatchError)
    retry = {"retry-after": "2"} if isinstance(error, ServiceUnavailable) else None
    return answer(error, retry)


def _framework(request: Request, error: Exception) -> Response:
    """What Starlette and FastAPI raise themselves: unknown routes, methods, and bodies that cannot be read."""
    assert isinstance(error, HTTPException)
    cause = error.__cause__
    if isinstance(cause, SpecbatchError):
        return answer(cause)
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return answer(ServiceUnavailable("No room left on the server's disk for this upload: free some and try again.", code="disk_full"))
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return answer(NotFound(f"Unknown request URL: {where}. GET /openapi.json lists every URL.", code="unknown_url"))
    if error.status_code == 405:
        allowed = _allowed(request)
        message = f"Not allowed: {where}. This URL takes {allowed}."
        return _response(405, message, "invalid_request_error", "method_not_allowed", headers={"allow": allowed})
    type_ = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return _response(error.status_code, str(error.detail), type_, headers=error.headers)


def _allowed(request: Request) -> str:
    """Starlette names the methods of the first route alone."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _invalid(_: Request, error: Exception) -> Response:
    """The first thing that is wrong with a request, as OpenAI names it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind, message = str(first["type"]), str(first["msg"])
    if kind == "json_invalid":
        return answer(InvalidRequest("The request body is not valid JSON.", code="invalid_json"))
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    if param is None:
        return answer(
            InvalidRequest("The request body must be a JSON object.", code="missing_body" if kind == "missing" else "invalid_type")
        )
    if kind == "missing":
        code, text = "missing_required_parameter", f"Missing required parameter: '{param}'."
    elif kind == "extra_forbidden":
        code, text = "unknown_parameter", f"Unknown parameter: '{param}'."
    elif kind in _LIMITS:
        code, text = _LIMITS[kind], f"Invalid '{param}': {message}."
    elif kind.endswith(("_type", "_parsing", "_from_float")) or kind == "string_unicode":
        code, text = "invalid_type", f"Invalid type for '{param}': {message}."
    else:
        code, text = "invalid_value", f"Invalid value for '{param}': {message}."
    return answer(InvalidRequest(text, code=code, param=param))


_LIMITS = {
    "greater_than_equal": "integer_below_min_value",
    "less_than_equal": "integer_above_max_value",
    "string_too_long": "string_above_max_length",
}


def _unexpected(_: Request, error: Exception) -> Response:
    """A defect. Its traceback goes to the log, for Starlette raises it again."""
    return _response(500, "The server had an error while processing this request; its log says which.", "server_error", "internal_error")
