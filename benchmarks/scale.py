"""Rows a second, and the memory of each process, from 1,000 rows to 1,000,000: the whole product with an engine that takes no time.

    python benchmarks/scale.py [--rows 1000,10000,100000,1000000] [--databases sqlite,postgres] [--workers 1,2,4]

A file of short chat requests goes through the API, and a batch of it through validation, Redis, Celery, the scripted engine, SQL and the
output file. The clock runs from the creation of the batch to its end. Writes benchmarks/results/scale.json; `--name` names another file.
`--keep-pids` prints the processes and waits a moment before the batch is created, for a profiler (py-spy record --pid ...).
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
from observer import Observer, installation, machine, save

from specbatch.domain import Mode
from specbatch.processes import Crew
from specbatch.settings import Settings

CHAT = "/v1/chat/completions"
POLL_SECONDS = 0.1
START_SECONDS = 60.0
FLAT = 1.3
MOST_MIB = 400
LEAST_ROWS_PER_SECOND = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1000,10000,100000,1000000")
    parser.add_argument("--databases", default="sqlite,postgres")
    parser.add_argument("--workers", default="1", help="how many, for every size")
    parser.add_argument("--name", default="scale")
    parser.add_argument("--keep-pids", action="store_true")
    asked = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for database in asked.databases.split(","):
        for workers in map(int, asked.workers.split(",")):
            for rows in map(int, asked.rows.split(",")):
                run = {"database": database, "workers": workers, **measure(database, workers, rows, pause=asked.keep_pids)}
                runs.append(run)
                print(json.dumps(run), flush=True)
    path = save(asked.name, {**machine(), "targets": _judged(runs), "runs": runs})
    print(f"wrote {path}")


def measure(database: str, workers: int, rows: int, *, pause: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "engine": "scripted",
        "modes": (Mode.PLAIN,),
        "port": free_port(),
        "stop_seconds": 2.0,
        "log_level": "warning",
    }
    with installation(database, **changes) as (settings, redis_url, pids), Crew(settings, redis_url, print) as crew:
        crew.start("api", "api")
        crew.start("reconciler", "worker.reconciler")
        for number in range(workers):
            crew.start(f"worker-{number}", "worker")
        with httpx.Client(base_url=f"http://{settings.host}:{settings.port}", timeout=600.0) as http:
            wait_ready(http)
            uploading = time.monotonic()
            file_id = _uploaded(http, settings, rows)
            uploading = time.monotonic() - uploading
            if pause:
                print({name: crew.pid(name) for name in ("api", "reconciler", *(f"worker-{n}" for n in range(workers)))}, flush=True)
                time.sleep(3.0)
            with Observer(pids) as seen:
                began = time.monotonic()
                batch = finished(http, crew, file_id)
                seconds = time.monotonic() - began
    counts = batch["request_counts"]
    assert (batch["status"], counts["completed"]) == ("completed", rows), batch
    return {
        "rows": rows,
        "seconds": round(seconds, 2),
        "rows_per_second": round(rows / seconds, 1),
        "microseconds_per_row": round(1e6 * seconds / rows, 1),
        "phases": batch["phases"],
        "upload_seconds": round(uploading, 2),
        "processes": seen.report(),
    }


def _uploaded(http: httpx.Client, settings: Settings, rows: int) -> str:
    """Through the API, from a file on disk."""
    path = settings.home / "requests.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(_lines(rows))
    with path.open("rb") as file:
        response = http.post("/v1/files", files={"file": ("requests.jsonl", file)}, data={"purpose": "batch"})
    response.raise_for_status()
    path.unlink()
    return str(response.json()["id"])


def _lines(rows: int) -> Iterator[str]:
    for number in range(rows):
        content = f"Tell me in one sentence what distinguishes item {number} from item {number + 1} of the list."
        body = {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
        yield json.dumps({"custom_id": f"row-{number}", "method": "POST", "url": CHAT, "body": body}, separators=(",", ":")) + "\n"


def finished(http: httpx.Client, crew: Crew, file_id: str) -> dict[str, Any]:
    """The batch at its end, with `phases`: seconds until each status was left, as seen from here."""
    new = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch: dict[str, Any] = http.post("/v1/batches", json=new).raise_for_status().json()
    began, status, phases = time.monotonic(), batch["status"], dict[str, float]()
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(POLL_SECONDS)
        crew.check()
        batch = http.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
        if batch["status"] != status:
            phases[status] = round(time.monotonic() - began - sum(phases.values()), 2)
            status = batch["status"]
    return {**batch, "phases": phases}


def _judged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The targets, and what was measured for each, by database with one worker."""
    judged: dict[str, Any] = {}
    for database in {run["database"] for run in runs}:
        alone = [run for run in runs if run["database"] == database and run["workers"] == 1]
        large = [run["microseconds_per_row"] for run in alone if run["rows"] >= 10_000]
        if large:
            judged[database] = {
                "time_per_row_grows_by": round(large[-1] / large[0], 2),
                "at_most": FLAT,
                "most_mib": max(each["peak_mib"] for run in alone for name, each in run["processes"].items() if name != "postgres"),
                "allowed_mib": MOST_MIB,
                "least_rows_per_second": min(run["rows_per_second"] for run in alone if run["rows"] >= 10_000),
                "wanted_rows_per_second": LEAST_ROWS_PER_SECOND,
            }
    return judged


def wait_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            http.get("/readyz").raise_for_status()
            return
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
