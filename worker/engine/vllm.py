"""vLLM in this process's event loop: AsyncLLM, answered through vLLM's own OpenAI serving classes. The one module that imports vLLM.

vLLM is imported when an engine starts, in a thread: the import takes seconds, and its environment must be set before.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from specbatch.domain import Mode, Reply
from specbatch.gpus import has_gpu
from specbatch.serving import resolve_model
from specbatch.settings import BUILTIN_MODEL, Settings
from worker import builtin, fitness
from worker.engine import logs, preflight, watchdog
from worker.engine.arguments import RUNNER, arguments, environment
from worker.engine.base import EngineDied, EngineStatus
from worker.engine.measuring import client_body, measure
from worker.engine.memory import Processes
from worker.engine.replies import (
    MODEL_NOT_FOUND,
    error_reply,
    invalid_body,
    missing_content,
    streaming,
    unknown_endpoint,
    unreadable_body,
)

GIVEN = frozenset(os.environ)  # what the user has set; an earlier engine of this process may be overridden
ARGUMENT_PARSERS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")  # 0.33, 0.32


@dataclass(frozen=True, slots=True)
class _Endpoint:
    request: TypeAdapter[Any]
    serve: Callable[[Any], Awaitable[Any]]


class VllmEngine:
    """One AsyncLLM. `start` may be called again after the engine died: it clears away what is left of it first."""

    def __init__(self, settings: Settings, mode: Mode) -> None:
        self.model = resolve_model(settings)
        self.mode = mode
        self._settings = settings
        self._cpu = not has_gpu()
        self._engine: Any = None
        self._endpoints: dict[str, _Endpoint] = {}
        self._counts = Counts()
        self._processes = Processes()
        self._device_peak: int | None = None
        self._launching: asyncio.Future[Any] | None = None

    async def start(self) -> None:
        await self.stop()
        watchdog.guard_children()  # before the engine's own processes are counted: it outlives an engine
        self._processes.begin()
        self._launching = asyncio.get_running_loop().run_in_executor(None, self._launch)
        try:
            arguments = await asyncio.shield(self._launching)
            self._endpoints = await _endpoints(self._engine, arguments)
        except BaseException:
            await self.stop()
            raise
        self.status()

    async def answer(self, request_id: str, endpoint: str, body: dict[str, Any]) -> Reply:
        if self.dead:
            raise EngineDied("vLLM is not running: start the engine")
        served = self._endpoints.get(endpoint)
        if served is None:
            return unknown_endpoint(endpoint, tuple(self._endpoints))
        if refusal := streaming() if body.get("stream") else missing_content(endpoint, body):
            return refusal
        try:
            request = served.request.validate_python(body | {"request_id": request_id})
        except ValidationError as wrong:
            return invalid_body(wrong)
        except Exception as slip:
            told = _reply(_error_object(slip))  # vLLM's own refusals name the parameter; over some malformed bodies its validators stumble
            return told if told.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else unreadable_body(slip)
        try:
            answered = await served.serve(request)
        except Exception as failed:
            answered = _error_object(failed)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # vLLM's classes turn a cancellation into an error object
        if self.dead:
            raise EngineDied("vLLM died while it answered")
        return _reply(answered)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._endpoints)

    def status(self) -> EngineStatus:
        running = self._engine.get_num_unfinished_requests() if self._engine is not None else 0
        done = self._counts
        return EngineStatus(running, self._peak_memory(), done.drafted, done.accepted, done.generated, done.steps)

    @property
    def dead(self) -> bool:
        return self._engine is None or bool(self._engine.errored)

    async def stop(self) -> None:
        if self._launching is not None:
            await asyncio.wait([self._launching])
            self._launching = None
        engine, self._engine = self._engine, None
        self._endpoints = {}
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
            await asyncio.sleep(0)  # its sockets are closed by a callback on this loop
            await asyncio.to_thread(_close_context, engine)
            del engine
            _forget_tokenizers()
        await asyncio.to_thread(self._processes.end)

    def _launch(self) -> Any:
        """In a thread: check, make the built-in model, import vLLM, start its processes. Sets the engine, returns the arguments."""
        model = str(builtin.folder(self._settings.cache_dir)) if self.model == BUILTIN_MODEL else self.model
        preflight.check(self._settings, self.mode, model, cpu=self._cpu)
        told = self._fit()
        log = self._settings.home / "logs" / "engine.log"
        written = logs.prepare(self._settings, log)
        wanted = environment(self._settings, self.mode, model, log.with_suffix(".json"))
        if RUNNER not in GIVEN:
            os.environ.pop(RUNNER, None)  # an engine of another mode may have set it in this process
        os.environ.update({name: value for name, value in wanted.items() if name not in GIVEN})
        try:
            with logs.quiet_processes(self._settings, log):
                parsed = _parse(arguments(self._settings, self.mode, model, cpu=self._cpu, **told))
                self._engine = _async_llm(parsed, self._counts)
        except (ImportError, OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as failed:
            said = log.read_text(encoding="utf-8", errors="replace")[written:] if log.exists() else ""
            raise preflight.explain(failed, said, log, model) from failed
        return parsed

    def _fit(self) -> dict[str, bool]:
        """What the files of target and draft say of how to run them. Raises EngineStartError where they do not fit."""
        report = fitness.report(self._settings, self.mode)
        if report is None:
            return {}
        report.require()
        return {"padded_vocabulary": report.use_heterogeneous_vocab, "parallel_drafting": report.parallel_drafting}

    def _peak_memory(self) -> int | None:
        if self._cpu:
            return self._processes.peak_bytes()
        readings = [reading for reading in (self._device_peak, _device_bytes()) if reading is not None]
        self._device_peak = max(readings, default=None)
        return self._device_peak


class Counts:
    """Of a whole engine, as it reports each step: rows with several choices have none of their own."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self.generated = 0
        self.steps = 0

    def count(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            self.generated += iteration_stats.num_generation_tokens
            self.steps += 1
        drafts = getattr(scheduler_stats, "spec_decoding_stats", None)
        if drafts is not None:
            self.drafted += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens


def _async_llm(parsed: Any, counts: Counts) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            counts.count(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None: ...

    # LLM_CLASS: the batch sizes that vLLM chooses for offline work, on an H200 eight times the tokens a step of AsyncLLM's own default.
    given = AsyncEngineArgs.from_cli_args(parsed)
    return AsyncLLM.from_engine_args(given, usage_context=UsageContext.LLM_CLASS, stat_loggers=[Counter])


def _parse(words: list[str]) -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    place = next(name for name in ARGUMENT_PARSERS if importlib.util.find_spec(name) is not None)
    parser = importlib.import_module(place).make_arg_parser(FlexibleArgumentParser())

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)  # argparse would end the process

    parser.error = refuse
    return parser.parse_args(words)


async def _endpoints(engine: Any, parsed: Any) -> dict[str, _Endpoint]:
    """What this model can answer: completions of all kinds for a generating one, vectors and scores for a pooling one."""
    from starlette.datastructures import State
    from vllm.entrypoints.launchers.api_server.entry import init_app_state
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
    from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest

    state = State()
    await init_app_state(engine, state, parsed, await engine.get_supported_tasks())
    table = (
        ("/v1/chat/completions", ChatCompletionRequest, "openai_serving_chat", "create_chat_completion"),
        ("/v1/completions", CompletionRequest, "openai_serving_completion", "create_completion"),
        ("/v1/responses", ResponsesRequest, "openai_serving_responses", "create_responses"),
        ("/v1/embeddings", EmbeddingRequest, "serving_embedding", "__call__"),
        ("/v1/score", ScoreRequest, "serving_scores", "__call__"),
        ("/v1/rerank", RerankRequest, "serving_scores", "__call__"),
    )
    served = ((path, request, getattr(state, name, None), method) for path, request, name, method in table)
    return {
        path: _Endpoint(TypeAdapter(request), getattr(server, method)) for path, request, server, method in served if server is not None
    }


def _error_object(failed: Exception) -> Any:
    """vLLM's own judgement of an exception: the caller's fault (4xx) or the server's (5xx)."""
    from vllm.entrypoints.serve import create_error_response
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(failed, EngineDeadError):
        raise EngineDied("vLLM's engine process died") from failed
    return create_error_response(failed)


def _reply(answered: Any) -> Reply:
    """From a pydantic response, an error object, or (pooling) a Starlette response."""
    body = json.loads(answered.body) if hasattr(answered, "body") else answered.model_dump(mode="json")
    error = body.get("error")
    if error and "choices" not in body and body.get("object") != "response":
        code = MODEL_NOT_FOUND if error["code"] == HTTPStatus.NOT_FOUND and error.get("param") == "model" else None
        return error_reply(error["code"], error["message"], param=error.get("param"), code=code)
    return Reply(HTTPStatus.OK, client_body(body), measure(body))


def _close_context(engine: Any) -> None:
    """vLLM leaves its ZeroMQ context, with its threads, to the garbage collector. An asyncio context is the shadow of a plain one."""
    context = getattr(engine.engine_core, "ctx", None)
    context = getattr(context, "_shadow_obj", None) or context
    if context is not None:
        context.destroy(linger=0)


def _forget_tokenizers() -> None:
    """vLLM remembers which functions take which keywords, and so those of its tokenizers' pools, with their copies: 43 MiB an engine."""
    from vllm.utils import func_utils

    remembered = getattr(func_utils, "_supports_kw", None)
    if remembered is not None:
        remembered.cache_clear()
    gc.collect()  # the copies and their functions hold each other


def _device_bytes() -> int | None:
    """Bytes in use on this process's GPUs, read through NVML: torch would open a context of its own on each."""
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = [_device(pynvml, name) for name in _visible(pynvml.nvmlDeviceGetCount())]
            return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _visible(count: int) -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(count)] if named is None else [name.strip() for name in named.split(",") if name.strip()]


def _device(pynvml: Any, name: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name.encode())
