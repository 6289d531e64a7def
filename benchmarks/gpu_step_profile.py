"""Where a step's time goes, mode by mode: scheduling, target, sampling, drafting, and the gaps between them.

    python benchmarks/gpu_step_profile.py --model FOLDER --draft FOLDER --eagle FOLDER --out DIR plain ngram-4 draft-4 eagle-4

The names are those of gpu_modes.py. Each engine runs in a process of its own, in turns (gpu_turns.py); vLLM's torch profiler traces some
decode steps of `--load` greedy requests. Its scopes are set here, by a worker extension, around methods of vLLM's scheduler and model
runners (0.32 and 0.33, older and newer runner). Kernels of a CUDA graph count for the scope that launched the graph.

Writes DIR/profile-NAME.json, milliseconds a step: `scopes` (`cpu`: in the scope and in none inside it; `gpu`: kernels launched in it),
`step` (from one to the next), `gpu_busy`, `gpu_idle` (the step without it), and `kernels`, the longest by name.
Profiling slows the CPU's side down: `unprofiled_step` is the same engine's without it.
"""

from __future__ import annotations

import argparse
import bisect
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gpu_turns
from gpu_modes import CAPTURED, TRIALS, write

from specbatch import workload
from specbatch.domain import TaskType
from specbatch.settings import Settings
from worker.engine.arguments import environment, speculative_config

SKIPPED, TRACED = 24, 24  # steps: prompts are read and the first answers drafted before the trace
SHOWN = 12
SCOPES = {  # of vLLM's classes, the methods; a release or runner without one is left alone
    "vllm.v1.core.sched.scheduler:Scheduler": {"schedule": "schedule", "update_from_output": "update"},
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {
        "execute_model": "prepare",
        "_model_forward": "target",
        "sample_tokens": "after",
        "_sample": "sample",
        "propose_draft_token_ids": "draft",
        "_bookkeeping_sync": "bookkeeping",
    },
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": {
        "execute_model": "target",
        "prepare_inputs": "prepare",
        "prepare_attn": "prepare",
        "sample_tokens": "after",
        "sample": "sample",
        "postprocess_sampled": "bookkeeping",
    },
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator": {"propose": "draft"},
    "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator": {"propose": "draft"},
    "vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator": {"propose": "draft"},
}
MARK = "specbatch: "


class Scopes:
    """vLLM's worker takes this class's methods for its own."""

    def mark_scopes(self) -> list[str]:
        """Wrap the methods of SCOPES; the scheduler's run in the worker's process, where there is one device. Says which were found."""
        from torch.profiler import record_function

        found = []
        for place, methods in SCOPES.items():
            module, name = place.split(":")
            try:
                owner = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                continue
            for method, scope in methods.items():
                if method in vars(owner):
                    setattr(owner, method, _scoped(getattr(owner, method), MARK + scope, record_function))
                    found.append(f"{name}.{method}")
        return found


def _scoped(method: Any, name: str, record_function: Any) -> Any:
    def scoped(*given: Any, **named: Any) -> Any:
        with record_function(name):
            return method(*given, **named)

    return scoped


