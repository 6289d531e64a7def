"""Refuses bodies that are too large, or of the wrong kind, before they fill a disk or the memory."""

from __future__ import annotations

from email.message import Message

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from api.errors import UnsupportedMediaType, answer
from specbatch.errors import SpecbatchError, TooLarge
from specbatch.settings import Settings

FORM_BYTES = 1024**2  # what the other fields and the boundaries of an upload may take
JSON_BYTES = 1024**2
DRAINED_BYTES = 64 * 1024**2  # read and dropped after a refusal: a client that still sends often misses an answer
UPLOADS = "/v1/files"


class BodyLimit:
    """ASGI middleware. A body longer than allowed is answered with 413, whether its length was declared or not; one that is neither
    a form (for an upload) nor JSON, with 415."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = scope["path"] == UPLOADS
        most = self._settings.max_file_bytes + FORM_BYTES if upload else JSON_BYTES
        error = _refusal(Headers(scope=scope), upload, most) if scope["method"] == "POST" else None
        if error is not None:
            await _drain(receive)
            await answer(error)(scope, receive, send)
            return
        await self._app(scope, _counted(receive, most, upload), send)


def _refusal(headers: Headers, upload: bool, most: int) -> SpecbatchError | None:
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        return _too_large(upload, most)
    has_body = length not in ("", "0") or "transfer-encoding" in headers
    declared = Message()
    declared["content-type"] = headers.get("content-type", "")
    kind = declared.get_content_type()
    if upload and has_body and kind != "multipart/form-data":
        return UnsupportedMediaType("Send the file as multipart/form-data, with the fields 'file' and 'purpose'.")
    if not upload and has_body and kind != "application/json":
        return UnsupportedMediaType("Send JSON, with the header Content-Type: application/json.")
    return None


def _too_large(upload: bool, most: int) -> TooLarge:
    if upload:
        message = f"The file is larger than {most - FORM_BYTES} bytes: split it, or raise SPECBATCH_MAX_FILE_BYTES."
        return TooLarge(message, code="file_too_large", param="file")
    return TooLarge(f"The request body is larger than {most} bytes.", code="request_too_large")


def _counted(receive: Receive, most: int, upload: bool) -> Receive:
    taken = 0

    async def counting() -> Event:
        nonlocal taken
        event = await receive()
        taken += len(event.get("body", b""))
        if taken > most:
            if event.get("more_body"):
                await _drain(receive)
            # FastAPI lets nothing but an HTTPException through while it reads a body.
            raise HTTPException(413) from _too_large(upload, most)
        return event

    return counting


async def _drain(receive: Receive) -> None:
    dropped, more = 0, True
    while more and dropped < DRAINED_BYTES:
        event = await receive()
        dropped += len(event.get("body", b""))
        more = bool(event.get("more_body", False))
