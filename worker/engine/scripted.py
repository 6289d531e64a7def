"""An engine without a model: deterministic answers at any speed, and the faults that tests ask of it (see faults.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from specbatch.domain import Measurement, Mode, Reply
from specbatch.errors import EngineStartError
from specbatch.serving import resolve_model, served_names
from specbatch.settings import Settings
from worker.engine import bodies
from worker.engine.base import EngineDied, EngineStatus
from worker.engine.faults import FAULTS_VARIABLE, Faults
from worker.engine.replies import CONTEXT_LENGTH_EXCEEDED, error_reply, invalid_body, streaming, unknown_endpoint, unknown_model
from worker.engine.script import ScriptedRequest, Utterance, count, speak

CONTEXT_TOKENS = 8192
Dress = Callable[[list[Utterance], int], dict[str, Any]]
ACCEPTED_SHARE = {Mode.NGRAM: 0.3, Mode.DRAFT_MODEL: 0.5, Mode.EAGLE: 0.6, Mode.EAGLE3: 0.6, Mode.SUFFIX: 0.6}  # of the generated tokens


class ScriptedEngine:
    def __init__(self, settings: Settings, mode: Mode) -> None:
        self.model = resolve_model(settings)
        self.mode = mode
        self._settings = settings
        self._names = frozenset(served_names(settings))
        self._context = settings.max_model_len or CONTEXT_TOKENS
        self._slots = asyncio.Semaphore(settings.max_num_seqs) if settings.max_num_seqs else contextlib.nullcontext()
        self._death: asyncio.Event | None = None
        self._faults = Faults(settings)
        self._replies: dict[str, Callable[[str, ScriptedRequest], Reply]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/responses": self._response,
            "/v1/embeddings": self._embedding,
            "/v1/score": self._score,
            "/v1/rerank": self._rerank,
        }
        self._answers = self._running = self._drafted = self._accepted = self._generated = self._steps = 0

    async def start(self) -> None:
        if self._faults.at_start:
            raise EngineStartError(f"the scripted engine was told not to start: unset {FAULTS_VARIABLE}")
        self._death = asyncio.Event()

    async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
        self._running += 1
        try:
            async with self._slots:
                return await self._answer(request_id, endpoint, body)
        finally:
            self._running -= 1

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._replies)

    def status(self) -> EngineStatus:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return EngineStatus(self._running, peak, self._drafted, self._accepted, self._generated, self._steps)

    @property
    def dead(self) -> bool:
        return self._death is None or self._death.is_set()

    async def stop(self) -> None:
        if self._death is not None:
            self._death.set()

    async def _answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
        if self.dead:
            raise EngineDied("the scripted engine is not running: start it")
        try:
            request = ScriptedRequest.model_validate(body)
        except ValidationError as wrong:
            return invalid_body(wrong)
        if body.get("stream"):
            return streaming()
        metadata = request.metadata or {}
        self._faults.note("started", request_id)
        await self._pass_time(float(metadata.get("x-delay-ms", self._settings.scripted_delay_ms)) / 1000)
        self._answers += 1
        reply = await self._fault(metadata.get("x-fault"), body) or self._reply(request_id, endpoint, request)
        self._faults.note("answered", request_id)
        return reply

    async def _pass_time(self, seconds: float | None) -> None:
        """Wait, or die with the engine. `None` waits for nothing but its death."""
        death = self._death
        if death is None:
            raise EngineDied("the scripted engine was never started")
        if seconds == 0:
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(death.wait(), seconds)
        if death.is_set():
            raise EngineDied("the scripted engine died")

    async def _fault(self, asked: object, body: dict[str, Any]) -> Reply | None:
        match self._faults.choose(asked, body, self._answers):
            case "die":
                await self.stop()
                raise EngineDied("the scripted engine died of a request that asked for it")
            case "exit":
                os._exit(137)
            case "hang":
                await self._pass_time(None)
            case "refuse":
                return error_reply(HTTPStatus.BAD_REQUEST, "The request asked to be refused.", param="metadata")
            case "error":
                return error_reply(HTTPStatus.INTERNAL_SERVER_ERROR, "The request asked for a server error.")
        return None

    def _reply(self, request_id: str, endpoint: str, request: ScriptedRequest) -> Reply:
        answer = self._replies.get(endpoint)
        if answer is None:
            return unknown_endpoint(endpoint, tuple(self._replies))
        if request.model is not None and request.model not in self._names:
            return unknown_model(request.model)
        if self.mode is not Mode.PLAIN and (request.min_p or request.logit_bias):
            param = "min_p" if request.min_p else "logit_bias"
            return error_reply(HTTPStatus.BAD_REQUEST, "min_p and logit_bias are not supported with speculative decoding.", param=param)
        return answer(request_id, request)

    def _chat(self, request_id: str, request: ScriptedRequest) -> Reply:
        return self._generate(request, request.messages, "messages", partial(bodies.chat_body, request_id, self.model, request))

    def _completion(self, request_id: str, request: ScriptedRequest) -> Reply:
        return self._generate(request, request.prompt, "prompt", partial(bodies.completion_body, request_id, self.model, request))

    def _response(self, request_id: str, request: ScriptedRequest) -> Reply:
        return self._generate(request, request.input, "input", partial(bodies.response_body, request_id, self.model, request))

    def _generate(self, request: ScriptedRequest, content: object, param: str, dress: Dress) -> Reply:
        if not content:
            return error_reply(HTTPStatus.BAD_REQUEST, f"Missing required parameter: '{param}'.", param=param)
        several = isinstance(content, list) and param == "prompt" and not isinstance(content[0], int)
        contents: list[Any] = list(content) if several and isinstance(content, list) else [content]
        prompt_tokens = sum(count(one) for one in contents)
        if prompt_tokens + (request.limit or 1) > self._context:
            asked = f"{prompt_tokens} of prompt and {request.limit or 1} more were asked"
            said = f"This model's maximum context length is {self._context} tokens; {asked}."
            return error_reply(HTTPStatus.BAD_REQUEST, said, param="max_tokens", code=CONTEXT_LENGTH_EXCEEDED)
        said_all = [speak(request, one, index) for one in contents for index in range(request.n)]
        return Reply(HTTPStatus.OK, dress(said_all, prompt_tokens), self._measure(said_all, prompt_tokens))

    def _measure(self, said: list[Utterance], prompt_tokens: int) -> Measurement:
        """As vLLM measures: nothing of the time or of the drafts where a request has several choices."""
        generated = sum(len(one.tokens) for one in said)
        self._generated += generated
        self._steps += generated  # as plain decoding; less below
        if len(said) > 1:
            return Measurement(prompt_tokens, 0, generated, said[0].finish_reason)
        seconds = self._settings.scripted_delay_ms / 1000 / max(1, generated)
        timed = Measurement(prompt_tokens, 0, generated, said[0].finish_reason, 0.0, seconds, seconds)
        if self.mode is Mode.PLAIN or generated == 0:
            return timed
        tokens = {Mode.NGRAM: self._settings.ngram_tokens, Mode.SUFFIX: self._settings.suffix_tokens}
        k = tokens.get(self.mode, self._settings.draft_tokens)
        accepted = int(generated * min(ACCEPTED_SHARE[self.mode], k / (k + 1)))  # a step accepts k tokens at most and adds one
        steps = generated - accepted
        drafted = steps * k
        self._steps -= accepted
        self._drafted += drafted
        self._accepted += accepted
        return replace(
            timed,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            mean_acceptance_length=1 + accepted / steps,
            steps_by_accepted=_dealt(accepted, steps, k),
        )

    def _embedding(self, request_id: str, request: ScriptedRequest) -> Reply:
        if not request.input:
            return error_reply(HTTPStatus.BAD_REQUEST, "Missing required parameter: 'input'.", param="input")
        return _pooled(bodies.embedding_body(request_id, self.model, request))

    def _score(self, request_id: str, request: ScriptedRequest) -> Reply:
        fields = request.model_extra or {}
        queries = _as_list(fields.get("queries") or fields.get("text_1"))
        documents = _as_list(fields.get("documents") or fields.get("text_2"))
        if not queries or not documents or (len(queries) > 1 and len(queries) != len(documents)):
            return error_reply(HTTPStatus.BAD_REQUEST, "Give one query, or as many queries as documents.", param="queries")
        return _pooled(bodies.score_body(request_id, self.model, queries, documents))

    def _rerank(self, request_id: str, request: ScriptedRequest) -> Reply:
        fields = request.model_extra or {}
        if not fields.get("query") or not fields.get("documents"):
            return error_reply(HTTPStatus.BAD_REQUEST, "Give a query and at least one document.", param="documents")
        return _pooled(bodies.rerank_body(request_id, self.model, fields["query"], _as_list(fields["documents"]), fields.get("top_n")))


def _pooled(body: dict[str, Any]) -> Reply:
    return Reply(HTTPStatus.OK, body, Measurement(prompt_tokens=body["usage"]["total_tokens"]))


def _dealt(accepted: int, steps: int, k: int) -> tuple[int, ...]:
    """Steps by how many tokens each accepted, as even as whole numbers allow."""
    each, over = divmod(accepted, steps)
    return tuple((steps - over) * (count == each) + over * (count == each + 1) for count in range(k + 1))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
