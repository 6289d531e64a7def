"""Webhooks as their receiver sees them, checked with the verifiers of standardwebhooks and of the official client."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook
from starlette.testclient import TestClient

from specbatch import models as tables
from specbatch.context import Context
from specbatch.service import upkeep, webhooks
from specbatch.settings import Settings
from tests.server_fixtures import CHAT, Desk, line, refused
from tests.webhook_receiver import SECRET, Receiver

Upload = Callable[..., str]
Create = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(tmp_path: Path, database_url: str, receiver: Receiver) -> Settings:
    return Settings(
        data_dir=tmp_path,
        database_url=database_url,
        engine="scripted",
        webhook_url=receiver.url,
        webhook_secret=SECRET,
        webhook_private_addresses=True,
    )


def deliver(ctx: Context) -> None:
    while webhooks.deliver_next(ctx):
        pass


def bring_forward(ctx: Context) -> None:
    """As if the delay before the next attempt had passed."""
    with ctx.database.write() as tx:
        tx.execute(sa.update(tables.webhooks).where(tables.webhooks.c.due_at.is_not(None)).values(due_at=0.0))


def test_each_ending_is_announced_once(
    ctx: Context, api: TestClient, desk: Desk, upload: Upload, create: Create, receiver: Receiver
) -> None:
    completed, failed = create(upload(line("a")))["id"], create(upload(line("a", stream=True)))["id"]
    cancelled, expired = create(upload(line("a")))["id"], create(upload(line("a")))["id"]
    deliver(ctx)
    assert receiver.came == []
    api.post(f"/v1/batches/{cancelled}/cancel")
    desk.validate()
    desk.work(completed)
    desk.pass_window(expired)
    upkeep.expire_jobs(ctx, upkeep.Tally())
    desk.close()
    desk.finalize()
    deliver(ctx)
    assert {event["data"]["id"]: event["type"] for event in receiver.events()} == {
        completed: "batch.completed",
        failed: "batch.failed",
        cancelled: "batch.cancelled",
        expired: "batch.expired",
    }
    assert len(receiver.came) == 4
    assert len({headers["webhook-id"] for headers, _ in receiver.came}) == 4
    for event in receiver.events():
        assert set(event) == {"id", "object", "type", "created_at", "data"}
        assert (event["object"], type(event["created_at"])) == ("event", int)


def finish(desk: Desk, batch_id: str) -> None:
    desk.validate()
    desk.work(batch_id)
    desk.finalize()


def test_signatures_satisfy_both_verifiers(ctx: Context, desk: Desk, upload: Upload, create: Create, receiver: Receiver) -> None:
    batch_id = create(upload(line("a")))["id"]
    finish(desk, batch_id)
    deliver(ctx)
    ((headers, content),) = receiver.came
    assert Webhook(SECRET).verify(content, headers)["data"] == {"id": batch_id}
    with openai.OpenAI(api_key="unused", webhook_secret=SECRET) as client:
        event = client.webhooks.unwrap(content, headers)
    assert event.type == "batch.completed"
    assert (event.id, event.data.id) == (headers["webhook-id"], batch_id)
    assert headers["host"] == receiver.url.split("/")[2]


@pytest.mark.parametrize("status", [500, 404, 302])
def test_what_is_not_accepted_is_sent_again_later(
    ctx: Context, desk: Desk, upload: Upload, create: Create, receiver: Receiver, status: int
) -> None:
    receiver.statuses = [status, status]
    finish(desk, create(upload(line("a")))["id"])
    deliver(ctx)
    assert len(receiver.came) == 1
    bring_forward(ctx)
    deliver(ctx)
    bring_forward(ctx)
    deliver(ctx)
    bring_forward(ctx)
    deliver(ctx)
    assert len(receiver.came) == 3
    assert len({headers["webhook-id"] for headers, _ in receiver.came}) == 1


def test_the_pause_grows_and_the_patience_ends(ctx: Context, desk: Desk, upload: Upload, create: Create, receiver: Receiver) -> None:
    receiver.statuses = [500] * 99
    finish(desk, create(upload(line("a")))["id"])
    pauses = []
    for _ in range(12):
        deliver(ctx)
        with ctx.database.read() as tx:
            now = tx.execute(sa.select(tables.webhooks.c.due_at)).scalar_one()
        pauses.append(now)
        bring_forward(ctx)
    steps = [later - earlier for earlier, later in pairwise(pauses)]
    assert steps[0] > 4
    assert steps[5] > steps[0]
    with ctx.database.write() as tx:
        tx.execute(sa.update(tables.webhooks).values(created_at=0.0))
    deliver(ctx)
    with ctx.database.read() as tx:
        given_up = tx.execute(sa.select(tables.webhooks)).one()
    assert (given_up.due_at, given_up.delivered_at, given_up.failure) == (None, None, "it answered 500")


def test_a_batch_may_name_its_own_address(ctx: Context, desk: Desk, upload: Upload, create: Create, receiver: Receiver) -> None:
    own = receiver.url.replace("/hook", "/own").replace("127.0.0.1", "localhost")
    finish(desk, create(upload(line("a")), webhook_url=own)["id"])
    deliver(ctx)
    assert receiver.came[0][0]["host"].startswith("localhost:")


def test_private_addresses_are_never_sent_to_unless_allowed(
    ctx: Context, desk: Desk, upload: Upload, create: Create, receiver: Receiver
) -> None:
    object.__setattr__(ctx.settings, "webhook_private_addresses", False)
    finish(desk, create(upload(line("a")), webhook_url=receiver.url.replace("127.0.0.1", "localhost"))["id"])
    deliver(ctx)
    assert receiver.came == []
    with ctx.database.read() as tx:
        assert "private address" in tx.execute(sa.select(tables.webhooks.c.failure)).scalar_one()


@pytest.mark.parametrize("url", ["http://10.0.0.1/", "ftp://example.com/", "nonsense", "http://a\0/"])
def test_addresses_that_are_refused_at_once(ctx: Context, api: TestClient, upload: Upload, url: str) -> None:
    object.__setattr__(ctx.settings, "webhook_private_addresses", False)
    body = {"input_file_id": upload(line("a")), "endpoint": CHAT, "completion_window": "24h", "webhook_url": url}
    refused(api.post("/v1/batches", json=body), 400, "invalid_value", "webhook_url")


def test_without_a_secret_nothing_is_sent(
    ctx: Context, api: TestClient, desk: Desk, upload: Upload, create: Create, receiver: Receiver
) -> None:
    object.__setattr__(ctx.settings, "webhook_secret", None)
    body = {"input_file_id": upload(line("a")), "endpoint": CHAT, "completion_window": "24h", "webhook_url": receiver.url}
    refused(api.post("/v1/batches", json=body), 400, "webhooks_unavailable", "webhook_url")
    finish(desk, create(upload(line("a")))["id"])
    deliver(ctx)
    assert receiver.came == []
