"""Twenty changes of mode in one worker: processes, memory and threads after each, and what a start costs. vLLM, on any machine.

python benchmarks/switching.py --model FOLDER --draft FOLDER [--times 20] [--out benchmarks/results/switching.json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from specbatch.domain import Mode
from specbatch.settings import Settings
from worker.host import EngineHost

OURS = ("worker.engine.watchdog", "multiprocessing.resource_tracker")
ASK = {"model": "default", "messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 8, "temperature": 0}


def reading(host: EngineHost, switched_seconds: float) -> dict[str, Any]:
    """Resident memory in bytes; `children` are all descendants of this process. `tokenizers` are what vLLM copied and did not let go."""
    reply = asyncio.run_coroutine_threadsafe(host.answer("row", "/v1/chat/completions", dict(ASK)), host.loop).result(300)
    gc.collect()
    here = psutil.Process()
    children = here.children(recursive=True)
    return {
        "mode": host.mode,
        "answered": reply.status_code == 200,
        "switched_seconds": round(switched_seconds, 2),
        "children": len(children),
        "threads": threading.active_count(),
        "tokenizers": sum("Tokenizer" in type(each).__name__ for each in gc.get_objects()),
        "own_bytes": here.memory_info().rss,
        "children_bytes": sum(child.memory_info().rss for child in children),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/switching.json"))
    given = parser.parse_args()
    modes = (Mode.NGRAM, Mode.DRAFT_MODEL, Mode.PLAIN)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            data_dir=Path(folder), model=given.model, draft=given.draft, dtype="float32", cpu_kv_cache_gib=0.25, max_num_seqs=4
        )
        host = EngineHost(settings, modes[0])
        began = time.monotonic()
        host.start()
        readings = [reading(host, time.monotonic() - began)]
        print(readings[-1], flush=True)
        try:
            for mode in itertools.islice(itertools.cycle(modes[1:] + modes[:1]), given.times):
                began = time.monotonic()
                host.switch(mode)
                readings.append(reading(host, time.monotonic() - began))
                print(readings[-1], flush=True)
        finally:
            host.stop()
        # Python's own tracker and our watchdog belong to this process, not to an engine: both end with it.
        left = [child for child in psutil.Process().children(recursive=True) if not any(name in " ".join(child.cmdline()) for name in OURS)]
        result = {"times": given.times, "readings": readings, "left_behind": len(left)}
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"left behind: {len(left)} processes; own memory grew by {readings[-1]['own_bytes'] - readings[1]['own_bytes']:,} bytes")


if __name__ == "__main__":
    main()
