"""One suite for every engine: what the worker may rely on, whichever answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import re
import signal
from collections.abc import Iterable
from typing import Any

import jsonschema
import psutil
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from specbatch.domain import Mode, Reply
from specbatch.errors import EngineStartError
from specbatch.settings import Settings
from tests.engine_fixtures import ANSWER_SECONDS, DRAFT_TOKENS, START_SECONDS, RunningEngine, engine_children
from worker.engine import build
from worker.engine.base import EngineDied

# A start imports vLLM, whose own code warns on this Python; it takes half a minute, more beside other work.
pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "large": {"type": "boolean"}},
    "required": ["colour", "large"],
    "additionalProperties": False,
}


def chat(text: str = "Name three fruits.", **fields: object) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0, **fields}


TOOL = {"type": "function", "function": {"name": "describe", "description": "Describe a thing.", "parameters": SCHEMA, "strict": True}}
GRAMMAR = 'root ::= "sum " number " + " number\nnumber ::= [0-9]'


def content(engine: RunningEngine, body: dict[str, Any]) -> str:
    return said(engine.answer(CHAT, body))


def said(reply: Reply) -> str:
    assert reply.status_code == 200, reply.body
    return str(reply.body["choices"][0]["message"]["content"])


def together(engine: RunningEngine, bodies: Iterable[dict[str, Any]]) -> list[Reply]:
    """The answers to chats that run at once, which on a CPU costs little more than one."""
    pending = [engine.begin(f"together-{number}", CHAT, body) for number, body in enumerate(bodies)]
    return [each.result(ANSWER_SECONDS) for each in pending]


def test_chat_has_openai_s_form(engine: RunningEngine) -> None:
    reply = engine.answer(CHAT, chat())
    assert reply.status_code == 200, reply.body
    answer = ChatCompletion.model_validate(reply.body, strict=True)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer.model == engine.engine.model


def test_a_completion_has_openai_s_form(engine: RunningEngine) -> None:
    body = {"model": "default", "prompt": ["One, two,", "Red, green,"], "max_tokens": 8, "temperature": 0, "logprobs": 1}
    reply = engine.answer(COMPLETIONS, body)
    assert reply.status_code == 200, reply.body
    answer = Completion.model_validate(reply.body, strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text and choice.logprobs and choice.logprobs.tokens for choice in answer.choices)


def test_a_response_has_openai_s_form(engine: RunningEngine) -> None:
    reply = engine.answer(RESPONSES, {"model": "default", "input": "Name three fruits.", "max_output_tokens": 16, "temperature": 0})
    assert reply.status_code == 200, reply.body
    answer = Response.model_validate(reply.body)
    assert answer.output_text
    assert answer.usage is not None
    assert reply.measurement.generated_tokens == answer.usage.output_tokens > 0


def test_several_choices(engine: RunningEngine) -> None:
    reply = engine.answer(CHAT, chat(n=2, temperature=1, seed=5))
    answer = ChatCompletion.model_validate(reply.body, strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage is not None
    assert reply.measurement.generated_tokens == answer.usage.completion_tokens


def test_text_ends_before_a_stop_string(engine: RunningEngine) -> None:
    whole = content(engine, chat())
    stop = whole[len(whole) // 2 :][:4]
    reply = engine.answer(CHAT, chat(stop=[stop]))
    assert reply.body["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert reply.body["choices"][0]["finish_reason"] == "stop"


def test_max_tokens_is_kept(engine: RunningEngine) -> None:
    reply = engine.answer(CHAT, chat(max_tokens=5, ignore_eos=True))
    assert reply.body["usage"]["completion_tokens"] == 5
    assert reply.body["choices"][0]["finish_reason"] == reply.measurement.finish_reason == "length"


def test_greedy_text_is_the_same_twice(engine: RunningEngine) -> None:
    assert content(engine, chat()) == content(engine, chat())


def test_a_seed_gives_the_same_sample_twice(engine: RunningEngine) -> None:
    body = chat(temperature=1, seed=11, max_tokens=8)
    assert content(engine, body) == content(engine, body)
    assert content(engine, body) != content(engine, body | {"seed": 12})


def test_logprobs(engine: RunningEngine) -> None:
    answer = ChatCompletion.model_validate(engine.answer(CHAT, chat(logprobs=True, top_logprobs=2)).body)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in logprobs.content)


def test_json_fits_what_was_asked(engine: RunningEngine) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    asked = "Describe a large red ball as JSON."
    fitting, free = together(
        engine,
        [chat(asked, response_format=schema, max_tokens=200), chat(asked, response_format={"type": "json_object"}, max_tokens=40)],
    )
    jsonschema.validate(json.loads(said(fitting)), SCHEMA)
    assert said(free).startswith("{")
    if free.body["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(said(free)), dict)


def test_answers_keep_to_a_constraint(engine: RunningEngine) -> None:
    if engine.kind == "scripted":
        pytest.skip("the script knows no constraint but JSON")
    constraints: list[dict[str, Any]] = [
        {"regex": "20[0-9]{2}-(0[1-9]|1[0-2])"},
        {"choice": ["not at all", "yes indeed"]},
        {"grammar": GRAMMAR},
        {"json": SCHEMA},
    ]
    replies = together(engine, (chat(structured_outputs=each, max_tokens=200) for each in constraints))
    month, choice, total, thing = map(said, replies)
    assert re.fullmatch(constraints[0]["regex"], month)
    assert choice in constraints[1]["choice"]
    assert re.fullmatch(r"sum [0-9] \+ [0-9]", total)
    jsonschema.validate(json.loads(thing), SCHEMA)


def test_a_constraint_that_is_none_is_refused(engine: RunningEngine) -> None:
    if engine.kind == "scripted":
        pytest.skip("the script knows no constraint but JSON")
    wrong: list[dict[str, Any]] = [{"regex": "["}, {"grammar": "nonsense"}, {"json": {"type": "nonsense"}}, {"regex": "a", "choice": ["b"]}]
    replies = together(engine, (chat(structured_outputs=each) for each in wrong))
    assert [reply.status_code for reply in replies] == [400] * len(wrong), [reply.body for reply in replies]


def test_a_tool_that_must_be_called_is_called(engine: RunningEngine) -> None:
    if engine.kind == "scripted":
        pytest.skip("the script calls no tools")
    named = {"type": "function", "function": {"name": "describe"}}
    asked = (chat("Describe a large red ball.", tools=[TOOL], tool_choice=choice, max_tokens=300) for choice in (named, "required"))
    for reply in together(engine, asked):
        assert reply.status_code == 200, reply.body
        (call,) = ChatCompletion.model_validate(reply.body).choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "describe"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_tool_that_must_not_be_called_is_not(engine: RunningEngine) -> None:
    unknown = {"type": "function", "function": {"name": "paint"}}
    nameless = chat(tools=[{"type": "function"}], tool_choice=unknown, max_tokens=4)
    calls = (chat(tools=[TOOL], tool_choice=choice, max_tokens=4) for choice in ("none", unknown))
    free, refused, stumbled = together(engine, [*calls, nameless])
    message = ChatCompletion.model_validate(free.body).choices[0].message
    assert message.content
    assert not message.tool_calls
    if engine.kind == "vllm":
        assert (refused.status_code, refused.body["error"]["param"]) == (400, "tool_choice")
        assert stumbled.status_code == 400, stumbled.body


def test_penalties_change_what_is_said(engine: RunningEngine) -> None:
    if engine.kind == "scripted" or engine.mode is Mode.DRAFT_MODEL:
        pytest.skip("neither the script nor random weights repeat themselves")
    penalties: tuple[dict[str, float], ...] = ({}, {"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.5})
    plain, *penalised = map(said, together(engine, (chat("Write the word yes ten times.", max_tokens=16, **each) for each in penalties)))
    assert plain not in penalised


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stream": True}, "stream"),
    ],
)
def test_a_bad_body_is_refused(engine: RunningEngine, change: dict[str, Any], param: str) -> None:
    reply = engine.answer(CHAT, chat() | change)
    assert reply.status_code == 400, reply.body
    assert reply.body["error"]["type"] == "invalid_request_error"
    assert param in (reply.body["error"]["param"] or reply.body["error"]["message"])
    assert reply.measurement.generated_tokens == 0


def test_more_than_the_context_is_refused(engine: RunningEngine) -> None:
    reply = engine.answer(CHAT, chat("word " * 1000))
    assert reply.status_code == 400, reply.body
    assert "context length" in reply.body["error"]["message"]


def test_an_unknown_model_is_not_found(engine: RunningEngine) -> None:
    reply = engine.answer(CHAT, chat(model="gpt-nothing"))
    assert (reply.status_code, reply.body["error"]["code"]) == (404, "model_not_found")
    assert "gpt-nothing" in reply.body["error"]["message"]


def test_an_unknown_endpoint_is_not_found(engine: RunningEngine) -> None:
    reply = engine.answer("/v1/paintings", chat())
    assert reply.status_code == 404
    assert CHAT in reply.body["error"]["message"]


def test_a_lone_surrogate_does_no_harm(engine: RunningEngine) -> None:
    assert engine.answer(CHAT, chat("\ud800 hello")).status_code in (200, 400)
    assert engine.answer(CHAT, chat()).status_code == 200


def test_what_speculation_refuses_is_refused_by_speculative_modes_alone(engine: RunningEngine) -> None:
    replies = together(engine, (chat(temperature=1, min_p=0.2, max_tokens=4), chat(logit_bias={"100": 100}, logprobs=True, max_tokens=4)))
    if engine.mode is not Mode.PLAIN:
        assert [reply.status_code for reply in replies] == [400, 400]
        return
    assert [reply.status_code for reply in replies] == [200, 200]
    if engine.kind == "vllm":
        tokens = [entry["token"] for entry in replies[1].body["choices"][0]["logprobs"]["content"]]
        assert tokens == [tokens[0]] * 4


def test_many_rows_at_once_each_get_their_own_answer(engine: RunningEngine) -> None:
    alone = {text: content(engine, chat(text, max_tokens=8)) for text in ("Count to three.", "Say hello.")}
    texts = list(alone) * 10
    done = together(engine, (chat(text, max_tokens=8) for text in texts))
    assert {reply.status_code for reply in done} == {200}
    assert len({reply.body["id"] for reply in done}) == len(texts)
    if engine.kind == "scripted" or engine.mode is Mode.DRAFT_MODEL:  # float32: bfloat16 rounds differently in another batch
        assert [reply.body["choices"][0]["message"]["content"] for reply in done] == [alone[text] for text in texts]


def test_cancelling_aborts_the_request(engine: RunningEngine) -> None:
    endless = chat(max_tokens=400, ignore_eos=True, metadata={"x-fault": "hang"})
    pending = engine.begin("endless", CHAT, endless)
    engine.wait(lambda status: status.running_requests == 1)
    pending.cancel()
    engine.wait(lambda status: status.running_requests == 0)
    with pytest.raises(concurrent.futures.CancelledError):
        pending.result(ANSWER_SECONDS)
    assert engine.answer(CHAT, chat()).status_code == 200


def test_a_cancelled_task_ends_cancelled(engine: RunningEngine) -> None:
    async def cancel_within() -> bool:
        body = chat(max_tokens=400, ignore_eos=True, metadata={"x-fault": "hang"})
        task = asyncio.create_task(engine.engine.answer("endless", CHAT, body))
        while engine.engine.status().running_requests == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert engine.run(cancel_within())
    engine.wait(lambda status: status.running_requests == 0)


def test_a_measurement_says_what_the_row_cost(engine: RunningEngine) -> None:
    before = engine.status()
    reply = engine.answer(CHAT, chat("Repeat: a b c d a b c d a b c d a b c d a b c d a b c d", max_tokens=33, ignore_eos=True))
    usage, measured = reply.body["usage"], reply.measurement
    assert "metrics" not in reply.body
    assert (measured.prompt_tokens, measured.generated_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert measured.finish_reason == reply.body["choices"][0]["finish_reason"]
    assert measured.queue_seconds is not None
    assert measured.ttft_seconds is not None
    assert measured.ttft_seconds >= measured.queue_seconds >= 0
    assert measured.tpot_seconds is not None
    assert measured.accepted_tokens <= measured.drafted_tokens
    after = engine.status()
    assert after.drafted_tokens - before.drafted_tokens >= measured.drafted_tokens
    assert after.accepted_tokens - before.accepted_tokens >= measured.accepted_tokens
    if engine.mode is Mode.PLAIN:
        assert (measured.drafted_tokens, measured.mean_acceptance_length) == (0, None)
    else:
        assert measured.drafted_tokens > 0
        assert measured.mean_acceptance_length is not None
        assert measured.mean_acceptance_length >= 1


def test_rows_add_up_to_what_the_engine_counts(engine: RunningEngine) -> None:
    """Two counts of the same drafts: each row's own, and the engine's counters over all its steps."""
    before = engine.status()
    pending = [engine.begin(f"counted-{n}", CHAT, chat(f"Repeat: {'a b c d ' * n}", max_tokens=25, ignore_eos=True)) for n in range(2, 8)]
    measured = [each.result(ANSWER_SECONDS).measurement for each in pending]
    drafted, accepted = (sum(getattr(each, name) for each in measured) for name in ("drafted_tokens", "accepted_tokens"))
    generated = sum(each.generated_tokens for each in measured)
    engine.wait(lambda status: status.generated_tokens - before.generated_tokens >= generated)
    after = engine.status()
    assert (after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens) == (drafted, accepted)
    by_position = [sum(n * steps for n, steps in enumerate(each.steps_by_accepted or ())) for each in measured]
    assert by_position == [each.accepted_tokens for each in measured]
    assert (drafted > 0) == (engine.mode is not Mode.PLAIN)


def test_a_model_accepts_every_draft_of_its_own(engine: RunningEngine) -> None:
    if (engine.kind, engine.mode) != ("vllm", Mode.DRAFT_MODEL):
        pytest.skip("of the engine whose draft is its target")
    tokens = 1 + 8 * (DRAFT_TOKENS + 1)  # one of the prompt's own step, then eight steps of K drafts and one more
    measured = engine.answer(CHAT, chat(max_tokens=tokens, ignore_eos=True)).measurement
    assert measured.drafted_tokens == measured.accepted_tokens == 8 * DRAFT_TOKENS
    assert measured.mean_acceptance_length == DRAFT_TOKENS + 1


def test_status(engine: RunningEngine) -> None:
    status = engine.status()
    assert status.running_requests == 0
    assert status.peak_memory_bytes is not None
    assert status.peak_memory_bytes > 10 * 1024**2
    assert 0 <= status.accepted_tokens <= status.drafted_tokens
    assert not engine.engine.dead


def test_a_killed_engine_fails_its_rows_and_starts_again(engine: RunningEngine) -> None:
    """Last of the module: it kills the shared engine. One of vLLM's is enough."""
    if (engine.kind, engine.mode) != ("vllm", Mode.DRAFT_MODEL):
        pytest.skip("of vLLM's processes, once")
    pending = engine.begin("in-flight", CHAT, chat(max_tokens=400, ignore_eos=True))
    engine.wait(lambda status: status.running_requests == 1)
    for pid in engine_children():
        psutil.Process(pid).send_signal(signal.SIGKILL)
    with pytest.raises(EngineDied):
        pending.result(ANSWER_SECONDS)
    assert engine.engine.dead
    with pytest.raises(EngineDied):
        engine.answer(CHAT, chat())
    engine.run(engine.engine.start(), START_SECONDS)
    assert content(engine, chat())


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")  # vLLM leaves the sockets of a failed start to the collector
@pytest.mark.parametrize(
    ("change", "said"),
    [({"max_model_len": 10**6}, "max_model_len"), ({"cpu_kv_cache_gib": 1e-6}, "not enough memory"), ({"dtype": "float3"}, "float3")],
)
async def test_a_failed_start_is_told_in_one_line(vllm_settings: Settings, change: dict[str, object], said: str) -> None:
    before = engine_children()
    engine = build(vllm_settings.model_copy(update=change), Mode.PLAIN)
    with pytest.raises(EngineStartError) as failed:
        await engine.start()
    assert said in failed.value.message
    assert "\n" not in failed.value.message
    assert failed.value.__cause__ is not None
    assert engine.dead
    await engine.stop()
    assert engine_children() <= before
    del engine, failed
    gc.collect()
