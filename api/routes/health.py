"""Whether this process lives, whether it can work, and which models may be named."""

from __future__ import annotations

import time

from fastapi import APIRouter

from api.context import Ctx
from api.schemas import Health, Model, ModelList, Readiness
from specbatch import embedded
from specbatch.errors import ServiceUnavailable
from specbatch.migration import check_database
from specbatch.service import batches

router = APIRouter(tags=["service"])
STARTED = int(time.time())


@router.get("/v1/models")
def list_models(ctx: Ctx) -> ModelList:
    """Every name that a request's `model` may carry: this server's own, and those of the workers of the last day."""
    return ModelList(data=[Model(id=name, created=STARTED, owned_by=model) for name, model in batches.models(ctx).items()])


@router.get("/healthz")
async def health() -> Health:
    """Always 200 while the process lives. Never asks another service."""
    return Health()


@router.get("/readyz")
def readiness(ctx: Ctx) -> Readiness:
    """200 while batches can be accepted, which takes the database and the disk; without Redis they are accepted and wait."""
    check_database(ctx.settings)
    embedded.prepare(ctx.settings)
    redis = None
    if ctx.queue is not None:
        try:
            ctx.queue.ping()
            redis = "ok"
        except ServiceUnavailable as failure:
            redis = failure.message
    return Readiness(status="degraded" if redis not in (None, "ok") else "ready", database="ok", disk="ok", redis=redis)
