"""The end of a run: answers are joined to their rows, in the input's order, and what cannot be a row of the output is kept aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from specbatch.datasets.dataset import Dataset, Values, infer_schema
from specbatch.datasets.formats import Jsonl, check_parquet
from specbatch.datasets.writers import Destination, Writer
from specbatch.datasets.writers import aside as place_aside
from specbatch.errors import InvalidRequest, UsageError
from specbatch.generation.recipe import SAMPLE, Recipe, Step
from specbatch.generation.rows import Selection, Unit, selected
from specbatch.generation.spool import Answer, Spool


@dataclass(slots=True)
class Tally:
    """Rows of the output, and rows kept aside; tokens of both."""

    rows: int = 0
    aside: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a row cannot be in the output, and what the model said, where it said something."""

    step: str
    reason: str
    text: str | None


@dataclass(frozen=True, slots=True)
class Joined:
    """A unit with its answers: the row of the output that they make, or why they make none."""

    unit: Unit
    index: int  # of its row in the chunk
    kept: Values
    outcome: Values | Rejected
    text: str | None  # of its last answer

    @property
    def record(self) -> Values:
        """What the file of rows kept aside says of it."""
        assert isinstance(self.outcome, Rejected)
        why = {"step": self.outcome.step, "reason": self.outcome.reason, "text": self.outcome.text}
        return {"row": self.unit.row_index + 1, SAMPLE: self.unit.sample, **why, "input": self.kept}


def schema_of(dataset: Dataset, recipe: Recipe, destination: Destination) -> pa.Schema | None:
    """The types of a Parquet output; None for JSONL. Raises InvalidRequest for unknown columns, and those that Parquet has no type for.

    An untyped dataset is read once for it, so that what could not be written is known before anything is generated.
    """
    if not destination.is_parquet:
        return None
    found = infer_schema(dataset, recipe.keep)
    if recipe.keep is not None:
        absent = [name for name in recipe.keep if name not in found.names]
        if absent:
            raise InvalidRequest(f"{dataset.name}: --keep: there is no column {absent[0]!r} (its columns: {', '.join(found.names)})")
        found = pa.schema([found.field(name) for name in recipe.keep])
    whole = pa.schema([*found, *recipe.added_fields()])
    check_parquet(whole)
    return whole


def write(dataset: Dataset, recipe: Recipe, spool: Spool, destination: Destination, schema: pa.Schema | None) -> Tally:
    """Put the output, and the file of what is kept aside, in place. In constant memory: a chunk of rows and its answers at a time.

    Raises UsageError where somebody else's file took the place meanwhile.
    """
    destination.remove_leftovers()
    tally = Tally()
    invalid = place_aside(destination.path)
    aside = Jsonl(invalid)
    try:
        with Writer(destination, schema) as writer:
            for selection in selected(dataset, recipe):
                table = None if schema is None else selection.table
                settled = _written(writer, _joined(selection, recipe, spool, tally), table, recipe.steps[-1].name)
                rejected = [each.record for each in settled if isinstance(each.outcome, Rejected)]
                aside.write(rejected)
                tally.aside += len(rejected)
                tally.rows += len(settled) - len(rejected)
            aside.close()
            check_place(spool, destination)
            spool.publishing()
            if tally.aside:
                invalid.replace(destination.invalid)
            else:
                destination.invalid.unlink(missing_ok=True)  # of an earlier run: it would belie this one
    finally:
        aside.close()
        invalid.unlink(missing_ok=True)
    return tally


def check_place(spool: Spool, destination: Destination) -> None:
    """Raises UsageError for an output that neither this run put there, nor is it to overwrite."""
    if destination.taken and not spool.fact("overwrites") and not spool.fact("publishing"):
        raise UsageError(
            f"{destination.path} was made by something else while its answers were generated: move it, and give the same command again, "
            "which goes on; with --overwrite it would begin anew"
        )


def _written(writer: Writer, joined: Sequence[Joined], table: pa.Table | None, step: str) -> Sequence[Joined]:
    """Write the rows of a chunk. One that its columns cannot hold is rejected after all, and the others are written."""
    rows, indices = [], []
    for each in joined:
        if not isinstance(each.outcome, Rejected):
            rows.append(each.kept | each.outcome)
            indices.append(each.index)
    if not rows:
        return joined
    try:
        writer.write(rows, None if table is None else table.take(indices))
    except InvalidRequest as wrong:
        if len(joined) == 1:
            return [replace(joined[0], outcome=Rejected(step, wrong.message, joined[0].text))]
        return [settled for each in joined for settled in _written(writer, [each], table, step)]
    return joined


def _joined(selection: Selection, recipe: Recipe, spool: Spool, tally: Tally) -> list[Joined]:
    first, last = selection.units[0].position, selection.units[-1].position
    answers = [spool.between(step_no, first, last) for step_no in range(len(recipe.steps))]
    joined: list[Joined] = []
    for unit, index in zip(selection.units, selection.indices, strict=True):
        kept = {name: value for name, value in unit.values.items() if recipe.keep is None or name in recipe.keep or name in recipe.columns}
        own = [each.get(unit.position) for each in answers]
        outcome = _outcome(unit, recipe, own, tally)
        joined.append(Joined(unit, index, kept, outcome, own[-1].text if own[-1] is not None else None))
    return joined


def _outcome(unit: Unit, recipe: Recipe, answers: Sequence[Answer | None], tally: Tally) -> Values | Rejected:
    """The columns that a unit's answers become."""
    values: Values = {SAMPLE: unit.sample} if recipe.samples > 1 else {}
    for step_no, (step, answer) in enumerate(zip(recipe.steps, answers, strict=True)):
        if answer is None:
            raise RuntimeError(f"{unit.place}: step {step.name} has no answer, although its batches have ended")
        for name in ("prompt_tokens", "cached_tokens", "generated_tokens"):
            setattr(tally, name, getattr(tally, name) + (getattr(answer, name) or 0))
        if answer.text is None:
            return Rejected(step.name, answer.reason or "no text", None)
        parsed, why = _parsed(step, answer.text)
        if why is not None:
            cut = ", and it was cut at max_tokens" if answer.finish_reason == "length" else ""
            return Rejected(step.name, f"{why}{cut}", answer.text)
        values |= parsed
        facts: Mapping[str, Any] = {"seed": recipe.row_seed(unit.row_index, unit.sample, step_no)}
        values |= {
            each.name: facts.get(name := each.name.removeprefix(step.prefix), getattr(answer, name, None)) for each in step.fact_fields()
        }
    return values


def _parsed(step: Step, text: str) -> tuple[Values, str | None]:
    if step.schema is None:
        return {step.name: text}, None
    value, why = step.schema.parse(text)
    if why is not None:
        return {}, why
    return ({f"{step.prefix}{name}": each for name, each in value.items()} if step.schema.is_object else {step.name: value}), None
