"""The requests that `verify` asks: chosen to make drafts likely, and to reach what speculation has been seen to break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from specbatch.settings import DEFAULT_ALIAS

Body = dict[str, Any]

LISTED = 20  # likeliest tokens asked for: as many as vLLM gives
GREEDY_TOKENS = 48
SAMPLED_TOKENS = 8
REPEATED_TOKENS = 24  # of a seeded answer that is asked for twice
CHOICES = 4

QUESTIONS = (
    "Write the numbers from one to ten in words, one a line, then write them again.",
    "def add(a, b):\n    return a + b\n\nRewrite this function with type hints and add subtract, multiply and divide in the same style.",
    "Ana, 31, Lisbon; Bruno, 27, Porto; Carla, 45, Faro. Write each as a JSON object with name, age and city.",
    "Why is the sky blue? Answer in two sentences.",
    "Escribe tres nombres de ciudades de España y tres de Portugal.",
    "Resuma em uma frase: o trabalhador lê um lote de pedidos, responde a cada pedido e grava cada resposta.",
    "Repeat after me, five times: the quick brown fox jumps over the lazy dog.",
    "Tell a short story about a lighthouse keeper who found a letter in a bottle.",
)
TOPICS = ("yes or no", "a colour", "a fruit", "a number", "a city", "an animal", "a month", "a word")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
        "active": {"type": "boolean"},
    },
    "required": ["name", "tags", "active"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "set_lights",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["kitchen", "hall", "garden"]}, "level": {"enum": [0, 50, 100]}},
            "required": ["room", "level"],
            "additionalProperties": False,
        },
    },
}
CALLED = '<tool_call>\n{"name": "set_lights", "arguments": {"room": "%s", "level": %d}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Probe:
    """A case: one request a prompt. `greedy` answers are compared token by token; of sampled ones, each prompt's are drawn by seed."""

    name: str
    bodies: tuple[Body, ...]


def greedy_probes(n: int) -> list[Probe]:
    """`n` requests each, all deterministic. Sampling among the one likeliest token is, too, and may have several choices."""
    asked = [_greedy(text) for text in islice(cycle(QUESTIONS), n)]
    penalties = cycle(({"presence_penalty": 0.6, "frequency_penalty": 0.4}, {"repetition_penalty": 1.3}, {"frequency_penalty": -0.3}))
    structured = {"response_format": {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA, "strict": True}}}
    certain = {"temperature": 1.0, "top_k": 1, "seed": 7, "n": CHOICES - 1, "max_tokens": SAMPLED_TOKENS}
    return [
        Probe("greedy", tuple(asked)),
        Probe("penalties", tuple(body | penalty for body, penalty in zip(asked, penalties, strict=False))),
        Probe("structured", tuple(body | structured for body in asked)),
        Probe("tool calls", tuple(_tool_call(number) for number in range(n))),
        Probe("n > 1", tuple(body | certain for body in asked)),
    ]


def stop_probe(texts: Sequence[str], bodies: Sequence[Body]) -> Probe:
    """Requests that end inside the answers seen: their stop strings are taken from there, so they are met with any model.

    The text stays out of the answer, and tokens drafted past it must too, with their log probabilities.
    """
    ends = [(body, text[len(text) // 2 :][:3]) for body, text in zip(bodies, texts, strict=True)]
    return Probe("stop strings", tuple(body | {"stop": [end]} for body, end in ends if end.strip()))


def sampled_probes(n: int, few: Sequence[int]) -> list[Probe]:
    """`n` prompts each, without their seeds. Among a `few` tokens, n-grams soon recur, and are drafted, with any model."""
    plain: Body = {"temperature": 1.0, "max_tokens": SAMPLED_TOKENS}
    cut: Body = {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "max_tokens": SAMPLED_TOKENS, "n": CHOICES}
    return [
        Probe("sampling", tuple(_small_talk(topic) | plain for topic in islice(cycle(TOPICS), n))),
        Probe("sampling among few tokens", tuple(_small_talk(topic) | _among(few) for topic in islice(cycle(TOPICS), n))),
        Probe("sampling, top-k and top-p, n > 1", tuple(_small_talk(topic) | cut for topic in islice(cycle(TOPICS), n))),
    ]


def seeded(probe: Probe, seeds: range, choices: Callable[[Body], int]) -> list[Probe]:
    """For each prompt, the requests that draw as many samples as there are seeds; a request of several choices draws several."""
    return [replace(probe, bodies=tuple(body | {"seed": seed} for seed in seeds[:: choices(body)])) for body in probe.bodies]


def repeat_probe(n: int, few: Sequence[int]) -> Probe:
    """Seeded requests that are asked twice, half of them among a `few` tokens."""
    bodies = tuple(_small_talk(topic) | {"temperature": 1.0} for topic in islice(cycle(TOPICS), n))
    drawn = [
        body | (_among(few) if seed % 2 else {}) | {"seed": seed, "max_tokens": REPEATED_TOKENS}
        for body in bodies
        for seed in range(CHOICES)
    ]
    return Probe("seeds", tuple(drawn))


def _among(few: Sequence[int]) -> Body:
    return {"temperature": 2.0, "max_tokens": 2 * SAMPLED_TOKENS, "allowed_token_ids": list(few)}


def _greedy(text: str) -> Body:
    return {
        "model": DEFAULT_ALIAS,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": GREEDY_TOKENS,
        "logprobs": True,
        "top_logprobs": LISTED,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }


def _tool_call(number: int) -> Body:
    """By turns a forced call, whose arguments a schema holds, and free text after calls of the same shape, which n-grams copy from.

    Short lookups have drafted broken calls (vllm issue 40875).
    """
    ask = "Set the lights of the %s to %d."
    history = [("kitchen", 100), ("hall", 50), ("kitchen", 0)]
    turns = [
        {"role": role, "content": form % values}
        for values in history[: 1 + number % 3]
        for role, form in (("user", ask), ("assistant", CALLED))
    ]
    body = _greedy("") | {"messages": [*turns, {"role": "user", "content": ask % ("garden", 50)}]}
    return body if number % 2 else body | {"tools": [TOOL], "tool_choice": "required"}


def _small_talk(topic: str) -> Body:
    """Turns that repeat themselves: the next answer's beginning can be looked up."""
    turn = [{"role": "user", "content": f"Name {topic}."}, {"role": "assistant", "content": "yes, yes, red, one, red, yes, one"}]
    return {
        "model": DEFAULT_ALIAS,
        "messages": [*turn, *turn, turn[0]],
        "return_token_ids": True,
    }
