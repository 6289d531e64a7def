"""Every mode of one target on one GPU, beside LLM.generate: what benchmarks/gpu_session.sh runs on a borrowed machine.

    python benchmarks/gpu_modes.py modes --model FOLDER --draft FOLDER --out DIR --home DIR plain ngram-4 draft-4
    python benchmarks/gpu_modes.py bulk --model FOLDER --out DIR --home DIR generate engine system
    python benchmarks/gpu_modes.py report DIR

Each engine runs in a process of its own, one after the other or, with --kv-gib, side by side in turns (gpu_turns.py). Results are printed
and written to DIR as they come: a session that is cut short keeps what it has. `modes` measures closed loops with worker.tune at LOADS,
then at the loads between them, which no decision has seen. `report` needs no GPU: it makes the table, lets policy decide, and says how far
that is from plain and from the best at every load.
Needs vLLM and this repository on PYTHONPATH; of further packages, platformdirs; `bulk system` also what `specbatch run` imports.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gpu_turns
from pydantic import TypeAdapter

from specbatch import costs, policy, workload
from specbatch.domain import Mode, TaskType
from specbatch.errors import SpecbatchError
from specbatch.settings import load
from specbatch.trial import Measured, Point, Started, Trial, run
from specbatch.tuning import LOADS, Speed, TuningTable, schedule

TASKS = (TaskType.CODE, TaskType.JSON, TaskType.CHAT)
BETWEEN = (8, 128)  # held out
CAPTURED = (1, 2, 4, 5, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 512)
WIDER = [*CAPTURED, 640, 768, 1024, 1280, 1536, 2048]
WIDE = {"SPECBATCH_ENGINE_ARGS": "--compilation-config " + shlex.quote(json.dumps({"cudagraph_capture_sizes": WIDER}))}
SCHEDULE = "1-64:4,65-65536:0"
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # this runner captures a standalone draft model; V2 of vLLM 0.33 runs it without graphs
KS = (1, 2, 3, 4, 5, 8)
OF_EACH_K = {"ngram": (Mode.NGRAM, {}), "draft": (Mode.DRAFT_MODEL, V1), "eagle": (Mode.EAGLE, {}), "eagle3": (Mode.EAGLE3, {})}
NGRAM_GPU = "--speculative-config " + shlex.quote(
    json.dumps({"method": "ngram_gpu", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2})
)
TRIALS: dict[str, tuple[Mode, int, dict[str, str]]] = {
    "plain": (Mode.PLAIN, 0, {}),
    **{f"{name}-{k}": (mode, k, changes) for name, (mode, changes) in OF_EACH_K.items() for k in KS},
    "suffix-16": (Mode.SUFFIX, 16, {}),
    "plain-v1": (Mode.PLAIN, 0, V1),
    "plain-wide": (Mode.PLAIN, 0, WIDE),  # graphs beyond the 512 tokens at which vLLM stops by itself
    "ngram-4-wide": (Mode.NGRAM, 4, WIDE),
    "eagle3-4-wide": (Mode.EAGLE3, 4, WIDE),
    "ngram-4-schedule": (Mode.NGRAM, 4, {"SPECBATCH_TOKENS_BY_BATCH_SIZE": SCHEDULE}),
    "ngram-4-v1": (Mode.NGRAM, 4, V1),  # on the CPU; V2 of vLLM 0.33 looks up on the GPU, whether it is asked for ngram or for ngram_gpu
    "ngram-4-gpu-v1": (Mode.NGRAM, 4, V1 | {"SPECBATCH_ENGINE_ARGS": NGRAM_GPU}),
    "draft-4-v2": (Mode.DRAFT_MODEL, 4, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "eagle-4-v1": (Mode.EAGLE, 4, V1),
    "eagle3-4-v1": (Mode.EAGLE3, 4, V1),
}
TABLED = frozenset({"plain", "suffix-16", *(f"{name}-{k}" for name in OF_EACH_K for k in KS)})  # one K each: what `tune` stores
SPEEDS = TypeAdapter(list[Speed])
LOGGED = re.compile(
    r"(GPU KV cache size: [\d,]+ tokens|Available KV cache memory: [\d.]+ GiB|Model loading took [^;\n]+|Graph capturing finished[^\n]+)"
)


def environment(arguments: argparse.Namespace, name: str, extra: dict[str, str]) -> dict[str, str]:
    """Settings of a child, the same for every mode but for `extra`."""
    graphs = f"--compilation-config '{json.dumps({'cudagraph_capture_sizes': CAPTURED})}'"
    cache = f"--kv-cache-memory-bytes {int((arguments.kv_gib or 0) * 1024**3)}"
    engine_args = [graphs if arguments.graphs else "", cache if arguments.kv_gib else "", extra.get("SPECBATCH_ENGINE_ARGS", "")]
    wanted = {
        "SPECBATCH_DATA_DIR": str(arguments.home / name),
        "SPECBATCH_MODEL": arguments.model,
        "SPECBATCH_DRAFT": arguments.draft,
        "SPECBATCH_EAGLE": arguments.eagle,
        "SPECBATCH_DTYPE": arguments.dtype,
        "SPECBATCH_MAX_MODEL_LEN": str(arguments.context),
        "SPECBATCH_MAX_NUM_SEQS": "256",
        "SPECBATCH_GPU_MEMORY_UTILIZATION": "0.2" if arguments.kv_gib else "0.85",  # of the whole GPU must be free at the start
        "SPECBATCH_TOKENS_BY_BATCH_SIZE": extra.get("SPECBATCH_TOKENS_BY_BATCH_SIZE", ""),
        "SPECBATCH_ENGINE_ARGS": " ".join(filter(None, engine_args)),
        "PYTHONPATH": os.pathsep.join([*(str(place) for place in Path(__file__).resolve().parents[:2]), os.environ.get("PYTHONPATH", "")]),
    }
    if arguments.kv_gib:  # engines that start together and compile the same would write to the same files
        wanted |= {"VLLM_CACHE_ROOT": str(arguments.home / name / "cache"), gpu_turns.FILE: str(arguments.home / "turn")}
    return {key: value for key, value in (extra | wanted).items() if value is not None}


def modes(arguments: argparse.Namespace) -> None:
    names = arguments.names or list(TRIALS)
    arguments.home.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(names) if arguments.kv_gib else 1) as pool:
        list(pool.map(partial(measure, arguments), names))


def measure(arguments: argparse.Namespace, name: str) -> None:
    mode, k, extra = TRIALS[name]
    points = tuple(Point(task=task, load=int(load)) for load in arguments.loads.split(",") for task in TASKS)
    trial = Trial(
        mode=mode, k=k, points=points, seconds=arguments.seconds, point_seconds=arguments.point_seconds, max_tokens=arguments.tokens
    )
    result: dict[str, Any] = {"name": name, "mode": mode, "k": k, "environment": extra, "speeds": []}
    began = time.monotonic()
    print(f"{name}: starting", flush=True)
    try:
        for event in run(trial, environment(arguments, name, extra), "gpu_turns"):
            if isinstance(event, Started):
                result["started"] = event.model_dump()
                print(f"{name}: started in {event.start_seconds:.0f} s on {event.device}, vLLM {event.vllm}", flush=True)
            elif isinstance(event, Measured):
                result["speeds"].append(asdict(event.speed))
                print(f"{name}: {line(event.speed)}", flush=True)
            write(arguments.out / f"modes-{name}.json", result)
    except SpecbatchError as failure:
        result["failure"] = failure.message
        print(f"{name}: FAILED: {failure.message}\n{log_tail(arguments.home / name)}", flush=True)
    result["seconds"] = time.monotonic() - began
    result["log"] = logged(arguments.home / name)
    write(arguments.out / f"modes-{name}.json", result)
    print(f"{name}: {result['seconds']:.0f} s in all; {'; '.join(result['log'])}", flush=True)


def line(speed: Speed) -> str:
    rate = "-" if speed.acceptance_rate is None else f"{speed.acceptance_rate:.2f}"
    times = zip(("TTFT", "TPOT", "step"), (speed.ttft_seconds, speed.tpot_seconds, speed.step_seconds), strict=True)
    said = ", ".join(f"{name} {1000 * (value or 0):7.2f} ms" for name, value in times)
    each = (speed.tokens_per_step or 0) / speed.load
    return (
        f"{speed.task:5} load {speed.load:4}: {speed.tokens_per_second:8,.0f} tokens/s, {said}, {each:.2f} tokens a step and request, "
        f"acceptance {rate}, {speed.requests} requests in {speed.seconds:.1f} s"
    )


def logged(home: Path) -> list[str]:
    file = home / "logs" / "engine.log"
    return [] if not file.exists() else list(dict.fromkeys(LOGGED.findall(file.read_text(errors="replace"))))


def log_tail(home: Path) -> str:
    file = home / "logs" / "engine.log"
    return "no engine log" if not file.exists() else "\n".join(file.read_text(errors="replace").splitlines()[-40:])


def write(file: Path, result: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1))


def bodies(rows: int, max_tokens: int) -> list[dict[str, Any]]:
    """Mixed rows, a third of each task; from a place in the workload that `modes` does not reach."""
    streams = [workload.requests(task, 16_384, max_tokens=max_tokens) for task in TASKS]
    return list(itertools.islice((body for each in zip(*streams, strict=True) for body in each), rows))


def bulk(arguments: argparse.Namespace) -> None:
    """The same rows at once: through LLM.generate, through our engine in plain mode, through the whole system."""
    for name in arguments.names or ("generate", "engine", "system"):
        print(f"bulk {name}: starting", flush=True)
        began = time.monotonic()
        command = [sys.executable, __file__, f"bulk-{name}", *sys.argv[2:]]
        env = {**os.environ, **environment(arguments, f"bulk-{name}", {})}
        ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False, timeout=arguments.timeout)
        told = [text for text in ended.stdout.splitlines() if text.startswith('{"rows":')]
        if ended.returncode or not told:
            print(f"bulk {name}: FAILED with exit code {ended.returncode}\n{ended.stdout[-2000:]}", flush=True)
            print(log_tail(arguments.home / f"bulk-{name}"), flush=True)
            continue
        result = json.loads(told[-1]) | {"name": name, "all_seconds": time.monotonic() - began}
        write(arguments.out / f"bulk-{name}.json", result)
        print(f"bulk {name}: {json.dumps(result)}", flush=True)


def bulk_generate(arguments: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    of_the_device: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": list(CAPTURED)}, "gpu_memory_utilization": 0.85}
    if not arguments.graphs:
        of_the_device = {"enforce_eager": True, "kv_cache_memory_bytes": 1024**3}
    began = time.monotonic()
    llm = LLM(model=arguments.model, dtype=arguments.dtype, max_model_len=arguments.context, max_num_seqs=256, **of_the_device)
    started = time.monotonic() - began
    rows = bodies(arguments.rows, arguments.tokens)
    parameters = SamplingParams(temperature=0, max_tokens=arguments.tokens)
    llm.generate(["warm"] * 8, parameters, use_tqdm=False)
    began = time.monotonic()
    outputs = llm.chat([row["messages"] for row in rows], parameters, use_tqdm=False)  # LLM.generate behind the chat template
    tell(len(rows), sum(len(output.outputs[0].token_ids) for output in outputs), time.monotonic() - began, started)


def bulk_engine(arguments: argparse.Namespace) -> None:
    from worker.engine import build

    async def answer() -> None:
        engine = build(load(), Mode.PLAIN)
        began = time.monotonic()
        try:
            await engine.start()
            started = time.monotonic() - began
            rows = bodies(arguments.rows, arguments.tokens)
            await asyncio.gather(
                *(engine.answer(f"warm-{n}", "/v1/chat/completions", body | {"max_tokens": 8}) for n, body in enumerate(rows[:8]))
            )
            began = time.monotonic()
            replies = await asyncio.gather(*(engine.answer(f"row-{n}", "/v1/chat/completions", body) for n, body in enumerate(rows)))
            seconds = time.monotonic() - began
            refused = [reply.body for reply in replies if reply.status_code != 200]
            assert not refused, refused[0]
            tell(len(rows), sum(reply.measurement.generated_tokens for reply in replies), seconds, started)
        finally:
            await engine.stop()

    asyncio.run(answer())


def bulk_system(arguments: argparse.Namespace) -> None:
    """`specbatch run`: SQL, Redis, Celery and a worker, embedded. Its tokens a second count from the first claim to the last result."""
    source, out = arguments.home / "bulk.jsonl", arguments.home / "bulk-output.jsonl"
    source.parent.mkdir(parents=True, exist_ok=True)
    rows = bodies(arguments.rows, arguments.tokens)
    lines = ({"custom_id": f"row-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n, body in enumerate(rows))
    source.write_text("".join(json.dumps(each) + "\n" for each in lines))
    began = time.monotonic()
    command = [sys.executable, "-m", "specbatch", "run", str(source), "-o", str(out), "--mode", "plain", "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    report = json.loads(ended.stdout.splitlines()[-1])
    tokens, speed = report["batch"]["usage"]["output_tokens"], report["batch"]["measured"]["tokens_per_second"]
    tell(len(rows), tokens, tokens / speed, time.monotonic() - began - tokens / speed)


def tell(rows: int, tokens: int, seconds: float, start_seconds: float) -> None:
    told = {
        "rows": rows,
        "generated_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "start_seconds": start_seconds,
    }
    print(json.dumps(told), flush=True)


def report(arguments: argparse.Namespace) -> None:
    """Markdown of a folder. Policy decides from its tune.json where there is one, else from the points at LOADS."""
    files = sorted(Path(arguments.folder).glob("*.json"))
    found = {result["name"]: result for result in (json.loads(file.read_text()) for file in files if file.name.startswith("modes-"))}
    speeds = {name: SPEEDS.validate_python(result["speeds"]) for name, result in found.items()}
    names = [name for name in TRIALS if speeds.get(name)]
    tuned = [SPEEDS.validate_python(json.loads(file.read_text())["speeds"]) for file in files if file.name == "tune.json"]
    known = tuned[0] if tuned else [speed for name in names if name in TABLED for speed in speeds[name] if speed.load in LOADS]
    table = TuningTable(costs.fill(known))
    by_point = {(name, speed.task, speed.load): speed for name in names for speed in speeds[name]}
    if names:
        print(f"| task | load | {' | '.join(names)} | auto | of plain | of the best |")
        print(f"|---|---|{'---|' * (len(names) + 3)}")
    for task, at in itertools.product(TASKS, sorted((*LOADS, *BETWEEN))):
        here = {name: by_point[name, task, at] for name in names if (name, task, at) in by_point}
        if "plain" in here:
            print(f"| {task} | {at} | {' | '.join(cell(here.get(name)) for name in names)} | {auto(table, task, at, here)} |")
    print()
    for name in names:
        result = found[name]
        started = result.get("started", {})
        print(f"- {name}: start {started.get('start_seconds', 0):.0f} s, {'; '.join(result.get('log', []))}")
    for mode in dict.fromkeys(speed.mode for speed in known):
        if steps := schedule(table, mode, max(speed.k for speed in known if speed.mode is mode)):
            print(f"- {mode}: K by requests in a step {', '.join(f'{first}-{last}: {k}' for first, last, k in steps)}")
    rates = {file.stem: json.loads(file.read_text())["tokens_per_second"] for file in files if file.name.startswith("bulk-")}
    for name, rate in rates.items():
        share = f", {rate / rates['bulk-generate']:.2f} of LLM.generate" if "bulk-generate" in rates else ""
        print(f"- {name}: {rate:,.0f} tokens/s{share}")


def cell(speed: Speed | None) -> str:
    if speed is None:
        return "-"
    return f"{speed.tokens_per_second:,.0f}" + ("" if speed.acceptance_rate is None else f" ({speed.acceptance_rate:.2f})")


def auto(table: TuningTable, task: TaskType, at: int, here: dict[str, Speed]) -> str:
    """What policy picks at this load from the table of LOADS, and its speed against plain's and the best's."""
    measured = {name: speed for name, speed in here.items() if name in TABLED}
    offer = policy.Offer(frozenset(speed.mode for speed in measured.values()))
    mode = policy.decide(task, {}, at, offer, table=table).mode
    speed = max(speed.tokens_per_second for speed in measured.values() if speed.mode is mode)
    best = max(speed.tokens_per_second for speed in measured.values())
    return f"{mode} | {speed / here['plain'].tokens_per_second:.2f} | {speed / best:.2f}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("modes", "bulk", "bulk-generate", "bulk-engine", "bulk-system"):
        command = commands.add_parser(name)
        command.add_argument("--model", required=True)
        command.add_argument("--draft")
        command.add_argument("--eagle")
        command.add_argument("--out", type=Path, required=True, help="for the results")
        command.add_argument("--home", type=Path, required=True, help="for the engines' logs and the system's data")
        command.add_argument("--dtype", default="bfloat16")
        command.add_argument("--context", type=int, default=2048)
        command.add_argument("--seconds", type=float, default=185.0, help="for each engine, its start included")
        command.add_argument("--point-seconds", type=float, default=12.0)
        command.add_argument("--loads", default=",".join(map(str, (*LOADS, *BETWEEN))), help="in this order, separated by commas")
        command.add_argument("--rows", type=int, default=1500)
        command.add_argument("--tokens", type=int, default=workload.MAX_TOKENS)
        command.add_argument("--timeout", type=float, default=400.0)
        command.add_argument("--kv-gib", type=float, help="of KV cache for each; all engines then start together and measure in turns")
        command.add_argument("--no-graphs", dest="graphs", action="store_false", help="leave vLLM's defaults (a CPU has no graphs)")
        command.add_argument("names", nargs="*")
    commands.add_parser("report").add_argument("folder")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    if arguments.command != "report":
        arguments.out, arguments.home = arguments.out.resolve(), arguments.home.resolve()
        if unknown := set(arguments.names) - ({"generate", "engine", "system"} if arguments.command.startswith("bulk") else TRIALS.keys()):
            sys.exit(f"unknown: {', '.join(sorted(unknown))}")
    commands: dict[str, Any] = {
        "modes": modes,
        "bulk": bulk,
        "bulk-generate": bulk_generate,
        "bulk-engine": bulk_engine,
        "bulk-system": bulk_system,
        "report": report,
    }
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
