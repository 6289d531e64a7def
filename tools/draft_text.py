"""The text that drafts and heads learn from: what the target itself answers, greedily, as token ids.

Prompts are made as those of specbatch/workload.py, and are none of those that benchmarks measure: code comes from the packages of Python's
standard library (the workload takes its top-level modules), the rest is drawn from numbers far beyond.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specbatch import workload
from specbatch.domain import TaskType

FAR = 10_000_000  # no measured point begins here
TURNS = (TaskType.CODE, TaskType.CHAT, TaskType.JSON, TaskType.CODE, TaskType.CHAT, TaskType.CREATIVE, TaskType.EXTRACTION)
OTHERS = frozenset({"site-packages", "dist-packages", "test", "tests"})  # not in every Python
SORTED = 8  # batches whose prompts are sorted by length together: less padding


@dataclass(frozen=True, slots=True)
class Text:
    """Rows of one width. `tokens`: [rows, width] int32, padded on the right; `starts`, `ends`: [rows] int32, an answer's first id and the
    place after its last."""

    tokens: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: torch.Tensor, device: torch.device) -> Text:
        """Some rows, as wide as the longest of them."""
        width = int(self.ends[rows].max())
        return Text(self.tokens[rows, :width].long().to(device), self.starts[rows].long().to(device), self.ends[rows].long().to(device))

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"tokens": self.tokens, "starts": self.starts, "ends": self.ends}, file)

    @classmethod
    def load(cls, file: Path) -> Text:
        return cls(**load_file(file))


def prompts(file: Path | None) -> Iterator[str]:
    """Without end. `file` holds a prompt a line, or, if its name ends in .jsonl, OpenAI batch requests, whose last messages are taken."""
    if file is not None:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if file.suffix == ".jsonl":
            lines = [json.loads(line)["body"]["messages"][-1]["content"] for line in lines]
        yield from itertools.cycle(lines)
    streams = {task: workload.requests(task, FAR) for task in set(TURNS) - {TaskType.CODE}}
    code = _code()
    for task in itertools.cycle(TURNS):
        yield next(code) if task is TaskType.CODE else next(streams[task])["messages"][0]["content"]


def _code() -> Iterator[str]:
    shortest, longest = workload.FUNCTION_CHARACTERS
    root = Path(sysconfig.get_path("stdlib"))
    found: set[str] = set()
    for file in root.glob("*/**/*.py"):
        if not OTHERS.isdisjoint(file.parts):
            continue
        found |= {text for text in _functions(file) if shortest <= len(text) <= longest}
    functions = sorted(found)
    random.Random(1).shuffle(functions)
    for wish, function in itertools.cycle(itertools.product(workload.CODE_WISHES, functions)):
        yield f"{wish}\n\n```python\n{function}\n```"


def _functions(file: Path) -> Iterator[str]:
    try:
        source = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # Python's own tests hold broken files
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def write(
    target: Any, tokenizer: Any, asked: Iterator[str], *, rows: int, tokens: int, longest: int, answer: int, seconds: float
) -> Iterator[Text]:
    """Batches of `rows` answers of at most `answer` ids to prompts of at most `longest` ids, until `tokens` ids are written or the time is
    over. `target` is a transformers model."""
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    until, written, longer = time.monotonic() + seconds, 0, 0
    while True:
        pool: list[list[int]] = []
        while len(pool) < SORTED * rows:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": next(asked)}], add_generation_prompt=True, return_dict=False)
            longer = 0 if len(ids) <= longest else longer + 1
            if longer == 1000:
                raise SystemExit(f"a thousand prompts in a row are longer than {longest} tokens: raise --prompt-tokens")
            if not longer:
                pool.append(ids)
        pool.sort(key=len)
        for first in random.Random(written).sample(range(0, len(pool), rows), SORTED):
            batch = _answer(target, tokenizer, pool[first : first + rows], answer)
            written += int((batch.ends - batch.starts).sum())
            yield batch
            if written >= tokens or time.monotonic() >= until:
                return


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _answer(target: Any, tokenizer: Any, asked: list[list[int]], answer: int) -> Text:
    padded = tokenizer.pad({"input_ids": asked}, return_tensors="pt").to(target.device)
    out = target.generate(**padded, do_sample=False, max_new_tokens=answer, pad_token_id=tokenizer.pad_token_id)
    width = padded["input_ids"].shape[1]
    said = out[:, width:].cpu()
    ended = (said == tokenizer.eos_token_id).int()
    lengths = torch.where(ended.any(1), ended.argmax(1) + 1, said.shape[1])
    starts = torch.tensor([len(ids) for ids in asked])
    tokens = torch.zeros(len(asked), int((starts + lengths).max()), dtype=torch.int32)
    for row, ids in enumerate(asked):
        whole = torch.cat([torch.tensor(ids), said[row, : lengths[row]]])
        tokens[row, : len(whole)] = whole
    return Text(tokens, starts.int(), (starts + lengths).int())


def joined(batches: list[Text]) -> Text:
    width = max(batch.tokens.shape[1] for batch in batches)
    tokens = [torch.nn.functional.pad(batch.tokens, (0, width - batch.tokens.shape[1])) for batch in batches]
    return Text(torch.cat(tokens), torch.cat([batch.starts for batch in batches]), torch.cat([batch.ends for batch in batches]))
