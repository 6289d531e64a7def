"""The end of a batch: its output and error files are written aside, put in place whole, and announced in one transaction."""

from __future__ import annotations

from functools import partial
from itertools import starmap

import sqlalchemy as sa

from specbatch import lines
from specbatch.context import Context
from specbatch.domain import JobStatus, Outcome
from specbatch.service import files as stored
from specbatch.service import webhooks
from specbatch.service.leases import kept
from specbatch.store import files, jobs, results


def finalize_next(ctx: Context, owner: str) -> bool:
    """Write the files of the oldest batch whose rows are all settled. False when none waits."""
    with ctx.database.write() as tx:
        job = jobs.lease_next(tx, owner, ctx.settings.lease_seconds, jobs.to_finalize())
    if job is None:
        return False
    written: dict[str, tuple[str, int]] = {}
    with kept(ctx, job):
        for kind, many in (("output", job["succeeded"]), ("error", job["settled"] - job["succeeded"])):
            if many:
                ended = results.in_input_order(ctx.database, job["id"], job["rows"], succeeded=kind == "output")
                file_id = stored.output_id(job["id"], kind)
                written[kind] = file_id, stored.write_output(ctx, file_id, starmap(partial(lines.dump, job["id"]), ended))
        with ctx.database.write() as tx:
            if jobs.renew(tx, job, 0.0):
                _announce(tx, job, written)
                webhooks.announce(ctx, tx, job["id"])
    return True


def _announce(tx: sa.Connection, job: jobs.Job, written: dict[str, tuple[str, int]]) -> None:
    for kind, (file_id, size) in written.items():
        filename = f"{job['id']}_{kind}.jsonl"
        files.add(tx, file_id, purpose="batch_output", filename=filename, size=size, expires_seconds=job["output_expires_seconds"])
    ids = {f"{kind}_file_id": file_id for kind, (file_id, _) in written.items()}
    # A cancel may have come since the lease: the states decide, one of these moves is legal.
    if not jobs.move(tx, job["id"], JobStatus.CANCELLED, ids):
        jobs.move(tx, job["id"], JobStatus.EXPIRED if job["stop"] == Outcome.EXPIRED else JobStatus.COMPLETED, ids)
