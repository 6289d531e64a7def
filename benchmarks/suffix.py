"""What memory across rows is worth: drafts accepted as a batch goes on, in mode suffix with and without its memory, beside ngram and plain.

    python benchmarks/suffix.py [--tasks json,chat] [--rows 48] [--at-once 8] [--max-tokens 96] [--dtype bfloat16]
    python benchmarks/suffix.py --draw suffix,suffix-chat      # what was measured before, as one picture

Greedy rows of specbatch/workload.py, in their order, the next as soon as one is answered. Each way has an engine of its own; the rows of a
task follow those of the one before. Writes benchmarks/results/suffix.json. Needs the extra `suffix`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from observer import RESULTS, machine, plot, save

from specbatch import workload
from specbatch.domain import Measurement, Mode, TaskType
from specbatch.machine import this_machine
from specbatch.settings import BUILTIN_MODEL, Settings
from worker.engine import build
from worker.engine.base import Engine

PARTS = 4  # of the rows, in order
WAYS: dict[str, tuple[Mode, dict[str, Any]]] = {
    "plain": (Mode.PLAIN, {}),
    "ngram": (Mode.NGRAM, {}),
    "suffix, no memory": (Mode.SUFFIX, {"suffix_cached_requests": 0}),
    "suffix": (Mode.SUFFIX, {}),
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="json,chat")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--model", default=BUILTIN_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--name", default="suffix")
    parser.add_argument("--draw", metavar="NAMES", help="measure nothing: draw these results")
    asked = parser.parse_args()
    if asked.draw:
        print(f"wrote {draw(asked.draw.split(','))}")
        return
    tasks = [TaskType(name) for name in asked.tasks.split(",")]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="specbatch-bench-") as folder:
        settings = Settings(data_dir=Path(folder), model=asked.model, dtype=asked.dtype, max_num_seqs=asked.at_once, max_model_len=2048)
        for way, (mode, changes) in WAYS.items():
            engine = build(settings.model_copy(update=changes), mode)
            await engine.start()
            try:
                found[way] = {task: await _answer(engine, task, asked) for task in tasks}
            finally:
                await engine.stop()
            print(way, json.dumps(found[way]), flush=True)
        document = {**machine(), "vllm": this_machine(settings).vllm, "asked": vars(asked), "ways": found}
    print(f"wrote {save(asked.name, document)}")


async def _answer(engine: Engine, task: TaskType, asked: argparse.Namespace) -> dict[str, Any]:
    bodies = list(itertools.islice(workload.requests(task, max_tokens=asked.max_tokens), asked.rows))
    gate = asyncio.Semaphore(asked.at_once)

    async def one(number: int, body: dict[str, Any]) -> Measurement:
        async with gate:
            reply = await engine.answer(f"{task}-{number}", "/v1/chat/completions", body)
            assert reply.status_code == 200, reply.body
            return reply.measurement

    began = time.monotonic()
    rows = await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies)))
    seconds = time.monotonic() - began
    size = -(-len(rows) // PARTS)
    return {
        "tokens_per_second": round(sum(row.generated_tokens for row in rows) / seconds, 1),
        **_shares(rows),
        "parts": [_shares(rows[start : start + size]) for start in range(0, len(rows), size)],
    }


def _shares(rows: Sequence[Measurement]) -> dict[str, Any]:
    """`from_drafts`: the share of generated tokens that came from accepted drafts."""
    generated, drafted, accepted = (
        sum(getattr(row, name) for row in rows) for name in ("generated_tokens", "drafted_tokens", "accepted_tokens")
    )
    return {
        "generated": generated,
        "drafted": drafted,
        "accepted": accepted,
        "from_drafts": round(accepted / generated, 3),
        "acceptance": round(accepted / drafted, 3) if drafted else None,
    }


def draw(names: Sequence[str]) -> Path:
    """The share of tokens that came from accepted drafts, against the rows of its kind that the engine had seen."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        document = json.loads((RESULTS / f"{name}.json").read_text())
        for way, tasks in document["ways"].items():
            for task, result in tasks.items():
                if way != "plain":
                    size = document["asked"]["rows"] / len(result["parts"])
                    shares = [part["from_drafts"] for part in result["parts"]]
                    series[f"{task}, {way}"] = [(size * (number + 0.5), share) for number, share in enumerate(shares)]
    return plot("suffix", "What drafts are worth as a batch goes on", "rows seen", "share of tokens from accepted drafts", series)


if __name__ == "__main__":
    asyncio.run(main())
