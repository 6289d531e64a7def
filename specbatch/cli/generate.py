"""`generate`: a dataset in, a dataset with generated columns out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specbatch.cli import render
from specbatch.cli.flags import ENGINE, WORK, Call, configured
from specbatch.cli.watch import display
from specbatch.datasets import source
from specbatch.datasets.writers import Destination
from specbatch.domain import Mode
from specbatch.errors import UsageError
from specbatch.generation.generated import Generated, produce
from specbatch.generation.recipe import TEXT, Recipe, recipe_of
from specbatch.generation.requests import WINDOW_ROWS
from specbatch.processes import signals_interrupt

INTERRUPTED = 130
PROMPT = "What is asked of each row: a Jinja2 template over its columns, or @FILE; a .json or .toml file may hold a whole chat."
STEP = "An earlier prompt, whose answer is the column NAME for those after it; may be repeated."


@configured(ENGINE, WORK)
def generate(
    call: Call,
    data: Annotated[
        Path, typer.Argument(metavar="IN", help="JSONL, CSV, Parquet, a folder of them, a Hugging Face folder, or -.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="A .jsonl or .parquet file.", show_default=False)],
    prompt: Annotated[str | None, typer.Option(metavar="TEMPLATE", help=PROMPT, show_default=False)] = None,
    system: Annotated[str | None, typer.Option(metavar="TEMPLATE", help="A system message for every prompt, or @FILE.")] = None,
    step: Annotated[list[str] | None, typer.Option(metavar="NAME=TEMPLATE", help=STEP)] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TEMPLATE", help="A rendered column, for prompts and output; may be repeated.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="The column of the prompt's answer, and the prefix of what it cost.")] = TEXT,
    schema: Annotated[Path | None, typer.Option(metavar="FILE", help="A JSON Schema for the answers, which become its columns.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples a row, each a row of the output.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Makes every row's sampling repeatable, in any order, by any number of workers.")] = None,
    keep: Annotated[str | None, typer.Option(metavar="A,B", help="The columns of IN that OUT keeps; all when left out.")] = None,
    where: Annotated[str | None, typer.Option(metavar="EXPRESSION", help="Rows to take, for example \"lang == 'en'\".")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most rows to take.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = None,
    param: Annotated[list[str] | None, typer.Option(metavar="KEY=JSON", help="Any other parameter of chat completions.")] = None,
    mode: Annotated[Mode | None, typer.Option(help="How to decode, by hand.", show_default=False)] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Have a server answer, instead of this machine.")] = None,
    prefix_window: Annotated[
        int, typer.Option(min=1, metavar="ROWS", help="Rows that are grouped by their common beginnings; 1 leaves them in order.")
    ] = WINDOW_ROWS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Generate anew, even where OUT exists.")] = False,
) -> None:
    """Generate for every row of a dataset. Interrupted, the same command continues where it stopped."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    sampling = {key: value for key, value in given.items() if value is not None} | _parameters(param or [])
    recipe = recipe_of(
        prompt=prompt,
        system=system,
        steps=_pairs(step or [], "--step"),
        columns=_pairs(column or [], "--column"),
        name=name,
        schema=schema,
        samples=n,
        seed=seed,
        keep=None if keep is None else [each.strip() for each in keep.split(",") if each.strip()],
        where=where,
        limit=limit,
        mode=mode,
        sampling=sampling,
    )
    made = _produced(call, data, output, recipe, overwrite=overwrite, url=url, window_rows=prefix_window)
    if call.json:
        render.document({"output": str(made.path), "invalid": str(made.invalid) if made.invalid else None, **asdict(made.tally)})
    elif not made.found:
        render.say(_summary(made))
    raise typer.Exit(int(made.tally.aside > 0))


def _produced(call: Call, data: Path, output: Path, recipe: Recipe, **how: Any) -> Generated:
    try:
        with signals_interrupt(), source.opened(data) as dataset:
            destination = Destination(output, () if str(data) == "-" else (data,))
            with display() as shown:
                return produce(call.settings, dataset, recipe, destination, say=render.say, show=shown.show, **how)
    except KeyboardInterrupt:
        render.say("interrupted: the same command continues where this one stopped")
        raise typer.Exit(INTERRUPTED) from None


def _summary(made: Generated) -> str:
    tally = made.tally
    tokens = f"{tally.prompt_tokens} tokens in ({tally.cached_tokens} from the cache), {tally.generated_tokens} out"
    aside = f"; {tally.aside} rows are kept aside in {made.invalid}, each with the reason" if made.invalid else ""
    return f"wrote {tally.rows} rows to {made.path}, {tokens}{aside}"


def _pairs(words: list[str], what: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"{what} {word}: write it as NAME=TEMPLATE, with a name of letters, digits and underscores")
        if key in pairs:
            raise UsageError(f"{what} {key} is given twice: rename one")
        pairs[key] = value
    return pairs


def _parameters(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        try:
            found[key] = json.loads(value)
        except ValueError:
            equals = ""
        if not equals:
            raise UsageError(f"--param {word}: write it as KEY=JSON, for example --param 'stop=[\"\\n\"]'")
    return found
