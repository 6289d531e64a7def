"""A worker that notes, for each step of its engine, how many requests ran and how many waited. Started by pipeline.py."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from worker.__main__ import main
from worker.engine.vllm import Counts

SAMPLES_VARIABLE = "SPECBATCH_BENCH_SAMPLES"
count = Counts.count


def noted(counts: Counts, scheduler_stats: Any, iteration_stats: Any) -> None:
    if scheduler_stats is not None:
        samples.write(f"{time.time():.3f} {scheduler_stats.num_running_reqs} {scheduler_stats.num_waiting_reqs}\n".encode())
    count(counts, scheduler_stats, iteration_stats)


if __name__ == "__main__":
    with open(os.environ[SAMPLES_VARIABLE], "ab", buffering=0) as samples:  # noqa: PTH123
        Counts.count = noted  # type: ignore[method-assign, assignment]
        sys.exit(main())
