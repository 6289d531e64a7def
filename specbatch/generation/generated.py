"""`specbatch.generate`: from a dataset and templates to a dataset with the answers beside its columns."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbatch.client import Client
from specbatch.client.batch import Progress, shown, silent
from specbatch.client.transport import Transport
from specbatch.datasets import source
from specbatch.datasets.dataset import Dataset, Values, digest
from specbatch.datasets.text import Jsonl, write_jsonl
from specbatch.datasets.writers import Destination
from specbatch.domain import Mode
from specbatch.errors import UsageError
from specbatch.generation import output as outputs
from specbatch.generation import requests, spool
from specbatch.generation.output import Tally
from specbatch.generation.recipe import TEXT, Recipe, recipe_of, whole_hash
from specbatch.generation.run import Run, abandon
from specbatch.serving import resolve_model
from specbatch.settings import DEFAULT_ALIAS, Settings, load

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Generated:
    """An output that is complete: iterate over its rows, in the input's order. Rows that have no place in it are in `invalid`."""

    path: Path
    invalid: Path | None
    tally: Tally
    found: bool = False  # complete before, by the same recipe: nothing was generated now

    def __len__(self) -> int:
        return self.tally.rows

    def __iter__(self) -> Iterator[Values]:
        return (row for chunk in source.at(self.path).chunks() for row in chunk.rows)


def generate(
    data: str | Path | Iterable[Mapping[str, Any]],
    output: str | Path | None = None,
    *,
    prompt: str | None = None,
    system: str | None = None,
    steps: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
    name: str = TEXT,
    schema: Mapping[str, Any] | str | Path | None = None,
    n: int = 1,
    seed: int | None = None,
    keep: Sequence[str] | None = None,
    where: str | None = None,
    limit: int | None = None,
    mode: Mode | str | None = None,
    overwrite: bool = False,
    sampling: Mapping[str, Any] | None = None,
    url: str | None = None,
    api_key: str | None = None,
    progress: bool | Progress = True,
    **settings: Any,
) -> Generated:
    """Generate for every row of a dataset: what `specbatch generate` does, with its options as parameters.

    `data` is a path or mappings. Without `output` the rows are kept under the data directory, as JSONL. `sampling` are OpenAI's
    parameters (`{"max_tokens": 100, "temperature": 0.7}`). With `url` a server answers, else this machine, with `settings` by name.
    The same call after an interruption goes on. Raises UsageError and InvalidRequest for what is at fault, before anything is generated.
    """
    recipe = recipe_of(
        prompt=prompt,
        system=system,
        steps=steps or {},
        columns=columns or {},
        name=name,
        schema=schema,
        samples=n,
        seed=seed,
        keep=keep,
        where=where,
        limit=limit,
        mode=None if mode is None else Mode(mode),
        sampling=sampling or {},
    )
    loaded = load(**settings)
    with _opened(data, loaded) as dataset:
        known = _default_output(loaded, dataset, recipe, url) if output is None else Path(output)
        destination = Destination(known, () if isinstance(data, Iterable) and not isinstance(data, str) else (Path(data),))
        with shown() if progress is True else nullcontext(progress or silent) as show:
            return produce(loaded, dataset, recipe, destination, overwrite=overwrite, url=url, api_key=api_key, say=_say, show=show)


def produce(
    settings: Settings,
    dataset: Dataset,
    recipe: Recipe,
    destination: Destination,
    *,
    overwrite: bool,
    url: str | None,
    api_key: str | None = None,
    say: Say,
    show: Progress,
    window_rows: int = requests.WINDOW_ROWS,
) -> Generated:
    """Begin the run of an output, or go on with it, until the output is in place."""
    if recipe.mode is not None and not settings.modes:
        settings = settings.model_copy(update={"modes": (recipe.mode,)})  # an interrupted run that goes on starts that engine, and no other
    schema = outputs.schema_of(dataset, recipe, destination)
    data = digest(dataset)
    with _spooled(settings, destination) as book, Client.of(settings, url, api_key) as client:
        parts = recipe.parts(client.transport.model, data) | ({"server": url} if url else {})
        if (known := _begun(book, parts, recipe, destination, client.transport, overwrite=overwrite, say=say)) is not None:
            return known
        part_rows = min(requests.PART_ROWS, settings.max_batch_rows)
        run = Run(client.transport, dataset, data, recipe, book, progress=show, window_rows=window_rows, part_rows=part_rows)
        run.finish()
        tally = outputs.write(dataset, recipe, book, destination, schema)
        run.let_go()
        book.finish(tally=asdict(tally), kept=_kept(recipe))
        return _generated(destination, tally)


