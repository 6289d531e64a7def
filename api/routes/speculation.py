"""/v1/speculation: what drafting achieves here, by model, mode and task."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.context import Ctx
from specbatch.domain import Mode, TaskType
from specbatch.service.speculation import Speculation, speculation

NO_NUL = r"^[^\x00]*$"  # which no database looks for

router = APIRouter(prefix="/v1/speculation", tags=["speculation"])


@router.get("")
def read_speculation(
    ctx: Ctx,
    hours: Annotated[float, Query(gt=0, le=8760)] = 24.0,
    model: Annotated[str | None, Query(max_length=512, pattern=NO_NUL)] = None,
    mode: Mode | None = None,
    task: TaskType | None = None,
    batch_id: Annotated[str | None, Query(max_length=64, pattern=NO_NUL)] = None,
) -> Speculation:
    return speculation(ctx, hours=hours, model=model, mode=mode, task=task, job_id=batch_id)
