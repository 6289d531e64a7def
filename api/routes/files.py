"""/v1/files: what batches read and write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, BinaryIO, Literal

from fastapi import APIRouter, File, Form, Query, UploadFile
from fastapi.responses import FileResponse
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.context import Ctx
from api.errors import answer
from api.schemas import AfterFile, DeletedFile, FileId, Listing
from specbatch.errors import InvalidRequest, NotFound, SpecbatchError
from specbatch.service import files
from specbatch.wire import FileObject, Purpose

router = APIRouter(prefix="/v1/files", tags=["files"])
CHUNK_BYTES = 1024**2


@router.post("")
def upload_file(
    ctx: Ctx,
    file: Annotated[UploadFile, File(description="A file of request lines, named *.jsonl, in UTF-8.")],
    purpose: Annotated[Purpose, Form(description="batch, for files that batches read.")],
    expires_anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]")] = None,
    expires_seconds: Annotated[int | None, Form(alias="expires_after[seconds]", ge=3600, le=2_592_000)] = None,
) -> FileObject:
    if (expires_anchor is None) != (expires_seconds is None):
        missing = "expires_after[anchor]" if expires_anchor is None else "expires_after[seconds]"
        raise InvalidRequest(f"Missing required parameter: '{missing}'.", code="missing_required_parameter", param=missing)
    return files.upload(ctx, file.filename or "", purpose, _chunks(file.file), expires_seconds)


@router.get("")
def list_files(
    ctx: Ctx,
    purpose: Annotated[str | None, Query(max_length=32, pattern=r"^[\w-]*$")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: AfterFile = None,
) -> Listing[FileObject]:
    found = files.page(ctx, purpose=purpose, after=after, limit=limit + 1, newest_first=order == "desc")
    return Listing[FileObject].of(found, limit)


@router.get("/{file_id}")
def retrieve_file(ctx: Ctx, file_id: FileId) -> FileObject:
    return files.get(ctx, file_id)


@router.delete("/{file_id}")
def delete_file(ctx: Ctx, file_id: FileId) -> DeletedFile:
    files.delete(ctx, file_id)
    return DeletedFile(id=file_id)


@router.get(
    "/{file_id}/content",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The bytes that the Range header asked for.", "content": {"application/octet-stream": {}}},
    },
)
def download_file(ctx: Ctx, file_id: FileId) -> FileResponse:
    known = files.get(ctx, file_id)
    path = files.content(ctx, file_id)
    try:
        found = path.stat()
    except FileNotFoundError:
        raise NotFound(f"The content of file {file_id} is no longer on the server's disk: upload it again.", param="file_id") from None
    return _Content(path, media_type="application/octet-stream", filename=known.filename, stat_result=found)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


class _Content(FileResponse):
    """Answers a Range that is malformed (400) or beyond the file (416) in OpenAI's shape, where Starlette answers plain text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: dict[bytes, bytes] | None = None
        status = 200

        async def reshaping(event: Message) -> None:
            nonlocal refused, status
            if event["type"] == "http.response.start" and event["status"] >= 400:
                refused, status = dict(event["headers"]), event["status"]
            elif refused is None:
                await send(event)

        await super().__call__(scope, receive, reshaping)
        if refused is not None:
            error: SpecbatchError = _RangeBeyondFile() if status == 416 else InvalidRequest("Malformed Range header.", code="invalid_range")
            extent = refused.get(b"content-range")
            await answer(error, {"content-range": extent.decode()} if extent else None)(scope, receive, send)


class _RangeBeyondFile(InvalidRequest):
    status_code = 416

    def __init__(self) -> None:
        super().__init__("The range begins beyond the end of the file.", code="range_not_satisfiable")
