"""Loaded inside vLLM's worker process on a CPU, as its worker extension: a kernel that vLLM 0.32 has wrong there."""

from __future__ import annotations

from typing import Any

from vllm.triton_utils.dispatcher import register_kernels


def expand(output_ptr: Any, input_ptr: Any, cu_num_tokens_ptr: Any, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int) -> None:
    """Repeat each request's value for each of its drafted tokens: [requests] -> [tokens], `cu_num_tokens_ptr` being the running totals.

    vLLM's own version for CPUs writes into a copy, so that sampled speculation reads temperature, top-k and top-p from memory that nobody
    wrote (vllm issue 55005). Named by the kernel's parameters, as vLLM passes them.
    """
    counts = cu_num_tokens_ptr.diff(prepend=cu_num_tokens_ptr.new_zeros(1))
    values = input_ptr.masked_fill(input_ptr == replace_from, replace_to)
    output_ptr.copy_(values.repeat_interleave(counts))


register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})


class CpuKernels:
    """Nothing of its own: vLLM imports this module to find it, after it has registered its own kernels."""
