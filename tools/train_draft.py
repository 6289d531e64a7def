"""Trains what drafts for a Llama: an EAGLE head or a standalone draft, on text that the target writes itself.

    python tools/train_draft.py text MODEL --out TEXT.safetensors --tokens 4000000 --minutes 3
    python tools/train_draft.py head MODEL --text TEXT.safetensors --out FOLDER --generation 3 --minutes 4
    python tools/train_draft.py draft MODEL --text TEXT.safetensors --out FOLDER --layers 4 --minutes 4 [--parallel]

MODEL is a folder (`python -m worker.builtin CACHE` prints the built-in model's). The text is kept as token ids; the target's hidden states
are computed a batch at a time and never stored. The last line printed is JSON: for each draft position the share of drafts that is accepted
up to it, on rows held out, before and after training, as vLLM counts it when text is decoded greedily. Needs torch, transformers and this
repository on PYTHONPATH.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from draft_heads import Drafter, EagleHead, ParallelDraft, StandaloneDraft
from draft_text import Text, joined, prompts
from draft_text import write as written
from transformers import AutoTokenizer, LlamaForCausalLM

HELD_OUT = 256  # rows at most, and an eighth
WARM = 0.04  # of the time: the learning rate rises
LATER = 0.8  # weight of each draft position against the one before
SORTED = 16  # batches of alike lengths, drawn together

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="The target's folder.")]
Out = Annotated[Path, typer.Option(help="Where to write.")]
Minutes = Annotated[float, typer.Option(min=0.01, help="How long to go on.")]
Source = Annotated[Path, typer.Option("--text", exists=True, help="What `text` wrote.")]
Rows = Annotated[int, typer.Option(min=1, help="Rows of a batch.")]
Rate = Annotated[float, typer.Option(help="The highest learning rate.")]
Batches = Annotated[int | None, typer.Option(min=1, help="Stop after so many, where the minutes are not over.")]
Steps = Annotated[int, typer.Option(min=1, help="Draft positions to train for, and to report.")]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(model: Path) -> Any:
    """The target, frozen: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    return LlamaForCausalLM.from_pretrained(model, dtype=dtype).to(device()).eval().requires_grad_(False)


@app.command()
def text(
    model: Model,
    out: Out,
    tokens: Annotated[int, typer.Option(min=1, help="How many the target is to write.")] = 4_000_000,
    minutes: Minutes = 3.0,
    rows: Rows = 512,
    prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 384,
    answer_tokens: Annotated[int, typer.Option(help="Longer answers are cut.")] = 128,
    asked: Annotated[Path | None, typer.Option("--prompts", exists=True, help="A file of prompts or of batch requests.")] = None,
) -> None:
    """Let the target answer prompts."""
    began = time.monotonic()
    batches, count = [], 0
    ways: dict[str, Any] = {"rows": rows, "tokens": tokens, "longest": prompt_tokens, "answer": answer_tokens, "seconds": 60 * minutes}
    for batch in written(load(model), AutoTokenizer.from_pretrained(model), prompts(asked), **ways):
        batches.append(batch)
        count += int((batch.ends - batch.starts).sum())
        typer.echo(f"{count:,} tokens in {time.monotonic() - began:.0f} s", err=True)
    whole = joined(batches)
    whole.save(out)
    typer.echo(json.dumps({"rows": len(whole), "tokens": count, "seconds": round(time.monotonic() - began, 1)}))


@app.command()
def head(
    model: Model,
    source: Source,
    out: Out,
    generation: Annotated[int, typer.Option(help="1: EAGLE, 3: EAGLE-3.")] = 3,
    minutes: Minutes = 4.0,
    batches: Batches = None,
    rows: Rows = 32,
    lr: Rate = 1e-3,
    steps: Steps = 4,
    seed: int = 0,
) -> None:
    """Train an EAGLE head."""
    torch.manual_seed(seed)
    target = load(model)
    schedule = Schedule(minutes, batches, rows, lr, steps, unrolled=steps)
    train(EagleHead(target, generation), target, Text.load(source), out, schedule)


@app.command()
def draft(
    model: Model,
    source: Source,
    out: Out,
    layers: Annotated[int, typer.Option(min=1, help="How many of the target's layers to begin with.")] = 4,
    minutes: Minutes = 4.0,
    batches: Batches = None,
    rows: Rows = 32,
    lr: Rate = 5e-4,
    steps: Steps = 4,
    seed: int = 0,
    parallel: Annotated[bool, typer.Option("--parallel", help="Draft all tokens in one pass, reading a mask in their places.")] = False,
    mask: Annotated[int | None, typer.Option(help="The mask: a token that no text holds; the vocabulary's last when unset.")] = None,
) -> None:
    """Distil a standalone draft."""
    if parallel and steps < 2:
        raise typer.BadParameter("a draft of one token has nothing to mask: leave out --parallel", param_hint="--steps")
    torch.manual_seed(seed)
    target = load(model)
    unread = target.config.vocab_size - 1 if mask is None else mask
    drafter = ParallelDraft(target, layers, model, unread) if parallel else StandaloneDraft(target, layers, model)
    schedule = Schedule(minutes, batches, rows, lr, steps, unrolled=steps if parallel else 1)
    train(drafter, target, Text.load(source), out, schedule)


