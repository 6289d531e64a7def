"""From vLLM's response bodies to a measurement, and to the body that a client gets."""

from __future__ import annotations

from typing import Any

from specbatch.domain import Measurement

OWN_FIELDS = ("metrics", "kv_transfer_params", "ec_transfer_params", "prompt_logprobs", "prompt_token_ids", "prompt_text")
OWN_CHOICE_FIELDS = ("stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts")


def measure(body: dict[str, Any]) -> Measurement:
    """What the request cost, from `usage` (the names of completions or of responses) and vLLM's `metrics` (milliseconds).

    TTFT runs from arrival: the queue is part of it. With several choices vLLM gives no metrics, and times and drafts stay unknown.
    """
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    metrics = body.get("metrics") or {}
    drafts = metrics.get("speculative_decoding") or {}
    queue, first = _seconds(metrics.get("queue_time_ms")), _seconds(metrics.get("time_to_first_token_ms"))
    return Measurement(
        prompt_tokens=usage.get("prompt_tokens", usage.get("input_tokens", usage.get("total_tokens"))) or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        generated_tokens=usage.get("completion_tokens", usage.get("output_tokens")) or 0,
        finish_reason=_finish_reason(body),
        queue_seconds=queue,
        ttft_seconds=None if first is None else (queue or 0.0) + first,
        tpot_seconds=_seconds(metrics.get("mean_itl_ms")),
        drafted_tokens=drafts.get("num_draft_tokens") or 0,
        accepted_tokens=drafts.get("num_accepted_draft_tokens") or 0,
        mean_acceptance_length=drafts.get("mean_acceptance_length"),
        steps_by_accepted=tuple(drafts["acceptance_histogram"]) if drafts.get("acceptance_histogram") else None,
    )


def client_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body without vLLM's measurements, and without its further fields where they are empty: a client that asked for one gets it."""
    kept = {name: value for name, value in body.items() if name != "metrics" and (name not in OWN_FIELDS or value is not None)}
    if isinstance(kept.get("choices"), list):
        kept["choices"] = [_client_choice(choice) for choice in kept["choices"]]
    return kept


def _client_choice(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in choice.items() if name not in OWN_CHOICE_FIELDS or value is not None}


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _finish_reason(body: dict[str, Any]) -> str | None:
    """The first choice's; of a response, its status, in the words of a completion."""
    choices = body.get("choices")
    if choices:
        reason = choices[0].get("finish_reason")
        return None if reason is None else str(reason)
    return {"completed": "stop", "incomplete": "length"}.get(str(body.get("status")))
