"""Loaded inside vLLM's worker process on a CPU, as its worker extension: what vLLM 0.32 has wrong about sampled speculation there."""

from __future__ import annotations

from typing import Any

from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.sample.ops import topk_topp_sampler

apply_top_k = topk_topp_sampler.apply_top_k_only


def expand(output_ptr: Any, input_ptr: Any, cu_num_tokens_ptr: Any, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int) -> None:
    """Repeat each request's value for each of its drafted tokens: [requests] -> [tokens], `cu_num_tokens_ptr` being the running totals.

    vLLM's own version for CPUs writes into a copy, so that sampled speculation reads temperature, top-k and top-p from memory that nobody
    wrote (vllm issue 55005). Named by the kernel's parameters, as vLLM passes them.
    """
    counts = cu_num_tokens_ptr.diff(prepend=cu_num_tokens_ptr.new_zeros(1))
    values = input_ptr.masked_fill(input_ptr == replace_from, replace_to)
    output_ptr.copy_(values.repeat_interleave(counts))


def apply_top_k_to_any(logits: Any, k: Any) -> Any:
    """[tokens, vocabulary] masked beyond each token's top k. vLLM's own fails, and its engine dies, in a step where nothing was drafted."""
    return apply_top_k(logits, k) if len(logits) else logits


register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
topk_topp_sampler.apply_top_k_only = apply_top_k_to_any


class CpuKernels:
    """Nothing of its own: vLLM imports this module to find it, after it has registered its own kernels."""