@dataclass(frozen=True, slots=True)
class Schedule:
    minutes: float
    batches: int | None
    rows: int
    lr: float
    steps: int
    unrolled: int

    def share(self, began: float, done: int) -> float:
        """How much of it is over, from 0 to 1."""
        return max((time.monotonic() - began) / 60 / self.minutes, done / self.batches if self.batches else 0.0)


def train(drafter: Any, target: Any, text: Text, out: Path, schedule: Schedule) -> None:
    """AdamW on a cosine; the loss is the cross-entropy of the target's distribution over the `unrolled` first draft positions."""
    rows, steps = schedule.rows, schedule.steps
    drafter.to(device())
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0))
    apart = max(1, min(HELD_OUT, len(text) // 8))
    held, kept = order[:apart], order[apart:]
    before = acceptance(drafter, target, text, held, rows, steps)
    learning = [weight for weight in drafter.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=schedule.lr, betas=(0.9, 0.95), weight_decay=0.01)
    began, done = time.monotonic(), 0
    lately: Any = 0.0
    batches = shuffled(text, kept, rows)
    while (share := schedule.share(began, done)) < 1:
        optimizer.param_groups[0]["lr"] = schedule.lr * min(1.0, share / WARM) * (0.5 + 0.5 * math.cos(math.pi * share))
        loss = losses(drafter, target, text.take(next(batches), device()), schedule.unrolled)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        lately = loss.detach() if done == 1 else 0.95 * lately + 0.05 * loss.detach()
        if done % 50 == 0:
            typer.echo(f"{done} steps in {time.monotonic() - began:.0f} s: loss {float(lately):.3f}", err=True)
    after = acceptance(drafter, target, text, held, rows, steps)
    drafter.save(out, torch.bfloat16 if device().type == "cuda" else torch.float32)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    told = {
        "steps": done,
        "epochs": round(done * rows / len(kept), 2),
        "loss": round(float(lately), 3),
        "bytes": size,
        "held_out_rows": len(held),
    }
    typer.echo(json.dumps(told | {"parameters": sum(weight.numel() for weight in learning), "untrained": before, "trained": after}))


def shuffled(text: Text, kept: torch.Tensor, rows: int) -> Any:
    """Batches of row numbers without end, each of rows of alike length."""
    while True:
        for group in kept[torch.randperm(len(kept))].split(SORTED * rows):
            alike = group[text.ends[group].argsort()].split(rows)
            yield from (alike[number] for number in torch.randperm(len(alike)).tolist())


def compared(drafter: Drafter, target: Any, batch: Text, steps: int) -> Any:
    """For each draft position: logits of draft and target, [anchors, vocabulary], and which anchors they are, [rows, length - steps]."""
    with torch.no_grad():
        states = target.model(batch.tokens, output_hidden_states=True, use_cache=False).hidden_states
    anchors = batch.tokens.shape[1] - steps
    places = torch.arange(anchors, device=batch.tokens.device)
    for step, features in enumerate(drafter.drafts(batch.tokens, states, steps)):
        answered = (places + 1 >= batch.starts[:, None]) & (places + step + 2 < batch.ends[:, None])
        with torch.no_grad():
            theirs = target.lm_head(states[-1][:, step + 1 : step + 1 + anchors][answered])
        yield drafter.logits(features[answered]), theirs, answered


def losses(drafter: Drafter, target: Any, batch: Text, steps: int) -> torch.Tensor:
    total = torch.zeros((), device=batch.tokens.device)
    with torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda"):
        for step, (ours, theirs, answered) in enumerate(compared(drafter, target, batch, steps)):
            if answered.any():
                total = total + LATER**step * torch.nn.functional.cross_entropy(ours.float(), theirs.float().softmax(-1))
    return total


@torch.no_grad()  # type: ignore[untyped-decorator]
def acceptance(drafter: Any, target: Any, text: Text, held: torch.Tensor, rows: int, steps: int) -> list[float]:
    """The share of drafts whose first 1, 2, ... tokens are all the target's most likely ones. A draft begins where the one before ended, as
    vLLM drafts: after what was accepted and the target's own next token."""
    drafted, accepted = 0, [0] * steps
    with torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda"):
        for part in held.split(rows):
            batch = text.take(part, device())
            right: Any = True
            run: Any = 0
            for ours, theirs, answered in compared(drafter, target, batch, steps):
                hits = torch.zeros_like(answered)
                hits[answered] = ours.argmax(-1) == theirs.argmax(-1)
                right = hits & right
                run = run + right.int()
            for lengths, start, end in zip(run.tolist(), batch.starts.tolist(), batch.ends.tolist(), strict=True):
                place = start - 1
                while place + steps + 1 < end:
                    drafted += 1
                    for step in range(lengths[place]):
                        accepted[step] += 1
                    place += lengths[place] + 1
    return [round(count / max(drafted, 1), 4) for count in accepted]


if __name__ == "__main__":
    app()
