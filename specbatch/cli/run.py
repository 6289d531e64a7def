"""`run`: the main job from a file of requests to a file of answers, with everything it needs started here."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

import typer

from specbatch import services
from specbatch.cli import render
from specbatch.cli import source as sources
from specbatch.cli.flags import ENGINE, SERVER, WORK, Call, configured
from specbatch.cli.jobs import NamedMode, NamedTask, Output, Requests, ending, new_batch
from specbatch.cli.target import Target
from specbatch.cli.watch import display, follow
from specbatch.context import Context, opened
from specbatch.domain import TERMINAL, JobStatus, Mode, TaskType
from specbatch.errors import EngineStartError, UsageError
from specbatch.processes import Crew, signals_interrupt
from specbatch.service import batches, reports
from specbatch.serving import resolve_model
from specbatch.settings import Settings
from specbatch.staff import Staff
from specbatch.wire import BatchObject

INTERRUPTED = 130
ABANDONED = {JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLING, JobStatus.CANCELLED}


@configured(ENGINE, SERVER, WORK)
def run(
    call: Call,
    requests: Requests,
    output: Output,
    mode: NamedMode = None,
    task: NamedTask = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew, even where an interrupted run could be continued.")] = False,
) -> None:
    """Answer a file of requests, start to end. Interrupted, the same command continues where it stopped."""
    settings = _with_mode(call, mode)
    target = Target(output, requests)
    if call.json:
        target.refuse_json()
    with sources.opened(requests) as source:
        job = _Job(settings, source, mode, task)
        services.migrate(settings)
        with opened(settings) as ctx:
            try:
                batch = _finish(ctx, job, fresh=fresh)
            except KeyboardInterrupt:
                render.say("interrupted: the same command continues where this one stopped")
                raise typer.Exit(INTERRUPTED) from None
            _conclude(ctx, call, target, batch)
    raise typer.Exit(ending(batch))


class _Job:
    """What this command asks for, and the key under which the same command finds it again."""

    def __init__(self, settings: Settings, source: sources.Source, mode: Mode | None, task: TaskType | None) -> None:
        self.settings, self.mode, self._source, self._task = settings, mode, source, task
        self.model = resolve_model(settings)
        self._endpoint = source.endpoint()
        parts = [source.digest(), self._endpoint, self.model, settings.draft, settings.eagle, self.mode, list(settings.modes), task]
        self.key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def submit(self, ctx: Context) -> BatchObject:
        file = self._source.upload(ctx)
        return batches.submit(ctx, new_batch(file.id, self._endpoint, self.mode, self._task, {}), self.key, model=self.model)


def _with_mode(call: Call, mode: Mode | None) -> Settings:
    """--mode alone also says which engine to start."""
    settings = call.settings
    if mode is None or mode in settings.modes:
        return settings
    if "modes" in call.given:
        raise UsageError(f"--mode {mode} is not among --modes {','.join(settings.modes)}: add it there, or leave --modes out")
    return settings.model_copy(update={"modes": (mode,)})


def _finish(ctx: Context, job: _Job, *, fresh: bool) -> BatchObject:
    """The batch of this job, ended: continued if an earlier command was interrupted, else submitted now."""
    batch = batches.interrupted(ctx, job.key)
    if batch is not None and (fresh or batch.status in ABANDONED):
        batches.delivered(ctx, batch.id)
        batch = None
    if batch is not None and batch.status in TERMINAL:
        return batch
    with services.redis(job.settings) as redis_url, signals_interrupt(), Crew(job.settings, redis_url, render.say) as crew:
        if batch is None:
            batch = job.submit(ctx)
        else:
            render.say(f"continuing {batch.id}: {batch.request_counts.completed} of {batch.request_counts.total} rows are answered")
        crew.start("reconciler", "worker.reconciler")
        try:
            return _work(ctx, crew, job, batch)
        except EngineStartError:
            _withdraw(ctx, batch.id)
            raise


def _work(ctx: Context, crew: Crew, job: _Job, batch: BatchObject) -> BatchObject:
    staff = Staff(ctx, crew, job.settings, job.mode)
    with display() as shown:
        for reading in follow(ctx, batch.id):
            shown.show(reading, staff.see_to(reading))
    return reading


def _withdraw(ctx: Context, job_id: str) -> None:
    """A batch that no engine here can begin must not wait for a later one: it was reported as refused."""
    batch = batches.get(ctx, job_id)
    if batch.status not in TERMINAL and batch.request_counts.completed + batch.request_counts.failed == 0:
        batches.cancel(ctx, job_id)


def _conclude(ctx: Context, call: Call, target: Target, batch: BatchObject) -> None:
    if batch.status is JobStatus.FAILED:
        batches.delivered(ctx, batch.id)
        if call.json:
            render.document(batch.model_dump(mode="json"))
        render.problems(batch)
        render.say("specbatch: error: the requests are at fault: correct the lines above and run it again")
        return
    place = target.deliver(ctx, batch)
    batches.delivered(ctx, batch.id)
    report = reports.of_batch(ctx, batch.id)
    if call.json:
        render.document(report.model_dump(mode="json") | target.document(batch))
    else:
        render.report(report, place)
