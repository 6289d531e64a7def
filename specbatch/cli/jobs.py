"""Batches from the command line: submit, look, stop, read, try again. They work on the database; nothing needs to run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specbatch import services
from specbatch.cli import render, source
from specbatch.cli.flags import SERVER, Call, configured
from specbatch.cli.target import Target
from specbatch.cli.watch import display, follow
from specbatch.context import Context
from specbatch.domain import TERMINAL, JobStatus, Mode, TaskType
from specbatch.errors import Conflict, UsageError
from specbatch.service import batches, reports, webhooks
from specbatch.service import retry as second_try
from specbatch.wire import BatchObject

BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="The id that submit printed.", show_default=False)]
Requests = Annotated[
    Path, typer.Argument(metavar="IN", help="OpenAI batch lines, one JSON object a line; - reads stdin.", show_default=False)
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Where the answers go; - is stdout.", show_default=False)]
OnInvalid = Literal["fail", "skip"]
NamedMode = Annotated[Mode | None, typer.Option("--mode", help="How to decode, by hand.", show_default=False)]
NamedTask = Annotated[TaskType | None, typer.Option("--task", help="The task type of every row.", show_default=False)]


def new_batch(
    file_id: str,
    endpoint: str,
    mode: Mode | None,
    task: TaskType | None,
    metadata: dict[str, str],
    *,
    on_invalid: OnInvalid = "fail",
    webhook_url: str | None = None,
) -> batches.NewBatch:
    named = metadata | ({"task": task.value} if task is not None else {})
    return batches.NewBatch(
        input_file_id=file_id, endpoint=endpoint, mode=mode, metadata=named or None, on_invalid=on_invalid, webhook_url=webhook_url
    )


def ending(batch: BatchObject) -> int:
    """The exit code that a batch's status stands for: 0 done or on its way, 1 some rows failed, 2 its lines are at fault."""
    if batch.status is JobStatus.FAILED:
        return 2
    return int(batch.status in TERMINAL and (batch.status is not JobStatus.COMPLETED or batch.request_counts.failed > 0))


@configured(SERVER)
def submit(
    call: Call,
    requests: Requests,
    mode: NamedMode = None,
    task: NamedTask = None,
    metadata: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with the batch; may be repeated.")] = None,
    on_invalid: Annotated[
        OnInvalid, typer.Option(help="What a bad line does: fail the batch, or become an error line while the others run.")
    ] = "fail",
    webhook_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where the batch's end is announced; needs SPECBATCH_WEBHOOK_SECRET.", show_default=False),
    ] = None,
) -> None:
    """Queue a file of requests and print the batch's id. `up` or the workers of a deployment answer it."""
    pairs = _pairs(metadata or [])
    with source.opened(requests) as given, services.database(call.settings) as ctx:
        endpoint = given.endpoint()
        if webhook_url is not None:
            webhooks.check(ctx, webhook_url)  # before a large file is stored for nothing
        new = new_batch(given.upload(ctx).id, endpoint, mode, task, pairs, on_invalid=on_invalid, webhook_url=webhook_url)
        _show_id(call, batches.submit(ctx, new))


@configured()
def status(
    call: Call,
    batch_id: BatchId,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow it until it ends; with --json, an event a line.")] = False,
    rows: Annotated[
        bool, typer.Option("--rows", help="First each row that has ended: its task, mode and drafts, and why that mode.")
    ] = False,
) -> None:
    """Show a batch, and in which modes its rows run. Exit code: 0 done or on its way, 1 some rows failed, 2 its lines are at fault."""
    with services.database(call.settings) as ctx:
        batch = _watched(ctx, batch_id, as_json=call.json) if watch else batches.get(ctx, batch_id)
        if rows:
            _show_rows(ctx, batch_id, as_json=call.json)
        decided = reports.decisions(ctx, batch_id)
    if call.json:
        render.document(batch.model_dump(mode="json") | {"decisions": [group.model_dump(mode="json") for group in decided]})
    else:
        render.batch(batch, decided)
        render.problems(batch)
    raise typer.Exit(ending(batch))


