"""Settings in vLLM's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbatch.domain import Mode
from specbatch.errors import EngineStartError, UsageError
from specbatch.settings import Settings, load
from worker.engine.arguments import arguments, cpu_dtype, environment, speculative_config
from worker.engine.logs import logging_config


def settings(**fields: object) -> Settings:
    return Settings(**({"model": "org/target"} | fields))  # type: ignore[arg-type]


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("mode", "fields", "expected"),
    [
        (Mode.PLAIN, {}, None),
        (
            Mode.NGRAM,
            {"ngram_tokens": 6, "ngram_lookup_max": 4, "ngram_lookup_min": 3},
            {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 3},
        ),
        (
            Mode.SUFFIX,
            {
                "suffix_tokens": 12,
                "suffix_tree_depth": 32,
                "suffix_cached_requests": 100,
                "suffix_factor": 2,
                "suffix_min_probability": 0.2,
            },
            {
                "method": "suffix",
                "num_speculative_tokens": 12,
                "suffix_decoding_max_tree_depth": 32,
                "suffix_decoding_max_cached_requests": 100,
                "suffix_decoding_max_spec_factor": 2.0,
                "suffix_decoding_min_token_prob": 0.2,
            },
        ),
        (
            Mode.DRAFT_MODEL,
            {
                "draft": "org/draft",
                "draft_tokens": 3,
                "draft_tensor_parallel_size": 2,
                "draft_quantization": "fp8",
                "draft_sample_method": "probabilistic",
                "max_model_len": 2048,
            },
            {
                "method": "draft_model",
                "model": "org/draft",
                "num_speculative_tokens": 3,
                "draft_tensor_parallel_size": 2,
                "quantization": "fp8",
                "draft_sample_method": "probabilistic",
                "max_model_len": 2048,
            },
        ),
        (
            Mode.EAGLE3,
            {"eagle": "org/head"},
            {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 1},
        ),
    ],
)
def test_speculative_config(mode: Mode, fields: dict[str, object], expected: dict[str, Any] | None) -> None:
    assert speculative_config(settings(**fields), mode) == expected


@pytest.mark.parametrize(("mode", "variable"), [(Mode.DRAFT_MODEL, "SPECBATCH_DRAFT"), (Mode.EAGLE, "SPECBATCH_EAGLE")])
def test_a_mode_without_its_draft_says_what_to_set(mode: Mode, variable: str) -> None:
    with pytest.raises(EngineStartError, match=variable):
        speculative_config(settings(), mode)


def test_a_draft_made_for_it_drafts_in_one_pass() -> None:
    config = speculative_config(settings(draft="org/draft"), Mode.DRAFT_MODEL, parallel_drafting=True)
    assert config is not None
    assert config["parallel_drafting"] is True
    words = arguments(settings(draft="org/draft"), Mode.DRAFT_MODEL, "org/target", cpu=False, parallel_drafting=True)
    assert json.loads(after(words, "--speculative-config")) == config
    assert "parallel_drafting" not in (speculative_config(settings(draft="org/draft"), Mode.DRAFT_MODEL) or {})


def test_k_by_batch_size_reaches_every_mode_but_suffix() -> None:
    fields = {"tokens_by_batch_size": "1-8:5,9-512:0", "draft": "org/draft", "eagle": "org/head"}
    for mode in Mode:
        config = speculative_config(settings(**fields), mode) or {}
        expected = None if mode in (Mode.PLAIN, Mode.SUFFIX) else [[1, 8, 5], [9, 512, 0]]
        assert config.get("num_speculative_tokens_per_batch_size") == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("2-8:5", "begin at 1"),
        ("8-1:5", "8-1 is out of order"),
        ("1-8:5,8-16:2", "8-16 is out of order"),
        ("1-8:5,4-6:2", "4-6 is out of order"),
        ("1-8:17", "K of 1-8 is 17: use 0 to 16"),
        ("few:5", "write it as first-last:K"),
    ],
)
def test_a_bad_schedule_is_refused_before_any_engine(value: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(tokens_by_batch_size=value)


@pytest.mark.parametrize("name", ["draft_tokens", "ngram_tokens", "suffix_tokens"])
@pytest.mark.parametrize("k", [0, 17])
def test_k_is_one_to_sixteen(name: str, k: int) -> None:
    with pytest.raises(UsageError, match=name):
        load(**{name: k})


def test_arguments_on_a_gpu() -> None:
    words = arguments(
        settings(gpu_memory_utilization=0.8, tensor_parallel_size=4, served_names="gpt-4o"), Mode.NGRAM, "org/target", cpu=False
    )
    assert after(words, "--model") == "org/target"
    assert after(words, "--gpu-memory-utilization") == "0.8"
    assert after(words, "--tensor-parallel-size") == "4"
    assert json.loads(after(words, "--speculative-config"))["method"] == "ngram"
    names = words[words.index("--served-model-name") + 1 :]
    assert names == ["org/target", "target", "gpt-4o", "default"]
    assert {"--enforce-eager", "--kv-cache-memory-bytes", "--max-num-seqs"}.isdisjoint(words)


def test_arguments_on_a_cpu() -> None:
    words = arguments(settings(cpu_kv_cache_gib=0.5), Mode.PLAIN, "org/target", cpu=True)
    assert after(words, "--kv-cache-memory-bytes") == str(512 * 1024**2)
    assert "--enforce-eager" in words
    assert {"--gpu-memory-utilization", "--speculative-config", "--per-request-spec-decode-metrics"}.isdisjoint(words)
    assert "--enforce-eager" not in arguments(settings(enforce_eager=False), Mode.PLAIN, "org/target", cpu=True)


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", "auto"),
        ("flags\t\t: fpu avx2\n", "float32"),
        ("Features\t: fp asimd bf16\n", "auto"),
        ("", "float32"),
    ],
)
def test_float32_where_bfloat16_would_be_emulated(tmp_path: Path, cpuinfo: str, dtype: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    assert cpu_dtype("auto", file) == dtype
    assert cpu_dtype("float16", file) == "float16"
    assert cpu_dtype("auto", tmp_path / "absent") == "float32"


def test_the_hub_is_left_alone_where_every_model_is_a_folder(tmp_path: Path) -> None:
    log = tmp_path / "engine.json"
    assert environment(settings(), Mode.PLAIN, str(tmp_path), log)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment(settings(), Mode.PLAIN, "org/target", log)
    assert "HF_HUB_OFFLINE" not in environment(settings(draft="org/draft"), Mode.PLAIN, str(tmp_path), log)


def test_vllm_speaks_on_the_terminal_at_debug_alone(tmp_path: Path) -> None:
    assert list(logging_config(settings(), tmp_path / "log")["handlers"]) == ["file"]
    assert list(logging_config(settings(log_level="debug"), tmp_path / "log")["handlers"]) == ["file", "terminal"]
