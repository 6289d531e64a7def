"""What is asked of every row: templates, sampling, samples, and what becomes of the answers. Its hash tells one run from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from specbatch.datasets.schema import AnswerSchema
from specbatch.datasets.schema import read as read_schema
from specbatch.datasets.templates import Chat, Condition, Template, chat, text
from specbatch.domain import Mode
from specbatch.errors import UsageError
from specbatch.lines import compact

TEXT = "text"
SAMPLE = "sample"
FACTS: Mapping[str, pa.DataType] = {
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int64(),
    "cached_tokens": pa.int64(),
    "generated_tokens": pa.int64(),
    "mode": pa.string(),
    "acceptance_rate": pa.float64(),
    "model": pa.string(),
    "seed": pa.int64(),
}
SEED_BITS = 53  # whole in every JSON reader


@dataclass(frozen=True, slots=True)
class Step:
    """One prompt for every row; its answer is a column, named `name`, that later steps may use. Only the last may have a schema."""

    name: str
    chat: Chat
    schema: AnswerSchema | None = None

    @property
    def prefix(self) -> str:
        return "" if self.name == TEXT else f"{self.name}_"

    def answer_fields(self) -> list[pa.Field]:
        """The columns that an answer becomes."""
        if self.schema is None:
            return [pa.field(self.name, pa.string())]
        if self.schema.is_object:
            return [pa.field(f"{self.prefix}{column}", kind) for column, kind in self.schema.fields.items()]
        return [pa.field(self.name, self.schema.whole)]

    def fact_fields(self) -> list[pa.Field]:
        """The columns of what an answer cost."""
        return [pa.field(f"{self.prefix}{name}", kind) for name, kind in FACTS.items()]


@dataclass(frozen=True, slots=True)
class Recipe:
    steps: Sequence[Step]
    columns: Mapping[str, Template] = field(default_factory=dict)  # rendered, not generated; each sees those before it
    where: Condition | None = None
    limit: int | None = None
    samples: int = 1
    seed: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)  # OpenAI's parameters, as every body carries them
    mode: Mode | None = None
    keep: Sequence[str] | None = None  # columns of the input; all where None

    def __post_init__(self) -> None:
        """Raises UsageError for what cannot be meant."""
        if not self.steps:
            raise UsageError("nothing to generate: give --prompt, or --step NAME=TEMPLATE")
        if self.samples > 1 and self.seed is None and self.sampling.get("temperature") == 0:
            raise UsageError(f"--n {self.samples} with --temperature 0 gives the same text {self.samples} times: raise the temperature")
        reserved = {"model", "messages", "stream", "n", "seed", "response_format"}.intersection(self.sampling)
        if reserved:
            raise UsageError(f"--param {min(reserved)}: this command sets it itself")
        for parameter, value in self.sampling.items():
            try:
                compact(value)
            except (TypeError, ValueError, RecursionError) as wrong:
                raise UsageError(f"--param {parameter}: {wrong}: give a value that JSON has a form for") from None
        names = [each.name for each in self.added_fields()]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UsageError(f"two columns of the output would be named {repeated[0]!r}: rename a step, a --column or --name")

    def added_fields(self) -> list[pa.Field]:
        """Every column that the output has beside those of the input, in order."""
        fields = [pa.field(name, pa.string()) for name in self.columns]
        fields += [pa.field(SAMPLE, pa.int64())] if self.samples > 1 else []
        for step in self.steps:
            fields += [*step.answer_fields(), *step.fact_fields()]
        return fields

    def row_seed(self, row_index: int, sample: int, step_no: int) -> int | None:
        """A row's own seed: a hash of the run's seed and its place, whatever the order, and whoever runs it."""
        if self.seed is None:
            return None
        text = f"{self.seed}/{row_index}/{sample}/{step_no}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> (64 - SEED_BITS)

    def parts(self, model: str, data: str) -> dict[str, str]:
        """What decides the answers, each part as a hash under the name that a person knows it by. `data`: the input's digest."""
        return {
            name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in self._described(model, data)
        }

    def _described(self, model: str, data: str) -> Iterator[tuple[str, Any]]:
        yield "input", data
        yield "template", [[step.name, step.chat.source()] for step in self.steps]
        yield "columns", [[name, template.source] for name, template in self.columns.items()]
        yield "selection of rows", [self.where.source if self.where else None, self.limit]
        yield "model", model
        yield "mode", self.mode
        yield "sampling", [self.samples, self.seed, dict(self.sampling)]
        yield "schema", [step.schema.document if step.schema else None for step in self.steps]


def recipe_of(
    *,
    prompt: str | None,
    system: str | None,
    steps: Mapping[str, str],
    columns: Mapping[str, str],
    name: str,
    schema: Mapping[str, Any] | str | Path | None,
    samples: int,
    seed: int | None,
    keep: Sequence[str] | None,
    where: str | None,
    limit: int | None,
    mode: Mode | None,
    sampling: Mapping[str, Any],
) -> Recipe:
    """A recipe in the words of the command line: `steps` in their order, then `prompt`. Raises UsageError for what is wrong with any."""
    if samples < 1 or (limit is not None and limit < 1):
        raise UsageError("--n and --limit are at least 1")
    chats = [(step, chat(template, system, f"--step {step}")) for step, template in steps.items()]
    chats += [(name, chat(prompt, system))] if prompt is not None else []
    answers = (
        AnswerSchema(schema, "the schema") if isinstance(schema, Mapping) else read_schema(Path(schema)) if schema is not None else None
    )
    made = [Step(step, each, answers if number == len(chats) else None) for number, (step, each) in enumerate(chats, start=1)]
    rendered = {column: Template(text(template, f"--column {column}"), f"--column {column}") for column, template in columns.items()}
    condition = None if where is None else Condition(where)
    return Recipe(made, rendered, condition, limit, samples, seed, dict(sampling), mode, keep)


def whole_hash(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
