"""Webhooks: each batch that ends is announced to the address its user named, signed by the Standard Webhooks scheme."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

import sqlalchemy as sa
from standardwebhooks import Webhook

from specbatch import outbound
from specbatch.context import Context
from specbatch.database import Record
from specbatch.domain import TERMINAL, JobStatus
from specbatch.errors import InvalidRequest
from specbatch.store import jobs, webhooks

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0  # longer than an attempt takes
FIRST_DELAY_SECONDS = 5.0
LONGEST_DELAY_SECONDS = 3600.0
PATIENCE_SECONDS = 72 * 3600.0  # OpenAI's


def check(ctx: Context, url: str) -> None:
    """Raises InvalidRequest where nothing could be announced at this address."""
    if ctx.settings.webhook_secret is None:
        message = "This server has no secret to sign webhooks with: its operator sets SPECBATCH_WEBHOOK_SECRET."
        raise InvalidRequest(message, code="webhooks_unavailable", param="webhook_url")
    outbound.check_url(url, allow_private=ctx.settings.webhook_private_addresses)


def announce(ctx: Context, tx: sa.Connection, job_id: str) -> None:
    """Note that a batch has ended, in the transaction that ends it; nothing for one that has not, or that nobody listens to."""
    job = jobs.get(tx, job_id)
    if job is None or JobStatus(job["status"]) not in TERMINAL or ctx.settings.webhook_secret is None:
        return
    url = job["webhook_url"] or ctx.settings.webhook_url
    if url is not None:
        webhooks.add(tx, f"evt_{job_id.removeprefix('batch_')}", job_id=job_id, kind=f"batch.{job['status']}", url=url)


def deliver_next(ctx: Context) -> bool:
    """Try to deliver the announcement that is due longest. False when none is."""
    with ctx.database.read() as tx:
        if ctx.settings.webhook_secret is None or not webhooks.is_due(tx):
            return False
    with ctx.database.write() as tx:
        event = webhooks.take(tx, LEASE_SECONDS)
    if event is None:
        return False
    content = _payload(event)
    try:
        outbound.post(
            event["url"],
            content.encode(),
            _headers(event["id"], content, ctx.settings.webhook_secret),
            allow_private=ctx.settings.webhook_private_addresses,
        )
    except outbound.DeliveryFailed as failure:
        delay = min(FIRST_DELAY_SECONDS * 2.0 ** (event["attempts"] - 1), LONGEST_DELAY_SECONDS)
        with ctx.database.write() as tx:
            again = webhooks.failed(tx, event["id"], str(failure), delay, PATIENCE_SECONDS)
        what = f"it is tried again in {delay:.0f} s" if again else "it is given up"
        log.warning("%s of %s was not delivered to %s: %s; %s", event["type"], event["job_id"], event["url"], failure, what)
    else:
        with ctx.database.write() as tx:
            webhooks.delivered(tx, event["id"])
    return True


def _payload(event: Record) -> str:
    body = {
        "id": event["id"],
        "object": "event",
        "type": event["type"],
        "created_at": int(event["created_at"]),
        "data": {"id": event["job_id"]},
    }
    return json.dumps(body, separators=(",", ":"))


def _headers(event_id: str, content: str, secret: str) -> dict[str, str]:
    now = datetime.now(UTC)
    return {
        "content-type": "application/json",
        "user-agent": "specbatch",
        "webhook-id": event_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(event_id, now, content),
    }
