"""Batches as their user sees them: submit, look, stop, read."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import IntegrityError

from specbatch.context import Context
from specbatch.domain import TERMINAL, JobStatus, Mode, Outcome, TaskType
from specbatch.errors import Conflict, InvalidRequest, NotFound
from specbatch.lines import ENDPOINTS
from specbatch.service import offers, webhooks
from specbatch.store import files, jobs, results
from specbatch.wire import WINDOW_SECONDS, BatchObject


class OutputExpiry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    anchor: str = Field(pattern="^created_at$")
    seconds: int = Field(ge=3600, le=2_592_000)


class NewBatch(BaseModel):
    """What a user submits. From `mode` on it is ours; a task type is named under metadata.task."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None
    mode: Mode | None = None
    webhook_url: str | None = Field(None, description="Where the end of the batch is announced; the server's own address when unset.")
    on_invalid: Literal["fail", "skip"] = Field("fail", description="skip: a bad line becomes an error line, and the others run.")


def submit(
    ctx: Context, new: NewBatch, run_key: str | None = None, idempotency_key: str | None = None, model: str | None = None
) -> BatchObject:
    """Accept a batch; its lines are validated afterwards. Raises InvalidRequest naming the parameter.

    `model` is what names that several models share, as `default`, shall mean in it. `run_key` lets the command that submitted it find
    it again after an interruption, until `delivered`. A second submission under an `idempotency_key` answers the first one's batch;
    under the same key with other parameters it raises Conflict.
    """
    if idempotency_key is None:
        return _submit(ctx, new, run_key, None, model)
    digest = hashlib.sha256(new.model_dump_json().encode()).hexdigest()
    earlier = _submitted(ctx, idempotency_key, digest)
    try:
        return earlier or _submit(ctx, new, run_key, (idempotency_key, digest), model)
    except IntegrityError:  # another submission took the key meanwhile
        earlier = _submitted(ctx, idempotency_key, digest)
        if earlier is None:
            raise
        return earlier


def _submitted(ctx: Context, key: str, digest: str) -> BatchObject | None:
    with ctx.database.read() as tx:
        job = jobs.by_idempotency_key(tx, key)
    if job is not None and job["idempotency_digest"] != digest:
        raise Conflict(
            f"The idempotency key {key!r} was used for batch '{job['id']}' with other parameters: use a new key for a new batch.",
            code="idempotency_key_reused",
        )
    return None if job is None else BatchObject.of(job)


def _submit(ctx: Context, new: NewBatch, run_key: str | None, idempotency: tuple[str, str] | None, model: str | None) -> BatchObject:
    if new.endpoint not in ENDPOINTS:
        raise InvalidRequest(
            f"Invalid endpoint {new.endpoint!r}: use one of {', '.join(ENDPOINTS)}.", code="invalid_value", param="endpoint"
        )
    if new.completion_window not in WINDOW_SECONDS:
        raise InvalidRequest(
            f"Invalid completion_window {new.completion_window!r}: use {', '.join(WINDOW_SECONDS)}.",
            code="invalid_value",
            param="completion_window",
        )
    _check_metadata(new.metadata or {})
    if new.webhook_url is not None:
        webhooks.check(ctx, new.webhook_url)
    with ctx.database.write() as tx:
        file = files.get(tx, new.input_file_id)
        if file is None:
            raise InvalidRequest(f"No such File object: {new.input_file_id}", code="invalid_value", param="input_file_id")
        if file["purpose"] != "batch":
            message = f"The file {new.input_file_id} was uploaded for {file['purpose']}: upload it with the purpose 'batch'."
            raise InvalidRequest(message, code="invalid_value", param="input_file_id")
        job = jobs.add(
            tx,
            f"batch_{secrets.token_hex(12)}",
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            completion_window=new.completion_window,
            window_seconds=WINDOW_SECONDS[new.completion_window],
            metadata=new.metadata,
            output_expires_seconds=new.output_expires_after.seconds if new.output_expires_after else None,
            task=_named_task(new.metadata or {}),
            mode=new.mode,
            on_invalid=new.on_invalid,
            webhook_url=new.webhook_url,
            idempotency=idempotency,
            run_key=run_key,
            model=model,
        )
    return BatchObject.of(job)


def get(ctx: Context, job_id: str) -> BatchObject:
    with ctx.database.read() as tx:
        return BatchObject.of(_existing(jobs.get(tx, job_id), job_id))


def interrupted(ctx: Context, run_key: str) -> BatchObject | None:
    """The batch that an earlier command submitted under this key, and whose output it did not deliver."""
    with ctx.database.read() as tx:
        job = jobs.owing_run(tx, run_key)
        return None if job is None else BatchObject.of(job)


def delivered(ctx: Context, job_id: str) -> None:
    """The command that submitted a batch owes its user nothing more: its key means a new batch from now on."""
    with ctx.database.write() as tx:
        jobs.forget_run(tx, job_id)


def page(ctx: Context, *, after: str | None = None, limit: int = 20) -> list[BatchObject]:
    """Newest first."""
    with ctx.database.read() as tx:
        behind = None if after is None else _existing(jobs.get(tx, after), after)
        return [BatchObject.of(job) for job in jobs.page(tx, behind, limit)]


def cancel(ctx: Context, job_id: str) -> BatchObject:
    """Ask a batch to end. Asking twice is allowed; a batch that ended otherwise raises Conflict."""
    with ctx.database.write() as tx:
        job = _existing(jobs.get(tx, job_id), job_id)
        status = JobStatus(job["status"])
        if status in TERMINAL and status is not JobStatus.CANCELLED:
            raise Conflict(f"Cannot cancel a batch with status '{status}'.")
        if status is not JobStatus.CANCELLED and jobs.move(tx, job_id, JobStatus.CANCELLING):
            jobs.stop(tx, job_id, Outcome.CANCELLED)
        return BatchObject.of(_existing(jobs.get(tx, job_id), job_id))


def outcomes(ctx: Context, job_id: str, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
    """Rows that finished, in the order they were settled, from the one after sequence number `after`, with their measurements."""
    with ctx.database.read() as tx:
        _existing(jobs.get(tx, job_id), job_id)
        return [dict(row) for row in results.since(tx, job_id, after, limit)]


def models(ctx: Context) -> dict[str, str]:
    """Every name that a request's `model` may carry -> the model behind it."""
    with ctx.database.read() as tx:
        return offers.models(ctx, tx)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > 16:
        raise InvalidRequest(f"metadata has {len(metadata)} pairs: at most 16 are kept.", code="invalid_value", param="metadata")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            message = "metadata keys have at most 64 characters, values at most 512."
            raise InvalidRequest(message, code="invalid_value", param=f"metadata.{key[:64]}")
        if any("\ud800" <= char <= "\udfff" for char in key + value):
            message = "metadata holds a lone surrogate, which is no character: write it as UTF-8."
            raise InvalidRequest(message, code="invalid_value", param="metadata")


def _named_task(metadata: Mapping[str, str]) -> TaskType | None:
    named = metadata.get("task")
    try:
        return None if named is None else TaskType(named)
    except ValueError:
        raise InvalidRequest(
            f"Unknown task {named!r}: use one of {', '.join(TaskType)}.", code="invalid_value", param="metadata.task"
        ) from None


def _existing(job: jobs.Job | None, job_id: str) -> jobs.Job:
    if job is None:
        raise NotFound(f"No batch found with id '{job_id}'.", param="id")
    return job
