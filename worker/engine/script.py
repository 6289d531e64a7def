"""What the scripted engine says: text that depends on nothing but the request."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

LEXICON = (
    *("a", "each", "few", "of", "the", "one", "two", "most", "line", "row", "queue", "token", "draft", "target", "model", "step", "batch"),
    *("engine", "answer", "reads", "writes", "keeps", "counts", "moves", "holds", "returns", "waits", "ends", "begins", "small", "plain"),
)


class ScriptedRequest(BaseModel):
    """The fields that the script looks at, of every endpoint; OpenAI's limits, so that a bad body is refused as vLLM would."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    input: Any = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    dimensions: int | None = Field(None, ge=1, le=4096)
    encoding_format: Literal["float", "base64"] = "float"
    metadata: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens or self.max_output_tokens


@dataclass(frozen=True, slots=True)
class Utterance:
    """One choice. A token of the script is a word with the space before it."""

    tokens: list[str]
    finish_reason: str

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def draw(content: object, *salt: object) -> random.Random:
    """A generator that depends on the content alone, in any process: hash() would not do."""
    text = json.dumps([content, *salt], sort_keys=True, default=str)
    return random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()))


def count(content: object) -> int:
    """Prompt tokens of the script: one, and one more for each space. Words in a list would take ten times the text's memory."""
    if isinstance(content, list) and content and isinstance(content[0], int):
        return len(content)
    return 1 + json.dumps(content).count(" ")


def speak(request: ScriptedRequest, content: object, index: int) -> Utterance:
    """16 to 64 words chosen by content, seed and choice; cut at max_tokens (`length`) or before a stop string (`stop`)."""
    chance = draw(content, request.seed, index)
    kind = (request.response_format or {}).get("type")
    if kind in ("json_object", "json_schema"):
        schema = (request.response_format or {}).get("json_schema", {}).get("schema", {"type": "object"})
        text = json.dumps(instance(schema, chance, schema))
        tokens = [f" {word}" if place else word for place, word in enumerate(text.split(" "))]
    else:
        tokens = [f" {word}" for word in chance.choices(LEXICON, k=chance.randint(16, 64))]
        tokens[0] = tokens[0].strip()
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    limit = request.limit or len(tokens)
    for length in range(1, min(limit, len(tokens)) + 1) if stops else ():
        if any(stop in "".join(tokens[:length]) for stop in stops):
            return Utterance(_before(tokens[:length], stops), "stop")
    return Utterance(tokens[:limit], "length" if limit < len(tokens) else "stop")


def _before(tokens: list[str], stops: list[str]) -> list[str]:
    text = "".join(tokens)
    cut = min(place for stop in stops if (place := text.find(stop)) >= 0)
    kept: list[str] = []
    for token in tokens:
        kept.append(token[: max(0, cut)])
        cut -= len(token)
    return kept


def instance(schema: dict[str, Any], chance: random.Random, root: dict[str, Any]) -> Any:
    """A value that satisfies a JSON schema of the usual kind: types, enum, const, properties, items, anyOf, local $ref."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        return instance({**root.get("$defs", {}), **root.get("definitions", {})}[name], chance, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return chance.choice(schema["enum"])
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return instance(schema[choice][0], chance, root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            return {name: instance(part, chance, root) for name, part in schema.get("properties", {}).items()}
        case "array":
            return [instance(schema.get("items", {}), chance, root) for _ in range(max(1, schema.get("minItems", 1)))]
        case "integer" | "number":
            least = int(schema.get("minimum", 0))
            return chance.randint(least, max(least, int(schema.get("maximum", least + 9))))
        case "boolean":
            return chance.random() < 0.5
        case "null":
            return None
    return chance.choice(LEXICON)