def profile(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    mode, k, changes = TRIALS[name]
    settings = Settings(
        model=arguments.model,
        draft=arguments.draft,
        eagle=arguments.eagle,
        ngram_tokens=k or 4,
        draft_tokens=k or 4,
        data_dir=arguments.home,
    )
    os.environ.update(environment(settings, mode, arguments.model, Path("/dev/null")) | changes)
    os.environ.pop("VLLM_LOGGING_CONFIG_PATH")
    from vllm import LLM

    traces = Path(tempfile.mkdtemp(prefix="trace"))
    tracing: dict[str, Any] = {
        "ignore_frontend": True,
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
    }
    device: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": list(CAPTURED)}, "gpu_memory_utilization": 0.2}
    if not arguments.graphs:
        device = {"enforce_eager": True}
    with gpu_turns.starting() as wait:
        llm = LLM(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=arguments.context,
            max_num_seqs=256,
            kv_cache_memory_bytes=int(arguments.kv_gib * 1024**3),
            speculative_config=speculative_config(settings, mode),
            profiler_config=tracing,
            worker_extension_cls="gpu_step_profile.Scopes",
            disable_log_stats=False,
            **device,
        )
        marked = llm.collective_rpc("mark_scopes")[0]
        end = wait()
        unprofiled = _trace(llm, arguments, k)
        end()
    (file,) = traces.glob("**/*.json")
    measured = read(json.loads(file.read_text())["traceEvents"])
    shutil.rmtree(traces)
    return {"name": name, "mode": mode, "k": k, "load": arguments.load, "task": arguments.task, "scopes_found": marked} | (
        measured | {"unprofiled_step": round(1000 * unprofiled, 4)}
    )


def _trace(llm: Any, arguments: argparse.Namespace, k: int) -> float:
    """Trace some steps; returns the seconds that those after them take each, not traced: the first ones compile kernels."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=(SKIPPED + 2 * TRACED) * (k + 2), ignore_eos=True)
    asked = [body["messages"] for body in itertools.islice(workload.requests(arguments.task), arguments.load)]
    for number, messages in enumerate(asked):
        llm.llm_engine.add_request(str(number), _prompt(llm, messages), parameters)
    _step(llm, SKIPPED)
    llm.start_profile()
    _step(llm, TRACED)
    llm.stop_profile()
    began = time.monotonic()
    return _step(llm, TRACED) and (time.monotonic() - began) / TRACED


def _step(llm: Any, steps: int) -> bool:
    """Whether there was work for all of them: a step without any would wait for ever."""
    for _ in range(steps):
        if not llm.llm_engine.has_unfinished_requests():
            return False
        llm.llm_engine.step()
    return True


def _prompt(llm: Any, messages: list[dict[str, str]]) -> Any:
    ids = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return {"prompt_token_ids": ids}


def read(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A chrome trace of torch's profiler, in milliseconds a step; its own times are microseconds. Whole steps only."""
    scopes = sorted((event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)), key=_start)
    names = {_scope(event) for event in scopes}
    once = "schedule" if "schedule" in names else "after"  # a worker of its own, as on a CPU, has no scheduler
    steps = [_start(event) for event in scopes if _scope(event) == once]
    if len(steps) < 2:
        raise SystemExit("the trace holds no two steps")
    first, last, count = steps[0], steps[-1], len(steps) - 1
    cpu: Counter[str] = Counter()
    gpu: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for number, event in enumerate(scopes):
        if first <= _start(event) < last:
            cpu[_scope(event)] += event["dur"]
            outer = _open(scopes[:number], event)
            if outer is not None:
                cpu[_scope(outer)] -= event["dur"]
    launches = {event["args"]["correlation"]: event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")}
    spans = []
    for event in events:
        launch = launches.get(event["args"].get("correlation")) if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") else None
        if launch is not None and first <= _start(launch) < last:
            outer = _open(scopes[: bisect.bisect_right(scopes, _start(launch), key=_start)], launch)
            gpu["outside" if outer is None else _scope(outer)] += event["dur"]
            kernels[event["name"][:80]] += event["dur"]
            spans.append((_start(event), _start(event) + event["dur"]))
    busy = _union(spans)

    def each(total: float) -> float:
        return round(total / count / 1000, 4)

    return {
        "steps": count,
        "step": each(last - first),
        "gpu_busy": each(busy) if spans else None,
        "gpu_idle": each(last - first - busy) if spans else None,
        "scopes": {name: {"cpu": each(cpu[name]), "gpu": each(gpu[name])} for name in sorted(cpu | gpu)},
        "kernels": {name: each(total) for name, total in kernels.most_common(SHOWN)},
    }


def _start(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _scope(event: dict[str, Any]) -> str:
    return str(event["name"]).removeprefix(MARK)


def _open(scopes: list[dict[str, Any]], inner: dict[str, Any]) -> dict[str, Any] | None:
    """The innermost of the scopes, sorted by start, that this event of the same thread lies in."""
    around = (scope for scope in reversed(scopes) if scope["tid"] == inner["tid"] and _start(scope) + scope["dur"] >= _start(inner))
    return next(around, None)


def _union(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--eagle")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--task", type=TaskType, default=TaskType.CHAT)
    parser.add_argument("--load", type=int, default=1, help="requests at once")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--kv-gib", type=float, default=8.0, help="of KV cache for each: all engines are on the device at once")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="leave vLLM's defaults (a CPU has no graphs)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="+", choices=sorted(TRIALS))
    arguments = parser.parse_args()
    if arguments.here:
        write(arguments.out / f"profile-{arguments.names[0]}-{arguments.load}.json", profile(arguments, arguments.names[0]))
        return
    given = list(itertools.takewhile(lambda word: word not in TRIALS, sys.argv[1:]))
    paths = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
    arguments.home.mkdir(parents=True, exist_ok=True)
    turns = {"PYTHONPATH": paths, gpu_turns.FILE: str(arguments.home / "turn")}
    children = {}
    for name in arguments.names:
        environment = os.environ | turns | {"VLLM_CACHE_ROOT": str(arguments.home / name / "cache")}
        children[name] = subprocess.Popen([sys.executable, __file__, *given, "--here", name], env=environment)
    for name, child in children.items():
        file = arguments.out / f"profile-{name}-{arguments.load}.json"
        print(f"{name}: {'FAILED' if child.wait() else json.dumps(json.loads(file.read_text()))}", flush=True)


if __name__ == "__main__":
    main()
