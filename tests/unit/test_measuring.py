"""From vLLM's bodies to measurements."""

from __future__ import annotations

from typing import Any

from specbatch.domain import Measurement
from worker.engine.measuring import client_body, measure

BODY: dict[str, Any] = {
    "id": "chatcmpl-1",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop", "stop_reason": None, "token_ids": [1]}
    ],
    "usage": {"prompt_tokens": 10, "completion_tokens": 9, "total_tokens": 19, "prompt_tokens_details": {"cached_tokens": 4}},
    "metrics": {
        "time_to_first_token_ms": 20.0,
        "queue_time_ms": 5.0,
        "mean_itl_ms": 2.0,
        "speculative_decoding": {"mean_acceptance_length": 2.0, "num_draft_tokens": 16, "num_accepted_draft_tokens": 4},
    },
    "prompt_logprobs": None,
    "kv_transfer_params": None,
}


def test_a_completion_is_measured() -> None:
    measured = measure(BODY)
    assert (measured.prompt_tokens, measured.cached_tokens, measured.generated_tokens, measured.finish_reason) == (10, 4, 9, "stop")
    assert (measured.queue_seconds, measured.ttft_seconds, measured.tpot_seconds) == (0.005, 0.025, 0.002)
    assert (measured.drafted_tokens, measured.accepted_tokens, measured.mean_acceptance_length) == (16, 4, 2.0)


def test_several_choices_have_no_times_and_no_drafts() -> None:
    measured = measure(BODY | {"metrics": None})
    assert measured.generated_tokens == 9
    assert (measured.ttft_seconds, measured.drafted_tokens, measured.mean_acceptance_length) == (None, 0, None)


def test_a_response_is_measured_by_its_own_names() -> None:
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5, "input_tokens_details": {"cached_tokens": 1}}
    measured = measure({"object": "response", "status": "incomplete", "usage": usage})
    assert measured == Measurement(prompt_tokens=3, cached_tokens=1, generated_tokens=2, finish_reason="length")


def test_an_embedding_is_measured() -> None:
    assert measure({"data": [], "usage": {"prompt_tokens": 6, "total_tokens": 6}}) == Measurement(prompt_tokens=6)


def test_a_client_gets_what_it_asked_for_and_no_measurements() -> None:
    body = client_body(BODY)
    assert {"metrics", "prompt_logprobs", "kv_transfer_params"}.isdisjoint(body)
    assert "stop_reason" not in body["choices"][0]
    assert body["choices"][0]["token_ids"] == [1]
    assert "metrics" in BODY
