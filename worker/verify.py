"""`python -m worker.verify`: plain decoding and then each mode, one engine after the other, asked the same; tells a lossless.Report."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from worker.fitness import unfit
from worker.interview import Asked, Session, ask, interview
from worker.probes import Probe, greedy_probes, stop_probe

ANOTHER_BATCH = 2  # requests in flight of the second plain run: its arithmetic is that of other batches
FEW = 6  # tokens, of the first greedy answers

Build = Callable[[Settings, Mode], Engine]
Say = Callable[[str], None]


async def verify(build: Build, settings: Settings, parameters: Parameters, say: Say) -> Report:
    """Ask plain decoding, then each mode. A mode that dies has a fault; one that does not start is untried, and the others are not.

    Raises EngineStartError where plain decoding does not start or dies, and where no mode can be tried.
    """
    untried = unfit(settings, parameters.modes)
    _require_some([ModeReport(mode=mode, untried=untried.get(mode)) for mode in parameters.modes])
    try:
        asked = await _plain(build, settings, parameters, say)
    except EngineDied as died:
        raise EngineStartError(f"the engine died in mode plain: {died}. vLLM's log: {_log(settings)}") from died
    reports = []
    for mode in parameters.modes:
        try:
            if mode in untried:
                raise EngineStartError(untried[mode])
            reports.append(ModeReport(mode=mode, cases=tuple(await _try(build, settings, mode, asked, parameters, say))))
        except EngineStartError as failure:
            reports.append(ModeReport(mode=mode, untried=failure.message))
    _require_some(reports)
    return Report(model=asked.model, noise=asked.noise, tolerance=lossless.tolerance(asked.noise), modes=tuple(reports))


def _require_some(reports: list[ModeReport]) -> None:
    if all(report.untried for report in reports):
        raise EngineStartError("; ".join(f"mode {report.mode} cannot be tried: {report.untried}" for report in reports))


@dataclass(frozen=True, slots=True)
class _Plain:
    """What plain decoding was asked and said: the deterministic probes, the few tokens to sample among, the noise between its own runs."""

    model: str
    probes: list[Probe]
    few: list[int]
    noise: float
    session: Session


async def _plain(build: Build, settings: Settings, parameters: Parameters, say: Say) -> _Plain:
    async with _running(build, settings, Mode.PLAIN, say) as engine:
        probes = greedy_probes(parameters.n)
        first, again = await ask(engine, probes[0]), await ask(engine, probes[0], at_once=ANOTHER_BATCH)
        _require_tokens(first)
        probes.append(stop_probe([answer.text for answer in first.choices()], probes[0].bodies))
        few = list(dict.fromkeys(token for tokens in first.tokens() for token in tokens))[:FEW]
        session = await interview(engine, probes, few, parameters, range(parameters.seeds))
        # The interview's batches hold the other probes as well: of few prompts, the first two runs would have had the same batch.
        pairs = [pair for run in (again, session.greedy[0]) for pair in zip(first.choices(), run.choices(), strict=True)]
        return _Plain(engine.model, probes, few, lossless.noise(pairs), session)


async def _try(build: Build, settings: Settings, mode: Mode, plain: _Plain, parameters: Parameters, say: Say) -> list[Case]:
    try:
        async with _running(build, settings, mode, say) as engine:
            # Seeds of its own: with plain decoding's, both would draw the same first tokens, and the tests ask for independent draws.
            session = await interview(engine, plain.probes, plain.few, parameters, range(parameters.seeds, 2 * parameters.seeds))
    except EngineDied as died:
        return [_faulty("engine", f"it died of requests that plain decoding answers ({died}). vLLM's log: {_log(settings)}")]
    say(f"{mode}: judging")
    return _judge(plain.session, session, lossless.tolerance(plain.noise), _excuse(settings, mode))


def _excuse(settings: Settings, mode: Mode) -> str | None:
    """Why a seed need not repeat its text in this mode: its drafts do not follow from the row alone. Policy sends such rows to plain."""
    if mode is Mode.SUFFIX:
        return "its drafts depend on the rows before"
    return "its drafts are drawn by chance" if mode is Mode.DRAFT_MODEL and settings.draft_sample_method == "probabilistic" else None


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


def _judge(plain: Session, mode: Session, tolerance: float, excuse: str | None) -> list[Case]:
    cases = [_judge_greedy(*pair, tolerance) for pair in zip(plain.greedy, mode.greedy, strict=True)]
    cases += [_judge_sampled(*pair) for pair in zip(plain.sampled, mode.sampled, strict=True)]
    return [*cases, _judge_repeats(plain.repeats, mode.repeats, excuse)]


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


def _judge_repeats(plain: tuple[Asked, Asked], mode: tuple[Asked, Asked], excuse: str | None) -> Case:
    """A seed asked twice gives one text, as often as in plain decoding: there, too, arithmetic may move a draw over an edge.

    With an excuse fewer repetitions are no fault, and are told.
    """
    for one, other in zip(plain, mode, strict=True):
        if (refused := _refused(one, other)) is not None:
            return refused
    in_plain, in_mode = (
        sum(one == other for one, other in zip(once.tokens(), again.tokens(), strict=True)) for once, again in (plain, mode)
    )
    requests, drafted = len(mode[0].replies), sum(asked.drafted or 0 for asked in mode)
    p_value = frequencies.fewer_p(in_plain, in_mode, requests)
    said = f"{in_mode} of {requests} seeded requests repeat their text, {in_plain} in plain decoding: p = {p_value:.2g}"
    fewer = p_value <= frequencies.LEVEL
    excused = f"{excuse}, so seeds do not repeat: rows with a seed run in plain" if fewer and excuse else None
    return Case(
        name=mode[0].probe.name,
        compared=requests,
        identical=in_mode,
        differences=(Difference(prompt=0, verdict=Verdict.FAULT, message=said),) if fewer and not excused else (),
        p_value=p_value,
        threshold=frequencies.LEVEL,
        drafted_tokens=drafted,
        accepted_tokens=sum(asked.accepted or 0 for asked in mode),
        note=excused or _note(drafted),
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
