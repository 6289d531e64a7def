"""Everything goes wrong, for as long as you like: `make chaos SEED=1 MINUTES=30 DATABASE=sqlite`.

Three workers (one with a clock five minutes fast), two reconcilers and an API serve batches that never stop coming, with default settings,
while one fault after another is drawn from the seed. Then the faults end, every batch must end too, and each is audited: the run prints
its tally, and fails if a row was lost or written twice.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

from specbatch import migration
from specbatch.domain import JobStatus, Outcome
from specbatch.errors import ServiceUnavailable
from specbatch.settings import Settings
from tests.faults.audit import audit
from tests.faults.faults import FAULTS, Scene
from tests.faults.installation import installed, request
from tests.faults.services import Postgres, Valkey
from tests.faults.waiting import until

PAUSE_SECONDS = 8.0  # on average between two faults
BATCH_ROWS = (50, 400)
OPEN_BATCHES = 4
ROW_MS = (80, 720)
SLOTS = 8  # rows that an engine answers at once
LAST_SECONDS = 240.0


def run(seed: int, minutes: float, database: str, home: Path, *, workers: int = 3, pause: float = PAUSE_SECONDS) -> dict[str, Any]:
    """The tally. Raises AssertionError when something was lost, or written twice."""
    with ExitStack() as stack:
        valkey = Valkey()
        stack.callback(valkey.close)
        postgres = None
        if database == "postgres":
            postgres = Postgres()
            stack.callback(postgres.close)
        wanted = Settings(
            data_dir=home / "data",
            database_url=postgres.url if postgres else None,
            redis_url=valkey.url,
            engine="scripted",
            modes=("plain",),
            max_num_seqs=SLOTS,
            shard_rows=16,
            shards_in_flight=4,
            port=_free_port(),
        )
        wanted.home.mkdir(parents=True)
        migration.upgrade_database(wanted)
        scene = Scene(stack.enter_context(installed(wanted, home)), valkey, postgres, random.Random(seed), workers)
        stack.callback(scene.close)
        _play(scene, minutes * 60, pause)
        return _reckon(scene, seed, minutes, database)


def _play(scene: Scene, seconds: float, pause: float) -> None:
    end = time.monotonic() + seconds
    next_fault = time.monotonic() + pause / 2
    while time.monotonic() < end:
        with suppress(ServiceUnavailable):  # this process asks the database that is being broken, too
            scene.look()
            if scene.open_batches() < OPEN_BATCHES:
                scene.submit(_batch(scene.dice, len(scene.batches)))
        if time.monotonic() >= next_fault:
            names, weights = zip(*((name, weight) for name, (weight, _) in FAULTS.items()), strict=True)
            scene.inject(scene.dice.choices(names, weights)[0])
            next_fault = time.monotonic() + scene.dice.expovariate(1 / pause)
        time.sleep(0.05)
    scene.calm()
    until(scene.all_over, "every batch ends", LAST_SECONDS, explain=scene.here.describe)


def _batch(dice: random.Random, number: int) -> list[dict[str, Any]]:
    """Rows of every length. Each fifth batch kills an engine once, each tenth holds a row that kills every engine."""
    lines = [request(index, dice.uniform(*ROW_MS)) for index in range(dice.randint(*BATCH_ROWS))]
    if number % 10 == 9:
        lines[dice.randrange(len(lines))]["body"]["metadata"]["x-fault"] = "die"
    elif number % 5 == 3:
        lines[dice.randrange(len(lines))]["body"]["metadata"]["x-fault"] = dice.choice(["die_once", "exit_once"])
    for line in lines:
        line["body"]["messages"][0]["content"] += f" of batch {number}"
    return lines


def _reckon(scene: Scene, seed: int, minutes: float, database: str) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    most_attempts = losses = 0
    for job_id, poison in scene.batches.items():
        tally = audit(scene.here.ctx, job_id)
        outcomes.update(tally.outcomes)
        statuses[tally.status] += 1
        most_attempts, losses = max(most_attempts, tally.most_attempts), losses + tally.losses
        if tally.status == JobStatus.COMPLETED:
            failed = tally.outcomes.get(Outcome.FAILED, 0)
            assert failed == poison, f"{job_id}: {failed} rows failed, {poison} kill their engine: {tally}"
    answers = scene.here.answers()
    recovered: dict[str, list[float]] = defaultdict(list)
    for name, took in scene.recoveries:
        recovered[name].append(took)
    return {
        "seed": seed,
        "minutes": minutes,
        "database": database,
        "faults": dict(sorted(scene.injected.items())),
        "faults_injected": scene.injected.total(),
        "batches": dict(statuses),
        "rows": outcomes.total(),
        "outcomes": dict(outcomes),
        "rows_lost": 0,  # the audit above has proven it
        "rows_answered": answers.total(),
        "rows_answered_twice_percent": round(100 * scene.here.answered_twice(), 3),
        "duplicate_messages_refused": scene.here.logged("the message is dropped"),
        "zombie_writes_fenced": scene.here.logged("nothing more is written"),
        "engine_deaths": scene.here.logged("the engine died after"),
        "losses": losses,
        "most_attempts": most_attempts,
        "recovery_seconds": {
            name: {
                "times": len(took),
                "median": round(median(took), 1),
                "p90": round(sorted(took)[9 * len(took) // 10], 1),
                "most": round(max(took), 1),
            }
            for name, took in sorted(recovered.items())
        },
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--minutes", type=float, default=30.0)
    words.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    words.add_argument("--workers", type=int, default=3)
    words.add_argument("--results", type=Path, help="write the tally to this JSON file too")
    asked = words.parse_args()
    home = Path(tempfile.mkdtemp(prefix="chaos-"))
    home.chmod(0o755)
    print(f"logs under {home}", file=sys.stderr)
    tally = run(asked.seed, asked.minutes, asked.database, home, workers=asked.workers)
    text = json.dumps(tally, indent=2)
    print(text)
    if asked.results:
        asked.results.parent.mkdir(parents=True, exist_ok=True)
        asked.results.write_text(text + "\n")
