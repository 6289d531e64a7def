"""The checks of a target and its draft, in the order in which a person would ask them."""

from __future__ import annotations

from pathlib import Path

from specbatch.compat import architecture, memory, tokens
from specbatch.compat.checkpoint import locate
from specbatch.compat.pair import Pair
from specbatch.compat.report import Report
from specbatch.domain import Mode
from specbatch.errors import UsageError

DRAFTING_MODES = (Mode.DRAFT_MODEL, Mode.EAGLE, Mode.EAGLE3)


def require_drafting(mode: Mode) -> None:
    """Raises UsageError for a mode that drafts with no second model."""
    if mode not in DRAFTING_MODES:
        raise UsageError(f"mode {mode} has no draft to check; give one of {', '.join(DRAFTING_MODES)}", param="mode")


def check(
    target: str | Path,
    draft: str | Path,
    *,
    tensor_parallel: int = 1,
    draft_tensor_parallel: int = 1,
    device_memory_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    mode: Mode = Mode.DRAFT_MODEL,
    dtype: str = "auto",
    quantization: str | None = None,
    draft_quantization: str | None = None,
) -> Report:
    """Compares two folders, or ids in the local Hugging Face cache, from their JSON files and safetensors headers.

    `dtype` is the one that both are served in, `quantization` what the engine is told beyond the configs; memory is for one device.
    Raises UsageError where a model cannot be read at all, or a mode drafts with no second model; all else is a finding.
    """
    require_drafting(mode)
    pair = Pair(
        target=locate(target),
        draft=locate(draft),
        mode=mode,
        tensor_parallel=tensor_parallel,
        draft_tensor_parallel=draft_tensor_parallel,
        max_model_len=max_model_len,
        dtype=dtype,
        target_quantization=quantization,
        draft_quantization=draft_quantization,
    )
    estimate = memory.estimate(pair, device_memory_bytes, gpu_memory_utilization, max_num_seqs)
    findings = (
        architecture.check_family(pair),
        tokens.check_token_ids(pair),
        tokens.check_vocab_size(pair),
        tokens.check_special_tokens(pair),
        tokens.check_chat_template(pair),
        architecture.check_context(pair),
        architecture.check_quantization(pair),
        architecture.check_tensor_parallel(pair),
        architecture.check_size_ratio(pair),
        memory.check_memory(pair, estimate, gpu_memory_utilization, max_num_seqs),
    )
    return Report(
        target=str(target),
        draft=str(draft),
        mode=mode,
        findings=findings,
        memory=estimate,
        use_heterogeneous_vocab=tokens.needs_heterogeneous_vocab(pair),
        parallel_drafting=not pair.is_head and "pard_token" in pair.draft.config,
    )
