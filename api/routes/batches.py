"""/v1/batches: submit, watch, stop, and read what is settled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated

import anyio
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.context import Ctx
from api.errors import AsciiJSONResponse
from api.schemas import AfterBatch, BatchId, CreateBatch, Listing, ResultPage
from specbatch.context import Context
from specbatch.domain import TERMINAL
from specbatch.errors import ServiceUnavailable
from specbatch.service import batches, retry
from specbatch.wire import BatchObject, ResultObject

router = APIRouter(prefix="/v1/batches", tags=["batches"])
NDJSON = "application/x-ndjson"
FOLLOW_ROWS = 200
FOLLOW_SECONDS = 0.5
LAST_SEQUENCE = 2**53 - 1  # the largest integer that every JSON reader keeps; a page behind it still fits the database's own

IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=255, pattern=r"^[\x20-\x7e]+$", description="A second request with it answers the same batch."),
]


@router.post("")
def create_batch(ctx: Ctx, new: CreateBatch, idempotency_key: IdempotencyKey = None) -> BatchObject:
    return batches.submit(ctx, new, idempotency_key=idempotency_key)


@router.get("")
def list_batches(ctx: Ctx, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: AfterBatch = None) -> Listing[BatchObject]:
    return Listing[BatchObject].of(batches.page(ctx, after=after, limit=limit + 1), limit)


@router.get("/{batch_id}")
def retrieve_batch(ctx: Ctx, batch_id: BatchId) -> BatchObject:
    return batches.get(ctx, batch_id)


@router.post("/{batch_id}/cancel")
def cancel_batch(ctx: Ctx, batch_id: BatchId) -> BatchObject:
    return batches.cancel(ctx, batch_id)


@router.post("/{batch_id}/retry")
def retry_batch(ctx: Ctx, batch_id: BatchId) -> BatchObject:
    """A new batch of the rows that did not succeed. Allowed once the batch has ended."""
    return retry.retry(ctx, batch_id)


@router.get(
    "/{batch_id}/results",
    response_class=Response,
    responses={200: {"model": ResultPage, "content": {NDJSON: {"schema": {"type": "string"}}}}},
)
def read_results(
    ctx: Ctx,
    request: Request,
    batch_id: BatchId,
    after: Annotated[int, Query(ge=0, le=LAST_SEQUENCE, description="Results behind this sequence number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Of a page; a stream has none.")] = 100,
    accept: Annotated[str, Header(description=f"{NDJSON} follows the batch until it ends, a result a line.")] = "application/json",
) -> Response:
    """Results of rows that have finished, while the others run: a page, or with `Accept: application/x-ndjson` a stream."""
    batch = batches.get(ctx, batch_id)
    if NDJSON in accept:
        return StreamingResponse(_follow(ctx, request, batch_id, after), media_type=NDJSON)
    found = batches.outcomes(ctx, batch_id, after=after, limit=limit + 1)
    data = [ResultObject.of(row).model_dump() for row in found[:limit]]
    page = {
        "object": "list",
        "data": data,
        "last_sequence": data[-1]["sequence"] if data else after,
        "has_more": len(found) > limit,
        "status": batch.status,
    }
    return AsciiJSONResponse(page)


async def _follow(ctx: Context, request: Request, batch_id: str, after: int) -> AsyncIterator[bytes]:
    while not await request.is_disconnected():
        try:
            # Asked before the results are: those of a batch that has ended are complete.
            ended = (await run_in_threadpool(batches.get, ctx, batch_id)).status in TERMINAL
            found = await run_in_threadpool(batches.outcomes, ctx, batch_id, after=after, limit=FOLLOW_ROWS)
        except ServiceUnavailable:
            await anyio.sleep(FOLLOW_SECONDS)
            continue
        for row in found:
            yield json.dumps(ResultObject.of(row).model_dump(), separators=(",", ":")).encode() + b"\n"
            after = row["sequence"]
        if len(found) < FOLLOW_ROWS:
            if ended:
                return
            await anyio.sleep(FOLLOW_SECONDS)
