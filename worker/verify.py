"""`python -m worker.verify`: plain decoding and then each mode, one engine after the other, asked the same; tells a lossless.Report."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from specbatch import errand, frequencies, logs, lossless
from specbatch.domain import Mode
from specbatch.embedded import prepare
from specbatch.errors import EngineStartError, SpecbatchError
from specbatch.lossless import Case, Difference, ModeReport, Parameters, Progress, Report, Verdict
from specbatch.processes import ERROR_PREFIX
from specbatch.settings import Settings, load
from worker import engine as engines
from worker.engine.base import Engine, EngineDied
from worker.interview import Asked, Session, ask, interview
from worker.probes import Probe, greedy_probes, stop_probe

ANOTHER_BATCH = 2  # requests in flight of the second plain run: its arithmetic is that of other batches
FEW = 6  # tokens, of the first greedy answers

Build = Callable[[Settings, Mode], Engine]
Say = Callable[[str], None]


async def verify(build: Build, settings: Settings, parameters: Parameters, say: Say) -> Report:
    """Ask plain decoding, then each mode. Raises EngineStartError, also when plain decoding dies; a mode that dies has a fault."""
    try:
        probes, few, noise, plain, model = await _plain(build, settings, parameters, say)
    except EngineDied as died:
        raise EngineStartError(f"the engine died in mode plain: {died}. vLLM's log: {_log(settings)}") from died
    tolerance = lossless.tolerance(noise)
    reports = []
    for mode in parameters.modes:
        try:
            async with _running(build, settings, mode, say) as engine:
                # Seeds of its own: with plain decoding's, both would draw the same first tokens, and the tests ask for independent draws.
                asked = await interview(engine, probes, few, parameters, range(parameters.seeds, 2 * parameters.seeds))
            say(f"{mode}: judging")
            cases = _judge(plain, asked, tolerance)
        except EngineDied as died:
            cases = [_faulty("engine", f"it died of requests that plain decoding answers ({died}). vLLM's log: {_log(settings)}")]
        reports.append(ModeReport(mode=mode, cases=tuple(cases)))
    return Report(model=model, noise=noise, tolerance=tolerance, modes=tuple(reports))


async def _plain(build: Build, settings: Settings, parameters: Parameters, say: Say) -> tuple[list[Probe], list[int], float, Session, str]:
    """The deterministic probes, the few tokens to sample among, the noise between two runs, plain decoding's session, the model's name."""
    async with _running(build, settings, Mode.PLAIN, say) as engine:
        probes = greedy_probes(parameters.n)
        first, again = await ask(engine, probes[0]), await ask(engine, probes[0], at_once=ANOTHER_BATCH)
        _require_tokens(first)
        noise = lossless.noise(zip(first.choices(), again.choices(), strict=True))
        probes.append(stop_probe([answer.text for answer in first.choices()], probes[0].bodies))
        few = list(dict.fromkeys(token for tokens in first.tokens() for token in tokens))[:FEW]
        plain = await interview(engine, probes, few, parameters, range(parameters.seeds))
        return probes, few, noise, plain, engine.model


@asynccontextmanager
async def _running(build: Build, settings: Settings, mode: Mode, say: Say) -> AsyncIterator[Engine]:
    engine = build(settings, mode)
    say(f"{mode}: starting the engine")
    try:
        await engine.start()
        say(f"{mode}: asking")
        yield engine
    finally:
        await engine.stop()


def _log(settings: Settings) -> Path:
    return settings.home / "logs" / "engine.log"


def _judge(plain: Session, mode: Session, tolerance: float) -> list[Case]:
    cases = [_judge_greedy(*pair, tolerance) for pair in zip(plain.greedy, mode.greedy, strict=True)]
    cases += [_judge_sampled(*pair) for pair in zip(plain.sampled, mode.sampled, strict=True)]
    return [*cases, _judge_repeats(plain.repeats, mode.repeats)]


def _judge_greedy(plain: Asked, mode: Asked, tolerance: float) -> Case:
    if (refused := _refused(plain, mode)) is not None:
        return refused
    differences, compared = [], 0
    for prompt, (ones, others) in enumerate(zip(plain.answers(), mode.answers(), strict=True)):
        compared += len(ones)
        if len(ones) != len(others):
            said = f"{len(others)} choices instead of {len(ones)}"
            differences.append(Difference(prompt=prompt, verdict=Verdict.FAULT, message=said))
        found = (lossless.judge(prompt, one, other, tolerance) for one, other in zip(ones, others, strict=False))
        differences += [difference for difference in found if difference is not None]
    return Case(
        name=plain.probe.name,
        compared=compared,
        identical=compared - len(differences),
        differences=tuple(differences),
        drafted_tokens=mode.drafted,
        accepted_tokens=mode.accepted,
        note=_note(mode.drafted),
    )


def _judge_sampled(plain: list[Asked], mode: list[Asked]) -> Case:
    for one, other in zip(plain, mode, strict=True):
        if (refused := _refused(one, other)) is not None:
            return refused
    tests, threshold = frequencies.compare([asked.tokens() for asked in plain], [asked.tokens() for asked in mode])
    differences = [
        Difference(prompt=test.prompt, verdict=Verdict.FAULT, message=f"{what} are distributed differently: p = {test.p_value:.2g}")
        for test in tests
        if test.p_value <= threshold
        for what in ("first tokens" if test.length == 1 else f"runs of {test.length} tokens",)
    ]
    drafted = sum(asked.drafted or 0 for asked in mode)
    return Case(
        name=plain[0].probe.name,
        compared=sum(len(asked.tokens()) for asked in mode),
        differences=tuple(differences),
        p_value=min(test.p_value for test in tests),
        threshold=threshold,
        drafted_tokens=drafted,
        accepted_tokens=sum(asked.accepted or 0 for asked in mode),
        note=_note(drafted),
    )


def _judge_repeats(plain: tuple[Asked, Asked], mode: tuple[Asked, Asked]) -> Case:
    """A seed asked twice gives one text, as often as in plain decoding: there, too, arithmetic may move a draw over an edge."""
    for one, other in zip(plain, mode, strict=True):
        if (refused := _refused(one, other)) is not None:
            return refused
    in_plain, in_mode = (
        sum(one == other for one, other in zip(once.tokens(), again.tokens(), strict=True)) for once, again in (plain, mode)
    )
    requests, drafted = len(mode[0].replies), sum(asked.drafted or 0 for asked in mode)
    p_value = frequencies.fewer_p(in_plain, in_mode, requests)
    said = f"{in_mode} of {requests} seeded requests repeat their text, {in_plain} in plain decoding: p = {p_value:.2g}"
    fault = Difference(prompt=0, verdict=Verdict.FAULT, message=said)
    return Case(
        name=mode[0].probe.name,
        compared=requests,
        identical=in_mode,
        differences=(fault,) if p_value <= frequencies.LEVEL else (),
        p_value=p_value,
        threshold=frequencies.LEVEL,
        drafted_tokens=drafted,
        accepted_tokens=sum(asked.accepted or 0 for asked in mode),
        note=_note(drafted),
    )


def _refused(plain: Asked, mode: Asked) -> Case | None:
    """A request that plain decoding refuses proves nothing; one that only the mode refuses is a fault."""
    if plain.refusal is not None:
        return Case(name=plain.probe.name, compared=0, note=f"not judged, plain decoding refuses it: {plain.refusal}")
    if mode.refusal is None:
        return None
    return _faulty(plain.probe.name, f"refused, though plain decoding answers it: {mode.refusal}")


def _faulty(name: str, message: str) -> Case:
    return Case(name=name, compared=0, differences=(Difference(prompt=0, verdict=Verdict.FAULT, message=message),))


def _note(drafted: int | None) -> str | None:
    return "nothing was drafted: this case shows little" if drafted == 0 else None


def _require_tokens(asked: Asked) -> None:
    if asked.refusal is not None:
        raise EngineStartError(f"plain decoding refuses a simple chat request: {asked.refusal}")
    if not all(answer.tokens for answer in asked.choices()):
        raise EngineStartError("this engine returns no token ids, so nothing can be compared: use engine vllm")


def main() -> int:
    try:
        # Tokens are chosen by processed log probabilities, and forced tool calls need some parser.
        settings = load(logprobs_mode="processed_logprobs", tool_call_parser=load().tool_call_parser or "hermes")
        logs.configure(settings)
        prepare(settings)
        parameters = Parameters.model_validate_json(errand.receive())
        told = asyncio.run(verify(engines.build, settings, parameters, lambda message: _tell(Progress(message=message))))
        _tell(told)
    except SpecbatchError as failure:
        print(f"{ERROR_PREFIX}{failure.message}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _tell(value: Progress | Report) -> None:
    print(value.model_dump_json(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
