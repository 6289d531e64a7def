"""The same rows through vLLM alone and through the whole product: what the road between costs.

    python benchmarks/pipeline.py [--rows 128] [--max-tokens 48] [--model builtin:smollm2-135m] [--databases sqlite,postgres] [--rounds 1]

Same prompts, same engine settings, greedy, every answer of exactly --max-tokens tokens, so that each way does the same work:
    generate    `LLM.chat` with everything in one call, on an engine that is up
    run-batch   `vllm run-batch`, from the start of its process to a complete output file
    product     API, Redis, Celery, SQL: from the upload to the downloaded output file on an engine that is up, and from the start of all
                processes to that file
One after the other, never two engines at once; `--rounds` repeats the sequence and takes medians, against a noisy machine.
Writes benchmarks/results/pipeline.json, and pipeline-running.svg: the requests that run in the engine, step by step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from observer import Observer, installation, machine, plot, save
from scale import finished, free_port, wait_ready

from specbatch.context import opened
from specbatch.domain import Mode
from specbatch.gpus import has_gpu
from specbatch.processes import Crew
from specbatch.service import reports
from specbatch.serving import resolve_model
from specbatch.settings import BUILTIN_MODEL, Settings

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "tests" / "data" / "labelled_requests.jsonl"
LONGEST_PROMPT = 1500  # characters
START_SECONDS = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--model", default=BUILTIN_MODEL)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--shard-rows", type=int, default=32)
    parser.add_argument("--databases", default="sqlite,postgres")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--name", default="pipeline")
    parser.add_argument("--role", choices=("generate", "run-batch"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role is not None:
        return _play(asked.role, asked.folder)
    with tempfile.TemporaryDirectory(prefix="specbatch-bench-") as name:
        folder = Path(name)
        settings = _settings(asked, folder)
        _prepare(settings, folder, asked.rows, asked.max_tokens)
        found: dict[str, list[dict[str, Any]]] = {}
        samples: dict[str, list[tuple[float, float]]] = {}
        for _ in range(asked.rounds):
            for way in ("generate", "run-batch"):
                found.setdefault(way, []).append(_said(way, _alone(way, folder)))
            for database in asked.databases.split(","):
                way = f"product, {database}"
                run, samples[way] = _product(database, asked, folder)
                found.setdefault(way, []).append(_said(way, run))
    document = {**machine(), "asked": {name: value for name, value in vars(asked).items() if name not in ("role", "folder")}}
    path = save(asked.name, {**document, **_compared(found, asked), "rounds": found})
    print(f"wrote {path} and {plot(f'{asked.name}-running', 'Requests that run in the engine', 'seconds', 'requests', samples)}")


def _settings(asked: argparse.Namespace, home: Path) -> Settings:
    return Settings(data_dir=home / "alone", model=asked.model, modes=(Mode.PLAIN,), max_num_seqs=asked.max_num_seqs, max_model_len=2048)


def _prepare(settings: Settings, folder: Path, rows: int, max_tokens: int) -> None:
    """The requests, and vLLM's words and environment for these settings, as the worker would use them."""
    from worker import builtin
    from worker.engine.arguments import arguments, environment

    bodies = [json.loads(line)["body"] for line in PROMPTS.read_text("utf-8").split("\n") if line]
    chats = [body["messages"] for body in bodies if "messages" in body and len(json.dumps(body["messages"])) < LONGEST_PROMPT]
    chats = [chat for chat in chats if all(isinstance(message.get("content"), str) for message in chat)]
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
        for number in range(rows):
            body = {
                "model": "default",
                "messages": chats[number % len(chats)],
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            file.write(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n")
    name = resolve_model(settings)
    model = str(builtin.folder(settings.cache_dir)) if name == BUILTIN_MODEL else name
    (folder / "log.json").write_text(json.dumps({"version": 1, "disable_existing_loggers": False}))
    words = arguments(settings, Mode.PLAIN, model, cpu=not has_gpu())
    (folder / "words.json").write_text(json.dumps([words, environment(settings, Mode.PLAIN, model, folder / "log.json")]))


def _alone(way: str, folder: Path) -> dict[str, Any]:
    """A way without the product, in a process of its own."""
    (folder / "out.jsonl").unlink(missing_ok=True)
    environment = os.environ | json.loads((folder / "words.json").read_text())[1] | {"PYTHONPATH": str(ROOT)}
    with Observer() as seen, (folder / f"{way}.log").open("w") as log:
        began = time.monotonic()
        command = [sys.executable, __file__, "--role", way, "--folder", str(folder)]
        ended = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
        seconds = time.monotonic() - began
    if ended.returncode:
        raise SystemExit(f"{way} failed:\n{(folder / f'{way}.log').read_text()[-3000:]}")
    told = json.loads((folder / "told.json").read_text()) if way == "generate" else {"tokens": _tokens(folder / "out.jsonl")}
    return {**told, "from_start_seconds": round(seconds, 2), "processes": seen.report()}


def _play(role: str, folder: Path) -> None:
    """The child's part."""
    words = json.loads((folder / "words.json").read_text())[0]
    if role == "run-batch":
        from vllm.entrypoints.launchers.run_batch import main as run_batch
        from vllm.entrypoints.launchers.run_batch import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        files = ["-i", str(folder / "requests.jsonl"), "-o", str(folder / "out.jsonl")]
        parsed, _ = make_arg_parser(FlexibleArgumentParser()).parse_known_args([*files, *words])
        asyncio.run(run_batch(parsed))
        return
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from worker.engine.vllm import _parse

    llm = LLM.from_engine_args(EngineArgs.from_cli_args(_parse(words)))
    bodies = [json.loads(line)["body"] for line in (folder / "requests.jsonl").read_text("utf-8").split("\n") if line]
    parameters = SamplingParams(max_tokens=bodies[0]["max_tokens"], temperature=0, ignore_eos=True)
    began = time.monotonic()
    outputs = llm.chat([body["messages"] for body in bodies], parameters, use_tqdm=False)
    seconds = time.monotonic() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    (folder / "told.json").write_text(json.dumps({"tokens": tokens, "seconds": round(seconds, 2)}))
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # with an engine's threads about, an interpreter may wait for ever


def _product(database: str, asked: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    changes = _settings(asked, folder).model_dump(include={"model", "modes", "max_num_seqs", "max_model_len"})
    samples = folder / "samples"
    samples.unlink(missing_ok=True)
    with (
        installation(database, **changes, port=free_port(), shard_rows=asked.shard_rows) as (settings, redis_url, pids),
        Crew(settings, redis_url, print) as crew,
        Observer(pids) as seen,
    ):
        began = time.monotonic()
        with _started(settings, crew, samples) as http:
            ready, ready_at = time.monotonic(), time.time()
            with (folder / "requests.jsonl").open("rb") as file:
                response = http.post("/v1/files", files={"file": ("requests.jsonl", file)}, data={"purpose": "batch"})
            batch = finished(http, crew, response.raise_for_status().json()["id"])
            assert batch["request_counts"]["completed"] == asked.rows, batch
            content = http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().content
            (folder / "out.jsonl").write_bytes(content)
            ended = time.monotonic()
    run = {
        "tokens": _tokens(folder / "out.jsonl"),
        "seconds": round(ended - ready, 2),
        "from_start_seconds": round(ended - began, 2),
        "phases": batch["phases"],
        "processes": seen.report(),
    }
    steps = [line.split() for line in samples.read_text().splitlines()]
    running = [(float(at) - ready_at, float(count)) for at, count, _ in steps if float(at) >= ready_at]
    return run | {"steps": len(running), "steps_below_full_before_the_tail": _dips(steps, asked.max_num_seqs)}, running


@contextmanager
def _started(settings: Settings, crew: Crew, samples: Path) -> Iterator[httpx.Client]:
    """Everything up, with a live engine."""
    crew.start("api", "api")
    crew.start("reconciler", "worker.reconciler")
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    crew.start("worker", "sampled_worker", PYTHONPATH=path, SPECBATCH_BENCH_SAMPLES=str(samples))
    with httpx.Client(base_url=f"http://{settings.host}:{settings.port}", timeout=600.0) as http, opened(settings) as ctx:
        wait_ready(http)
        deadline = time.monotonic() + START_SECONDS
        while not reports.engines_alive(ctx):
            crew.check()
            if time.monotonic() > deadline:
                raise SystemExit("the engine did not start")
            time.sleep(0.1)
        yield http


def _dips(steps: list[list[str]], full: int) -> int:
    """Steps that ran fewer requests than they may, between the first full one and the last: the engine waited for rows."""
    counts = [int(count) for _, count, _ in steps]
    places = [place for place, count in enumerate(counts) if count >= full]
    return sum(count < full for count in counts[places[0] : places[-1]]) if places else 0


def _tokens(output: Path) -> int:
    lines = [json.loads(line) for line in output.read_text("utf-8").split("\n") if line]
    return sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines)


def _said(way: str, run: dict[str, Any]) -> dict[str, Any]:
    print(way, json.dumps(run), flush=True)
    return run


def _compared(found: dict[str, list[dict[str, Any]]], asked: argparse.Namespace) -> dict[str, Any]:
    """Medians, and the product's rate over each of the others'."""
    ways: dict[str, dict[str, Any]] = {}
    for way, runs in found.items():
        seconds = {name: statistics.median(run[name] for run in runs) for name in ("seconds", "from_start_seconds") if name in runs[0]}
        tokens = statistics.median(run["tokens"] for run in runs)
        main = seconds.get("seconds", seconds["from_start_seconds"])
        rates = {"rows_per_second": round(asked.rows / main, 3), "tokens_per_second": round(tokens / main, 2)}
        ways[way] = rates | {str(name): value for name, value in seconds.items()} | {"tokens": tokens}
    ratios = {
        way: {
            "of_generate": round(ways["generate"]["seconds"] / each["seconds"], 3),
            "of_generate_wanted": 0.97,
            "of_run_batch_from_start": round(ways["run-batch"]["from_start_seconds"] / each["from_start_seconds"], 3),
            "of_run_batch_wanted": 1.0,
        }
        for way, each in ways.items()
        if way.startswith("product")
    }
    return {"ways": ways, "ratios": ratios}


if __name__ == "__main__":
    main()
