"""`python -m worker.tune`: starts one engine and measures it at the points of a trial, which it reads from standard input.

Each point is a closed loop: `load` clients, each with one request in the engine, the next as soon as it is answered. The first requests
are cut to different lengths, so that the clients do not move in step, and are not measured: a batch that is always between its first and
last tokens is what a running worker looks like. Beyond the largest load of a closed loop all requests are handed over at once (bulk).
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specbatch import errand, logs, workload
from specbatch.domain import Measurement, Mode, Reply, TaskType
from specbatch.errors import EngineStartError, SpecbatchError
from specbatch.machine import this_machine
from specbatch.processes import ERROR_PREFIX
from specbatch.settings import Settings, load
from specbatch.trial import Measured, Point, Started, Trial
from specbatch.tuning import LOADS, Speed
from worker.engine import build
from worker.engine.base import Engine, EngineDied, EngineStatus

ENDPOINT = "/v1/chat/completions"
LEAST_REQUESTS = 12  # answered in a window, where time allows
WAVES = {1: 6, 64: 3, 200: 2}  # from that load: answers of each client, where time allows; with more clients fewer say as much
APART = 8  # times the load: where a point's prompts begin. A point takes two loads more than its waves at most: doubled loads share none.
DRAIN_SECONDS = 30.0
WARM_REQUESTS, WARM_TOKENS, WARM_SECONDS = 32, 24, 8.0
WARM_START = 1_000_003  # far from every point's prompts
K_SETTING = {
    Mode.NGRAM: "ngram_tokens",
    Mode.SUFFIX: "suffix_tokens",
    **dict.fromkeys((Mode.DRAFT_MODEL, Mode.EAGLE, Mode.EAGLE3), "draft_tokens"),
}

Tell = Callable[[Started | Measured], None]
Build = Callable[[Settings, Mode], Engine]


async def run(trial: Trial, settings: Settings, tell: Tell, make: Build = build) -> None:
    """Measure every point for which there is time. Raises EngineStartError, also when the engine dies."""
    setting = K_SETTING.get(trial.mode)
    engine = make(settings.model_copy(update={setting: trial.k}) if setting else settings, trial.mode)
    began = time.monotonic()
    try:
        await engine.start()
        start_seconds = time.monotonic() - began
        machine = this_machine(settings)
        tell(Started(start_seconds=start_seconds, vllm=machine.vllm, device=machine.device))
        await _warm_up(engine)
        for point in trial.points:
            if time.monotonic() >= began + trial.seconds:
                break
            speed = await measure(engine, trial, point, start_seconds)
            if speed.tokens_per_second > 0:  # too slow for a single token within the window: nothing to keep
                tell(Measured(speed=speed))
    except EngineDied as died:
        raise EngineStartError(f"the engine died while {trial.mode} was measured: {died}") from died
    finally:
        await engine.stop()


async def _warm_up(engine: Engine) -> None:
    """What is compiled or allocated on first use belongs to no point."""
    for at_once in (WARM_REQUESTS, 1):
        bodies = workload.requests(TaskType.CHAT, WARM_START * at_once, max_tokens=WARM_TOKENS)
        await _Loop(engine, bodies, at_once, endless=False).run(warm=0, requests=at_once, seconds=WARM_SECONDS)


async def measure(engine: Engine, trial: Trial, point: Point, start_seconds: float = 0.0) -> Speed:
    """One point. Raises EngineDied, and EngineStartError where the engine refuses the requests."""
    bulk = point.load > max(LOADS)
    loop = _Loop(engine, _bodies(trial, point), point.load, endless=not bulk)
    waves = 1 if bulk else next(waves for least, waves in reversed(WAVES.items()) if point.load >= least)
    requests = max(waves * point.load, 1 if bulk else LEAST_REQUESTS)
    window = await loop.run(warm=0 if bulk else (point.load + 1) // 2, requests=requests, seconds=trial.point_seconds)
    before, after, seconds = window.before, window.after, window.seconds
    generated, steps = after.generated_tokens - before.generated_tokens, after.steps - before.steps
    return Speed(
        mode=trial.mode,
        task=point.task,
        load=point.load,
        k=trial.k,
        tokens_per_second=generated / seconds,
        requests=len(window.replies),
        seconds=seconds,
        ttft_seconds=_median([reply.ttft_seconds for reply in window.replies]),
        tpot_seconds=_median([reply.tpot_seconds for reply in window.replies]),
        drafted_tokens=after.drafted_tokens - before.drafted_tokens,
        accepted_tokens=after.accepted_tokens - before.accepted_tokens,
        step_seconds=seconds / steps if steps else None,
        tokens_per_step=generated / steps if steps else None,
        start_seconds=start_seconds,
        peak_memory_bytes=after.peak_memory_bytes,
    )


@dataclass(slots=True)
class _Window:
    before: EngineStatus
    after: EngineStatus
    seconds: float
    replies: list[Measurement]  # of requests that began in step with nobody, and ended inside the window


@dataclass(slots=True)
class _Loop:
    """Clients that keep `load` requests in an engine."""

    engine: Engine
    bodies: Iterator[dict[str, Any]]
    load: int
    endless: bool
    answered: int = 0
    replies: list[Measurement] = field(default_factory=list)
    _looks: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, *, warm: int, requests: int, seconds: float) -> _Window:
        """Open the window after `warm` answers; close it `requests` answers later, or when the seconds are over."""
        try:
            async with asyncio.TaskGroup() as group:
                clients = [group.create_task(self._client(number)) for number in range(self.load)]
                await self._reach(warm, seconds)
                before, began, first = self.engine.status(), time.monotonic(), len(self.replies)
                await self._reach(self.answered + requests, seconds)
                after, ended, replies = self.engine.status(), time.monotonic(), self.replies[first:]
                for client in clients:
                    client.cancel()
        except* EngineDied as died:
            raise died.exceptions[0] from None
        except* EngineStartError as refused:
            raise refused.exceptions[0] from None
        await self._drain()
        return _Window(before, after, ended - began, replies)

    async def _client(self, number: int) -> None:
        body = next(self.bodies)
        if self.endless:  # (number + 1) / load of the full length: the clients' requests then end one after the other
            await self._ask(f"{number}-0", body | {"max_tokens": max(1, body["max_tokens"] * (number + 1) // (self.load + 1))})
        else:
            self.replies.append((await self._ask(f"{number}-0", body)).measurement)
        turn = 0
        while self.endless:
            turn += 1
            self.replies.append((await self._ask(f"{number}-{turn}", next(self.bodies))).measurement)

    async def _ask(self, name: str, body: dict[str, Any]) -> Reply:
        reply = await self.engine.answer(f"tune-{time.monotonic_ns()}-{name}", ENDPOINT, body)
        if reply.status_code != 200:
            said = reply.body.get("error", {}).get("message", reply.status_code)
            raise EngineStartError(f"the engine refuses a request of the measurement: {said}")
        self.answered += 1
        self._looks.set()
        return reply

    async def _reach(self, answers: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.answered < answers and (left := until - time.monotonic()) > 0:
            self._looks.clear()
            try:
                await asyncio.wait_for(self._looks.wait(), left)
            except TimeoutError:
                return

    async def _drain(self) -> None:
        """The next point starts in an empty engine."""
        until = time.monotonic() + DRAIN_SECONDS
        while self.engine.status().running_requests and time.monotonic() < until:
            await asyncio.sleep(0.01)


def _bodies(trial: Trial, point: Point) -> Iterator[dict[str, Any]]:
    """The same prompts at this point in every mode, and others at every other point: no prompt meets its own cached prefix."""
    return workload.requests(point.task, APART * point.load, max_tokens=trial.max_tokens)


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def main() -> int:
    try:
        settings = load()
        logs.configure(settings)
        trial = Trial.model_validate_json(errand.receive())
        asyncio.run(run(trial, settings, lambda event: print(event.model_dump_json(), flush=True)))
    except SpecbatchError as failure:
        print(f"{ERROR_PREFIX}{failure.message}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
