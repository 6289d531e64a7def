"""An engine whose language model is a table: what verify compares, without vLLM, and with faults that can be planted."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

from specbatch.domain import Measurement, Mode, Reply
from specbatch.settings import Settings
from worker.engine.base import EngineDied, EngineStatus
from worker.engine.replies import error_reply

WORDS = " abcdefghijklmnop"
TOP = 8
Body = dict[str, Any]


def spread(logits: list[float], temperature: float = 1.0) -> list[float]:
    """Log probabilities."""
    scaled = [logit / temperature for logit in logits]
    total = math.log(sum(math.exp(one) for one in scaled))
    return [one - total for one in scaled]


class ChainEngine:
    """Each token's logits hang on the token before and on the request; penalties, seeds, stop strings and n are obeyed.

    `change` turns a request into the one that is answered instead, `tamper` a body into the one that is returned: so faults get in.
    """

    def __init__(
        self, mode: Mode, change: Callable[[Body], Body] = dict, tamper: Callable[[Body, Body], Body] = lambda _, body: body
    ) -> None:
        self.model = "chain"
        self.mode = mode
        self._change = change
        self._tamper = tamper
        self._drafted = 0
        self._chance = random.Random(mode.value)  # of requests without a seed
        self.running = False

    async def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False

    @property
    def dead(self) -> bool:
        return not self.running

    def status(self) -> EngineStatus:
        return EngineStatus(0, None, self._drafted, self._drafted // 2, 0, 0)

    async def answer(self, request_id: str, endpoint: str, body: Body) -> Reply:
        await asyncio.sleep(0)
        asked = self._change(body)
        if self.mode is not Mode.PLAIN and asked.get("min_p"):
            return error_reply(400, "min_p is refused under speculation")
        if asked.get("die"):
            self.running = False
        if self.dead:
            raise EngineDied("the table is gone")
        choices = [self._choice(asked, index) for index in range(asked.get("n", 1))]
        drafted = 0 if self.mode is Mode.PLAIN else sum(len(choice["token_ids"]) for choice in choices)
        self._drafted += drafted
        return Reply(200, self._tamper(body, {"choices": choices}), Measurement(drafted_tokens=drafted, accepted_tokens=drafted // 2))

    def _choice(self, body: Body, index: int) -> Body:
        prompt = str(body["messages"])
        chance = random.Random(f"{body.get('seed', self._chance.random())}-{index}")
        tokens: list[int] = []
        listed: list[Body] = []
        text, finish = "", "length"
        while len(tokens) < body["max_tokens"]:
            logprobs = self._logprobs(prompt, tokens, body)
            token = self._pick(logprobs, body, chance)
            tokens.append(token)
            listed.append(_entry(token, logprobs))
            text += WORDS[token]
            ended = next((stop for stop in body.get("stop", ()) if stop in text), None)
            if ended is not None:
                text, finish = text[: text.index(ended)], "stop"
                break
        logprobs_of = {"content": listed} if body.get("logprobs") else None
        return {"index": index, "message": {"content": text}, "finish_reason": finish, "token_ids": tokens, "logprobs": logprobs_of}

    def _logprobs(self, prompt: str, tokens: list[int], body: Body) -> list[float]:
        table = random.Random(f"{prompt}-{tokens[-1:]}")
        logits = [table.gauss(0.0, 1.5) for _ in WORDS]
        for token in set(tokens):
            logits[token] -= body.get("presence_penalty", 0.0) + body.get("frequency_penalty", 0.0) * tokens.count(token)
            logits[token] /= body.get("repetition_penalty", 1.0)
        return spread(logits, body["temperature"] or 1.0)

    def _pick(self, logprobs: list[float], body: Body, chance: random.Random) -> int:
        order = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])
        if body["temperature"] == 0:
            return order[0]
        allowed = body.get("allowed_token_ids", order)
        kept = [token for token in order if token in allowed][: body.get("top_k", len(order))]
        return chance.choices(kept, [math.exp(logprobs[token]) for token in kept])[0]


def _entry(token: int, logprobs: list[float]) -> Body:
    order = sorted(range(len(logprobs)), key=lambda each: -logprobs[each])[:TOP]
    top = [{"token": f"token_id:{each}", "logprob": logprobs[each]} for each in order]
    return {"token": f"token_id:{token}", "bytes": list(WORDS[token].encode()), "logprob": logprobs[token], "top_logprobs": top}


def builder(change: Callable[[Body], Body] = dict, tamper: Callable[[Body, Body], Body] = lambda _, body: body) -> Any:
    """A `build` of verify: plain decoding is honest, every other mode has the fault."""

    def build(settings: Settings, mode: Mode) -> ChainEngine:
        return ChainEngine(mode) if mode is Mode.PLAIN else ChainEngine(mode, change, tamper)

    return build