def _begun(
    book: spool.Spool, parts: dict[str, str], recipe: Recipe, destination: Destination, transport: Transport, *, overwrite: bool, say: Say
) -> Generated | None:
    """Go on with the run that the spool knows, or begin another and say why. The output where it is complete already.

    Raises UsageError for an output that exists and is not to be overwritten, or has other columns than are asked for now.
    """
    run_hash, before = whole_hash(parts), book.fact("parts")
    same = before == parts
    finished = bool(book.fact("finished"))
    if same and finished and destination.taken and not overwrite:
        if book.fact("kept") not in (None, _kept(recipe)):  # None: a version that did not note it
            raise UsageError(
                f"{destination.path} is complete, and --keep is not as it was: --overwrite generates it anew, or choose another output"
            )
        say(f"{destination.path} is complete already (run {run_hash[:12]}); --overwrite generates it anew")
        return _generated(destination, Tally(**book.fact("tally")), found=True)
    goes_on = same and not finished and (not overwrite or book.fact("overwrites"))
    if goes_on:
        if not destination.taken:
            book.note(publishing=False)  # a file that appears from now on is not this run's
        outputs.check_place(book, destination)
        say(f"continuing the interrupted run {run_hash[:12]}")
        return None
    if destination.taken and not overwrite:
        raise UsageError(f"{destination.path} exists: add --overwrite to replace it, or choose another output")
    if before is not None and not finished:
        changed = sorted(name for name in {*before, *parts} if before.get(name) != parts.get(name))
        why = (
            f"the {', '.join(changed)} changed since the interrupted run {whole_hash(before)[:12]}" if changed else "--overwrite was given"
        )
        say(f"{why}: a new run begins ({run_hash[:12]})")
        abandon(transport, book)
    book.begin(parts=parts, id=f"{run_hash}-{secrets.token_hex(8)}", overwrites=overwrite)
    return None


@contextmanager
def _spooled(settings: Settings, destination: Destination) -> Iterator[spool.Spool]:
    name = hashlib.sha256(os.fsencode(destination.path.resolve())).hexdigest()[:24]
    with spool.opened(settings.home / "generate" / f"{name}.db", destination.path) as book:
        yield book


def _opened(data: str | Path | Iterable[Mapping[str, Any]], settings: Settings) -> AbstractContextManager[Dataset]:
    if isinstance(data, str | Path):
        return source.opened(Path(data))
    return _rows_aside(data, settings)


@contextmanager
def _rows_aside(rows: Iterable[Mapping[str, Any]], settings: Settings) -> Iterator[Dataset]:
    folder = settings.home / "generate"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"rows-{secrets.token_hex(8)}.jsonl"
    try:
        write_jsonl(path, (dict(row) for row in rows))
        yield Jsonl(path, "the rows given")
    finally:
        path.unlink(missing_ok=True)


def _default_output(settings: Settings, dataset: Dataset, recipe: Recipe, url: str | None) -> Path:
    """The same for the same question to the same model, so that it is asked once."""
    model = DEFAULT_ALIAS if url else resolve_model(settings)
    asked = whole_hash(recipe.parts(model, digest(dataset)) | {"server": url or "", "keep": json.dumps(recipe.keep)})
    return settings.home / "generate" / f"{asked[:24]}.jsonl"


def _kept(recipe: Recipe) -> dict[str, Any]:
    return {"columns": None if recipe.keep is None else list(recipe.keep)}


def _generated(destination: Destination, tally: Tally, *, found: bool = False) -> Generated:
    return Generated(destination.path, destination.invalid if tally.aside else None, tally, found)


def _say(message: str) -> None:
    from specbatch.cli.render import say

    say(message)
