"""A second try: the rows of an ended batch that did not succeed, as a batch of their own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from specbatch.context import Context
from specbatch.domain import TERMINAL, JobStatus
from specbatch.errors import Conflict, NotFound
from specbatch.service import batches, files
from specbatch.store import jobs, rows
from specbatch.wire import BatchObject

MOST_PAIRS = 16  # of metadata


def retry(ctx: Context, job_id: str) -> BatchObject:
    """Write the rows that failed, expired, were refused or cancelled into a new file, and submit it under the batch's own parameters.

    Lines that validation refused are left out: they would be refused again. Raises NotFound; Conflict while the batch runs, or when it
    left nothing to retry.
    """
    with ctx.database.read() as tx:
        job = jobs.get(tx, job_id)
    if job is None:
        raise NotFound(f"No batch found with id '{job_id}'.", param="id")
    if JobStatus(job["status"]) not in TERMINAL:
        raise Conflict(f"Cannot retry a batch with status '{job['status']}': wait until it has ended, or cancel it.")
    lines = _lines(ctx, job)
    first = next(lines, None)
    if first is None:
        raise Conflict(f"Batch '{job_id}' left nothing to retry: no row of it ran and failed.")
    file = files.upload(ctx, f"{job_id}_retry.jsonl", "batch", itertools.chain([first], lines))
    metadata = dict(job["metadata"] or {})
    if len(metadata) < MOST_PAIRS or "retry_of" in metadata:
        metadata["retry_of"] = job_id
    return batches.submit(
        ctx,
        batches.NewBatch.model_validate(
            {
                "input_file_id": file.id,
                "endpoint": job["endpoint"],
                "completion_window": job["completion_window"],
                "metadata": metadata,
                "output_expires_after": job["output_expires_seconds"]
                and {"anchor": "created_at", "seconds": job["output_expires_seconds"]},
                "mode": job["named_mode"],
                "on_invalid": job["on_invalid"],
                "webhook_url": job["webhook_url"],
            }
        ),
    )


def _lines(ctx: Context, job: jobs.Job) -> Iterator[bytes]:
    url = json.dumps(job["endpoint"])
    for row in rows.unsuccessful(ctx.database, job["id"], job["rows"]):
        # The body is JSON text already.
        yield f'{{"custom_id":{json.dumps(row["custom_id"])},"method":"POST","url":{url},"body":{row["body"]}}}\n'.encode()
