"""OpenAI's and vLLM's response bodies, around what the script says."""

from __future__ import annotations

import base64
import struct
import time
from typing import Any

from worker.engine.script import ScriptedRequest, Utterance, count, draw

EMBEDDING_SIZE = 8


def usage(prompt_tokens: int, said: list[Utterance]) -> dict[str, Any]:
    completion = sum(len(one.tokens) for one in said)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def chat_body(request_id: str, model: str, request: ScriptedRequest, said: list[Utterance], prompt_tokens: int) -> dict[str, Any]:
    choices = []
    for index, one in enumerate(said):
        message = {"role": "assistant", "content": one.text, "refusal": None}
        logprobs = (
            {"content": [_logprob(token, request.top_logprobs or 0) for token in one.tokens], "refusal": None} if request.logprobs else None
        )
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": one.finish_reason})
    return _frame(f"chatcmpl-{request_id}", "chat.completion", model) | {"choices": choices, "usage": usage(prompt_tokens, said)}


def _logprob(token: str, top: int) -> dict[str, Any]:
    entry = {"token": token, "logprob": -0.5, "bytes": list(token.encode())}
    return entry | {"top_logprobs": [entry | {"logprob": -0.5 - place} for place in range(top)]}


def completion_body(request_id: str, model: str, request: ScriptedRequest, said: list[Utterance], prompt_tokens: int) -> dict[str, Any]:
    choices = []
    for index, one in enumerate(said):
        offsets = [len("".join(one.tokens[:place])) for place in range(len(one.tokens))] if request.logprobs is not None else []
        logprobs = {
            "tokens": one.tokens,
            "token_logprobs": [-0.5] * len(one.tokens),
            "top_logprobs": [{token: -0.5} for token in one.tokens],
            "text_offset": offsets,
        }
        wanted = logprobs if request.logprobs is not None else None
        choices.append({"index": index, "text": one.text, "logprobs": wanted, "finish_reason": one.finish_reason})
    return _frame(f"cmpl-{request_id}", "text_completion", model) | {"choices": choices, "usage": usage(prompt_tokens, said)}


def response_body(request_id: str, model: str, request: ScriptedRequest, said: list[Utterance], prompt_tokens: int) -> dict[str, Any]:
    """OpenAI's /v1/responses, with one message. Its usage has names of its own."""
    tokens = len(said[0].tokens)
    part = {"type": "output_text", "text": said[0].text, "annotations": []}
    message = {"type": "message", "id": f"msg_{request_id}", "role": "assistant", "status": "completed", "content": [part]}
    cut = said[0].finish_reason == "length"
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": request.metadata,
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + tokens,
        },
    }


def embedding_body(request_id: str, model: str, request: ScriptedRequest) -> dict[str, Any]:
    inputs = request.input if isinstance(request.input, list) and not isinstance(request.input[0], int) else [request.input]
    data = []
    for index, content in enumerate(inputs):
        chance = draw(content)
        vector = [chance.uniform(-1, 1) for _ in range(request.dimensions or EMBEDDING_SIZE)]
        packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if request.encoding_format == "base64" else vector
        data.append({"index": index, "object": "embedding", "embedding": packed})
    tokens = sum(count(content) for content in inputs)
    return _frame(f"embd-{request_id}", "list", model) | {"data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def score_body(request_id: str, model: str, queries: list[Any], documents: list[Any]) -> dict[str, Any]:
    """vLLM's /v1/score: one query against each document, or pairs of the same length."""
    pairs = list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))
    data = [{"index": index, "object": "score", "score": draw(pair).random()} for index, pair in enumerate(pairs)]
    tokens = sum(count(list(pair)) for pair in pairs)
    return _frame(f"score-{request_id}", "list", model) | {"data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def rerank_body(request_id: str, model: str, query: Any, documents: list[Any], top_n: int | None) -> dict[str, Any]:
    """vLLM's /v1/rerank: documents by falling relevance."""
    scores = sorted(((draw([query, text]).random(), index) for index, text in enumerate(documents)), reverse=True)
    results = [{"index": index, "document": {"text": documents[index]}, "relevance_score": score} for score, index in scores]
    tokens = count([query, *documents])
    return {
        "id": f"rerank-{request_id}",
        "model": model,
        "results": results[: top_n or None],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _frame(identity: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": identity, "object": kind, "created": int(time.time()), "model": model}