@configured()
def results(call: Call, batch_id: BatchId, output: Output) -> None:
    """Write the answers of a batch that ended, in input order; rows that got none go to OUT.errors.jsonl."""
    target = Target(output)
    if call.json:
        target.refuse_json()
    with services.database(call.settings) as ctx:
        batch = batches.get(ctx, batch_id)
        if batch.status is JobStatus.FAILED:
            render.problems(batch)
            raise Conflict(f"{batch_id} failed validation and has no results: correct its lines and submit it again")
        if batch.status not in TERMINAL:
            counts = batch.request_counts
            raise Conflict(
                f"{batch_id} is {batch.status} ({counts.completed + counts.failed} of {counts.total} rows): "
                f"wait with `specbatch status {batch_id} --watch`"
            )
        place = target.deliver(ctx, batch)
        if call.json:
            render.document(reports.of_batch(ctx, batch_id).model_dump(mode="json") | target.document(batch))
        else:
            render.say(f"wrote {place}")
    raise typer.Exit(ending(batch))


@configured()
def cancel(call: Call, batch_id: BatchId) -> None:
    """End a batch early. Rows that are done keep their answers."""
    with services.database(call.settings) as ctx:
        batch = batches.cancel(ctx, batch_id)
    if call.json:
        render.document(batch.model_dump(mode="json"))
    else:
        render.say(f"{batch.id} is {batch.status}")


@configured()
def retry(call: Call, batch_id: BatchId) -> None:
    """Submit the rows of an ended batch that did not succeed as a batch of their own, and print its id."""
    with services.database(call.settings) as ctx:
        _show_id(call, second_try.retry(ctx, batch_id))


@configured()
def jobs(
    call: Call,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    after: Annotated[str | None, typer.Option(metavar="BATCH", help="Those older than this one.")] = None,
) -> None:
    """List batches, newest first."""
    with services.database(call.settings) as ctx:
        page = batches.page(ctx, after=after, limit=limit)
    if call.json:
        render.document({"object": "list", "data": [each.model_dump(mode="json") for each in page]})
    else:
        render.batches(page)


def _show_id(call: Call, batch: BatchObject) -> None:
    if call.json:
        render.document(batch.model_dump(mode="json"))
    else:
        typer.echo(batch.id)


def _watched(ctx: Context, batch_id: str, *, as_json: bool) -> BatchObject:
    batch = batches.get(ctx, batch_id)
    with display() as shown:
        last = None
        for batch in follow(ctx, batch_id):
            event = {"event": "progress", "status": batch.status, **batch.request_counts.model_dump(), **batch.measured.model_dump()}
            if as_json and event != last:
                render.document(event)
                last = event
            elif not as_json:
                shown.show(batch, _unattended(ctx, batch))
    return batch


def _show_rows(ctx: Context, batch_id: str, *, as_json: bool) -> None:
    """A line each, in the order in which they ended."""
    after = 0
    while page := batches.outcomes(ctx, batch_id, after=after):
        for row in page:
            known = {name: row[name] for name in ("custom_id", "outcome", "task", "reason", "drafted_tokens", "accepted_tokens")}
            if as_json:
                render.document({"event": "row", **known, "mode": row["decided_mode"]})
            else:
                drafts = f"{row['accepted_tokens'] or 0} of {row['drafted_tokens'] or 0} drafted"
                typer.echo("\t".join((row["custom_id"], row["outcome"], row["task"], row["decided_mode"], drafts, row["reason"])))
        after = page[-1]["sequence"]


def _unattended(ctx: Context, batch: BatchObject) -> str:
    idle = batch.status not in TERMINAL and not reports.engines_alive(ctx)
    return f"{batch.status}; no worker is alive, start one with `specbatch up`" if idle else ""


def _pairs(words: list[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--metadata {word}: write it as KEY=VALUE")
        pairs[key] = value
    return pairs
