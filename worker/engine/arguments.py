"""Settings, in vLLM's words: its command line and its environment. Pure, and the one place where vLLM's releases may differ in names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from specbatch.domain import Mode
from specbatch.errors import EngineStartError
from specbatch.pairing import draft_tensor_parallel
from specbatch.serving import served_names
from specbatch.settings import Settings

GIB = 1024**3
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # the one variable that depends on the mode
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "i8mm"})  # /proc/cpuinfo, x86 and arm64


def speculative_config(
    settings: Settings, mode: Mode, *, padded_vocabulary: bool = False, parallel_drafting: bool = False
) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for a mode; None for plain decoding. Raises EngineStartError where a draft or a head is missing.

    K by batch size reaches every mode but suffix, whose drafts vary in length by themselves. `padded_vocabulary`: target and draft have
    the same tokens, and embeddings padded to different sizes, as in the Qwen2.5 family. `parallel_drafting`: the draft drafts all its
    tokens in one pass.
    """
    match mode:
        case Mode.PLAIN:
            return None
        case Mode.NGRAM:
            config: dict[str, Any] = {
                "method": "ngram",
                "num_speculative_tokens": settings.ngram_tokens,
                "prompt_lookup_max": settings.ngram_lookup_max,
                "prompt_lookup_min": settings.ngram_lookup_min,
            }
        case Mode.SUFFIX:
            return {
                "method": "suffix",
                "num_speculative_tokens": settings.suffix_tokens,
                "suffix_decoding_max_tree_depth": settings.suffix_tree_depth,
                "suffix_decoding_max_cached_requests": settings.suffix_cached_requests,
                "suffix_decoding_max_spec_factor": settings.suffix_factor,
                "suffix_decoding_min_token_prob": settings.suffix_min_probability,
            }
        case Mode.DRAFT_MODEL:
            config = {"method": "draft_model", "model": _named(settings.draft, "draft", mode)} | _draft(settings)
            config["draft_sample_method"] = settings.draft_sample_method
            if padded_vocabulary:
                config["use_heterogeneous_vocab"] = True
            if parallel_drafting:
                config["parallel_drafting"] = True
            if settings.draft_quantization is not None:
                config["quantization"] = settings.draft_quantization
            if settings.max_model_len is not None:
                config["max_model_len"] = settings.max_model_len
        case Mode.EAGLE | Mode.EAGLE3:
            config = {"method": mode.value, "model": _named(settings.eagle, "eagle", mode)} | _draft(settings)
    if settings.tokens_by_batch_size:
        config["num_speculative_tokens_per_batch_size"] = [list(step) for step in settings.tokens_by_batch_size]
    return config


def _draft(settings: Settings) -> dict[str, Any]:
    return {"num_speculative_tokens": settings.draft_tokens, "draft_tensor_parallel_size": draft_tensor_parallel(settings)}


def _named(value: str | None, name: str, mode: Mode) -> str:
    if value is None:
        raise EngineStartError(f"mode {mode} needs a model to draft with: set SPECBATCH_{name.upper()} (--{name}), or use mode ngram")
    return value


def arguments(
    settings: Settings, mode: Mode, model: str, *, cpu: bool, padded_vocabulary: bool = False, parallel_drafting: bool = False
) -> list[str]:
    """The command line of `vllm serve` for these settings; `model` is the resolved id or folder."""
    flags: dict[str, object] = {
        "--model": model,
        "--dtype": cpu_dtype(settings.dtype) if cpu else settings.dtype,
        "--tensor-parallel-size": settings.tensor_parallel_size,
        "--gpu-memory-utilization": None if cpu else settings.gpu_memory_utilization,
        "--kv-cache-memory-bytes": int(settings.cpu_kv_cache_gib * GIB) if cpu else None,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--quantization": settings.quantization,
        "--logprobs-mode": settings.logprobs_mode,
        "--worker-extension-cls": "worker.engine.cpu_kernels.CpuKernels" if cpu else None,
        "--tool-call-parser": settings.tool_call_parser,
        "--reasoning-parser": settings.reasoning_parser,
    }
    config = speculative_config(settings, mode, padded_vocabulary=padded_vocabulary, parallel_drafting=parallel_drafting)
    if config is not None:
        flags |= {"--speculative-config": json.dumps(config), "--per-request-spec-decode-metrics": "summary"}
    switches = {
        "--enforce-eager": cpu if settings.enforce_eager is None else settings.enforce_eager,
        "--trust-remote-code": settings.trust_remote_code,
        # A prompt cut in two rewinds its request's generator, which torch's CPU generator cannot: one row with a seed would end the engine.
        "--no-enable-chunked-prefill": cpu,
        "--enable-auto-tool-choice": settings.tool_call_parser is not None,
        "--enable-per-request-metrics": True,
        "--enable-prompt-tokens-details": True,
        "--disable-log-stats": True,  # the engine's own stat logger counts; vLLM's would write to one registry for every engine here
        "--no-use-tqdm-on-load": True,
    }
    given = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
    named = ["--served-model-name", *served_names(settings)]
    return [*given, *(switch for switch, on in switches.items() if on), *named, *shlex.split(settings.engine_args)]


def cpu_dtype(asked: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """`auto` is float32 on a CPU without bfloat16 units, where bfloat16 is emulated, several times slower."""
    if asked != "auto":
        return asked
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "float32"
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.partition(":")[2].split()}
    return "auto" if flags & BF16_FLAGS else "float32"


def environment(settings: Settings, mode: Mode, model: str, log: Path) -> dict[str, str]:
    """What vLLM reads from the environment, for the caller to set where the user has not. `log` is a logging configuration in JSON."""
    wanted = {
        "VLLM_LOGGING_CONFIG_PATH": str(log),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads and a running loop may hang
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",  # of the processes that vLLM starts
    }
    if mode is Mode.DRAFT_MODEL:
        # vLLM 0.33's newer runner runs a standalone draft without CUDA graphs: 5 ms a draft step on an H200, against 2.7 in the older one.
        wanted[RUNNER] = "0"
    if all(Path(name).is_dir() for name in (model, settings.draft, settings.eagle) if name is not None):
        wanted["HF_HUB_OFFLINE"] = "1"
    return wanted
