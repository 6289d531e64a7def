"""How many requests a second one core classifies, and how often it is right.

    python benchmarks/classify.py [--seconds 5]

Reads tests/data/labelled_requests.jsonl, prints a table, and writes benchmarks/results/classify.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from specbatch.classify import classify
from specbatch.domain import TaskType

ROOT = Path(__file__).resolve().parents[1]
LABELLED = ROOT / "tests" / "data" / "labelled_requests.jsonl"
RESULT = ROOT / "benchmarks" / "results" / "classify.json"


def rate(bodies: list[dict[str, Any]], seconds: float) -> list[float]:
    """Requests a second of processor time in each pass over the bodies, for so many seconds of the clock."""
    rates, end = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.process_time()
        for body in bodies:
            classify(body)
        rates.append(len(bodies) / (time.process_time() - start))
    return rates


def table(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    counts = Counter((row["task"], classify(row["body"]).task.value) for row in rows)
    return {task: {other: counts[task, other] for other in TaskType} for task in TaskType}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    seconds = parser.parse_args().seconds
    rows = [json.loads(line) for line in LABELLED.read_text("utf-8").split("\n") if line]
    long = [{"messages": [{"role": "user", "content": f"Summarize:\n\n{'The council voted on Tuesday. ' * 4000}"}]}] * 100
    result: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for name, bodies in (("labelled", [row["body"] for row in rows]), ("120,000 characters each", long)):
        rates = rate(bodies, seconds)
        result[name] = {"requests_per_second": round(statistics.median(rates)), "slowest_pass": round(min(rates)), "passes": len(rates)}
        print(f"{name}: {result[name]['requests_per_second']:,} requests a second on one core (median of {len(rates)} passes)")
    for split in ("dev", "held_out"):
        chosen = [row for row in rows if row["split"] == split]
        result[split] = table(chosen)
        right = sum(result[split][task][task] for task in TaskType)
        print(f"\n{split}: {right} of {len(chosen)} right; labelled (down), classified (across)")
        print(f"{'':11}" + "".join(f"{task:>11}" for task in TaskType))
        for task in TaskType:
            print(f"{task:11}" + "".join(f"{count:11}" for count in result[split][task].values()))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
