"""One engine, asked everything that `verify` compares, through the requests that users send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbatch.domain import Reply
from specbatch.lossless import Answer, Parameters
from worker.engine.base import Engine
from worker.probes import Body, Probe, repeat_probe, sampled_probes, seeded

CHAT = "/v1/chat/completions"
AT_ONCE = 64  # requests in flight
SAMPLED_PROMPTS = 4  # at most: each costs twice the seeds in requests
OK = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """A probe's replies, and the drafts that they took; None where the engine ran more than this probe."""

    probe: Probe
    replies: list[Reply]
    drafted: int | None = None
    accepted: int | None = None

    @property
    def refusal(self) -> str | None:
        """What the engine said to the first request that it did not answer."""
        refused = next((reply for reply in self.replies if reply.status_code != OK), None)
        return None if refused is None else str(refused.body.get("error", {}).get("message", refused.status_code))

    def answers(self) -> list[list[Answer]]:
        """Each request's choices."""
        return [read_answers(reply.body) for reply in self.replies]

    def choices(self) -> list[Answer]:
        """All of them in a row."""
        return [answer for answers in self.answers() for answer in answers]

    def tokens(self) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in self.choices()]


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that one engine was asked. `sampled` holds each prompt's draws, by probe."""

    greedy: list[Asked]
    sampled: list[list[Asked]]
    repeats: tuple[Asked, Asked]


async def interview(engine: Engine, probes: Sequence[Probe], few: Sequence[int], parameters: Parameters, seeds: range) -> Session:
    """The deterministic probes share their batches: rows of other kinds beside it have leaked into a request before.

    Stop strings are asked alone: vLLM tells a request's drafts only where it ends it itself.
    """
    *shared, stops = probes
    greedy = await asyncio.gather(*(ask(engine, probe, alone=False) for probe in shared))
    greedy.append(await ask(engine, stops))
    sampled = []
    for probe in sampled_probes(min(parameters.n, SAMPLED_PROMPTS), few):
        sampled.append([await ask(engine, drawn) for drawn in seeded(probe, seeds, _choices)])
    repeat = repeat_probe(parameters.n, few)
    return Session(greedy, sampled, (await ask(engine, repeat), await ask(engine, repeat)))


async def ask(engine: Engine, probe: Probe, *, at_once: int = AT_ONCE, alone: bool = True) -> Asked:
    gate = asyncio.Semaphore(at_once)

    async def answered(number: int, body: Body) -> Reply:
        async with gate:
            return await engine.answer(f"verify-{id(probe)}-{number}-{at_once}", CHAT, body)

    before = engine.status()
    replies = list(await asyncio.gather(*(answered(number, body) for number, body in enumerate(probe.bodies))))
    after = engine.status()
    if alone:
        return Asked(probe, replies, after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens)
    if any(_choices(body) > 1 for body in probe.bodies):
        return Asked(probe, replies)
    measured = [reply.measurement for reply in replies]
    return Asked(probe, replies, sum(each.drafted_tokens for each in measured), sum(each.accepted_tokens for each in measured))


def _choices(body: Body) -> int:
    return int(body.get("n", 1))


def read_answers(body: dict[str, Any]) -> list[Answer]:
    """vLLM's chat choices, in the order of their indices; of a `return_tokens_as_token_ids` request, with log probabilities by token."""
    return [_read(choice) for choice in sorted(body["choices"], key=lambda choice: choice["index"])]


def _read(choice: dict[str, Any]) -> Answer:
    listed = (choice.get("logprobs") or {}).get("content") or []
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return Answer(
        tokens=tuple(choice.get("token_ids") or ()),
        pieces=tuple(bytes(entry.get("bytes") or b"").decode(errors="replace") for entry in listed),
        logprobs=tuple(entry["logprob"] for entry in listed),
        tops=tuple(_likeliest(entry) for entry in listed),
        text=message.get("content") or "",
        finish_reason=choice.get("finish_reason"),
        tool_calls=tuple((call["name"], call["arguments"]) for call in calls),
    )


def _likeliest(entry: dict[str, Any]) -> dict[int, float]:
    numbered = ((top["token"].partition("token_id:")[2], top["logprob"]) for top in entry["top_logprobs"])
    return {int(number): logprob for number, logprob in numbered if number}
