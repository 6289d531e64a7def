"""A run from rows to an output: each step is rendered, submitted, and read as it is answered; killed at any moment, it goes on."""

from __future__ import annotations

from contextlib import suppress

from specbatch.client.batch import Batch, Progress
from specbatch.client.transport import Transport
from specbatch.datasets.dataset import Dataset, digest
from specbatch.domain import JobStatus, Outcome
from specbatch.errors import Conflict, InvalidRequest, NotFound, SpecbatchError, UsageError
from specbatch.generation import requests
from specbatch.generation.recipe import Recipe, whole_hash
from specbatch.generation.spool import Answer, Part, Spool
from specbatch.lines import holds_lone_surrogate, storable
from specbatch.service.batches import NewBatch
from specbatch.wire import ResultObject


class Run:
    def __init__(
        self,
        transport: Transport,
        dataset: Dataset,
        data: str,
        recipe: Recipe,
        spool: Spool,
        *,
        progress: Progress,
        window_rows: int = requests.WINDOW_ROWS,
        part_rows: int = requests.PART_ROWS,
    ) -> None:
        """`data`: the dataset's digest when the run began."""
        self._transport, self._dataset, self._data, self._recipe, self._spool = transport, dataset, data, recipe, spool
        self._progress, self._window_rows, self._part_rows = progress, window_rows, part_rows

    def finish(self) -> None:
        """Have an answer of every step for every row. Raises InvalidRequest for rows at fault, before anything of the step is submitted."""
        for step_no in range(len(self._recipe.steps)):
            while not self._answered(step_no):
                pass  # the window of a batch passed before its last row was answered: the others are asked for in a new one
        self._check_unchanged()

    def let_go(self) -> None:
        """The output is written: the batches are not needed again."""
        for part in self._spool.parts():
            with suppress(NotFound):
                self._transport.let_go(part.batch_id or "")

    def _answered(self, step_no: int) -> bool:
        """Ask for what a step still lacks, and read it. False when some of it expired.

        What parts that have not ended will answer is not lacking: a step is rendered again when all of them are read.
        """
        if not self._spool.fact(f"rendered {step_no}") and all(part.ended for part in self._spool.parts(step_no)):
            self._render(step_no)
        for part in self._spool.parts(step_no):
            if not part.ended:
                self._submit(part)  # all of them before the first is read: the engine must not run dry between two
        for part in self._spool.parts(step_no):
            if not part.ended:
                self._read(part)
        return bool(self._spool.fact(f"rendered {step_no}"))

    def _render(self, step_no: int) -> None:
        lines = requests.owed(self._dataset, self._recipe, step_no, self._spool, self._transport.model)
        uploaded: list[str] = []
        try:
            for chunks in requests.Parts(lines, self._window_rows, self._part_rows):
                uploaded.append(self._transport.upload(f"{self._recipe.steps[step_no].name}.jsonl", chunks).id)
            self._check_unchanged()
        except BaseException:
            for file_id in uploaded:
                with suppress(SpecbatchError):
                    self._transport.delete(file_id)
            raise
        if not uploaded and step_no == 0 and not self._spool.parts():
            chosen = "no row is left by --where or --limit" if self._recipe.where or self._recipe.limit is not None else "no rows"
            raise InvalidRequest(f"{self._dataset.name}: {chosen}: there is nothing to generate")
        self._spool.rendered(step_no, uploaded)

    def _check_unchanged(self) -> None:
        """Answers belong to the rows that were asked about, and to no others that stand in their places now."""
        if digest(self._dataset) != self._data:
            raise UsageError(
                f"{self._dataset.name} changed while answers to it were generated: put it back, or the same command begins anew"
            )

    def _submit(self, part: Part) -> None:
        if part.batch_id is not None:
            return
        key = _key(self._spool, part)
        batch = self._transport.find(key)
        if batch is None:
            new = NewBatch(input_file_id=part.file_id, endpoint=requests.ENDPOINT, mode=self._recipe.mode)
            batch = self._transport.create(new, key)
        self._spool.submitted(part, batch.id)

    def _read(self, part: Part) -> None:
        part = next(each for each in self._spool.parts(part.step) if each.number == part.number)
        assert part.batch_id is not None
        step = self._recipe.steps[part.step]
        several = f"step {step.name}" if len(self._recipe.steps) > 1 else ""
        batch = Batch(self._transport, self._transport.get(part.batch_id))
        for page in batch.pages(part.seen, lambda state, note: self._progress(state, note or several)):
            owed = [_answer(result) for result in page if result.outcome not in (Outcome.CANCELLED, Outcome.EXPIRED)]
            self._spool.read(part, owed, page[-1].sequence)
        self._spool.ended(part, complete=batch.status is JobStatus.COMPLETED)
        if batch.status is JobStatus.CANCELLED:
            raise Conflict(f"{batch.id} was cancelled before all its rows were answered: the same command asks for the others again")
        if batch.status is JobStatus.FAILED:
            problems = (batch.state.errors or {}).get("data", [])
            said = "; ".join(problem["message"] for problem in problems[:3])
            raise InvalidRequest(f"{batch.id} was refused: {said}")


def abandon(transport: Transport, spool: Spool) -> None:
    """End the batches of a run that nobody wants any more, also one that was created and not noted any more."""
    for part in spool.parts():
        if part.ended:
            continue
        known = transport.find(_key(spool, part)) if part.batch_id is None else None
        batch_id = part.batch_id or (known.id if known is not None else None)
        if batch_id is not None:
            with suppress(Conflict, NotFound):
                transport.cancel(batch_id)
            with suppress(NotFound):
                transport.let_go(batch_id)


def _key(spool: Spool, part: Part) -> str:
    return whole_hash({"run": spool.fact("id"), "step": str(part.step), "part": str(part.number)})


def _answer(result: ResultObject) -> Answer:
    position = int(result.custom_id or "")
    measured = result.measured
    body = (result.response or {}).get("body") or {}
    if result.outcome is not Outcome.SUCCEEDED:
        error = body.get("error") or result.error or {}
        return Answer(position, None, f"{result.outcome}: {storable(str(error.get('message', 'no reason was given')))}")
    choice = body["choices"][0]
    text, finish_reason = choice["message"].get("content"), choice.get("finish_reason")
    if text is not None and holds_lone_surrogate(text):
        return Answer(position, None, f"the answer holds half of a character, which no file of text can: {storable(text)}")
    if measured is None:
        return Answer(position, text, finish_reason=finish_reason)
    return Answer(
        position,
        text,
        f"the answer holds no text (it finished by {finish_reason})" if text is None else None,
        finish_reason,
        measured.prompt_tokens,
        measured.cached_tokens,
        measured.generated_tokens,
        measured.mode.value,
        round(measured.accepted_tokens / measured.drafted_tokens, 4) if measured.drafted_tokens else None,
        measured.model,
    )
