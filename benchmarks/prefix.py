"""What it is worth that rows with a common beginning travel together: the share of prompt tokens that the engine's cache had.

    python benchmarks/prefix.py [--rows 96] [--groups 24] [--prefix-words 500] [--kv-gib 0.1] [--max-num-seqs 4]

`specbatch generate` over rows of some groups, shuffled; the rows of a group share a long beginning, and the beginnings of all groups do
not fit the cache at once. Once with rows grouped by their beginnings, once in the input's order, each on an engine of its own.
Writes benchmarks/results/prefix.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from observer import machine, save

from specbatch.context import opened
from specbatch.generation.requests import WINDOW_ROWS
from specbatch.service import batches
from specbatch.settings import BUILTIN_MODEL, Settings

WORDS = [
    "river",
    "stone",
    "market",
    "winter",
    "letter",
    "garden",
    "engine",
    "harbor",
    "paper",
    "candle",
    "window",
    "bridge",
    "copper",
    "violet",
    "meadow",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--prefix-words", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--kv-gib", type=float, default=0.1)
    parser.add_argument("--model", default=BUILTIN_MODEL)
    parser.add_argument("--name", default="prefix")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="specbatch-bench-") as name:
        folder = Path(name)
        _write(folder / "in.jsonl", asked)
        found = {how: _run(folder, how, window, asked) for how, window in (("in input order", 1), ("grouped", WINDOW_ROWS))}
        texts = [[json.loads(line)["text"] for line in (folder / f"{how}.jsonl").read_text().splitlines()] for how in found]
    document = {**machine(), "asked": vars(asked), "ways": found, "same_texts": sum(map(str.__eq__, *texts)), "rows": asked.rows}
    print(f"wrote {save(asked.name, document)}")


def _write(path: Path, asked: argparse.Namespace) -> None:
    chance = random.Random(1)
    beginnings = [" ".join(chance.choice(WORDS) for _ in range(asked.prefix_words)) for _ in range(asked.groups)]
    rows = [{"beginning": beginnings[number % asked.groups], "question": f"Which word is number {number}?"} for number in range(asked.rows)]
    chance.shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _run(folder: Path, how: str, window: int, asked: argparse.Namespace) -> dict[str, Any]:
    home = folder / how
    words = ["generate", folder / "in.jsonl", "-o", folder / f"{how}.jsonl", "--system", "{{ beginning }}", "--prompt", "{{ question }}"]
    sampling = ["--max-tokens", asked.max_tokens, "--temperature", 0, "--mode", "plain", "--prefix-window", window, "--json"]
    engine = ["--data-dir", home, "--model", asked.model, "--max-model-len", 2048, "--cpu-kv-cache-gib", asked.kv_gib]
    command = [*words, *sampling, *engine, "--max-num-seqs", asked.max_num_seqs]
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", "specbatch", *map(str, command)], stdout=subprocess.PIPE, check=True)
    told = json.loads(ended.stdout.splitlines()[-1])
    with opened(Settings(data_dir=home)) as ctx:
        [batch] = batches.page(ctx)
    run = {
        "cached_share": round(told["cached_tokens"] / told["prompt_tokens"], 3),
        "prompt_tokens": told["prompt_tokens"],
        "cached_tokens": told["cached_tokens"],
        "generated_tokens_per_second": batch.measured.tokens_per_second,
        "from_start_seconds": round(time.monotonic() - began, 1),
    }
    print(how, json.dumps(run), flush=True)
    return run


if __name__ == "__main__":
    main()
