"""What a mode takes of the device, and what of it a draft adds: its weights, and its own KV cache beside the target's for every token."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from specbatch.compat.checkpoint import Checkpoint
from specbatch.compat.pair import Pair, context_of, float_bytes_of
from specbatch.compat.report import Finding, Memory, Point

SCARCE_SHARE = 0.5  # a draft that takes over half of the KV cache costs more concurrency than a faster step gives back


def kv_bytes_per_token(checkpoint: Checkpoint, float_bytes: int, tensor_parallel: int) -> int | None:
    """Bytes on each device: 2 (key and value) x layers x KV heads on the device x head dimension x bytes of a number.

    Multi-head latent attention (DeepSeek) keeps one compressed vector a layer, whole on each device. Layers of a sliding window count as
    full ones, so the result is an upper bound; linear-attention layers keep no cache that grows. None where the config is silent.
    """
    kinds = checkpoint.config.get("layer_types")
    layers = checkpoint.number("num_hidden_layers", "n_layer", "num_layers")
    if isinstance(kinds, list):
        layers = sum("linear" not in str(kind) and "mamba" not in str(kind) for kind in kinds)
    if layers is None:
        return None
    if latent := checkpoint.number("kv_lora_rank"):
        return layers * (latent + (checkpoint.number("qk_rope_head_dim") or 0)) * float_bytes
    heads = checkpoint.number("num_attention_heads", "n_head")
    hidden = checkpoint.number("hidden_size", "n_embd", "d_model")
    head_size = checkpoint.number("head_dim") or (hidden // heads if hidden and heads else None)
    kv_heads = checkpoint.number("num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    if head_size is None or kv_heads is None:
        return None
    return 2 * layers * max(1, kv_heads // tensor_parallel) * head_size * float_bytes


class Demand(BaseModel):
    """What a mode takes of each device: the weights of all its models, and their KV cache for one request of the full context.

    Activations and captured graphs come on top. None where a checkpoint does not say.
    """

    weights_bytes: int | None
    kv_bytes_per_request: int | None
    context: int | None


def demand(models: Sequence[tuple[Checkpoint, int]], *, dtype: str = "auto", max_model_len: int | None = None) -> Demand:
    """Of the target and, where the mode has one, its draft; each with the devices that it is split over."""
    target = models[0][0]
    float_bytes, context = float_bytes_of(target, dtype), max_model_len or context_of(target)
    weights = [_split(model.weights.served_bytes(float_bytes), devices) if model.weights else None for model, devices in models]
    caches = [kv_bytes_per_token(model, float_bytes, devices) for model, devices in models]
    return Demand(
        weights_bytes=_sum(weights), kv_bytes_per_request=_sum([each and context and each * context for each in caches]), context=context
    )


def estimate(pair: Pair, device_memory_bytes: int | None, utilization: float, max_num_seqs: int) -> Memory:
    """Bytes on each device, of `utilization` of `device_memory_bytes`. Activations and captured graphs come on top."""
    target_weights = _split(pair.target_weights_bytes, pair.tensor_parallel)
    draft_weights = _split(pair.draft_weights_bytes, pair.draft_tensor_parallel)
    target_kv = kv_bytes_per_token(pair.target, pair.float_bytes, pair.tensor_parallel)
    draft_kv = kv_bytes_per_token(pair.draft, pair.float_bytes, pair.draft_tensor_parallel)
    parts = Memory(
        target_weights_bytes=target_weights,
        draft_weights_bytes=draft_weights,
        target_kv_bytes_per_token=target_kv,
        draft_kv_bytes_per_token=draft_kv,
        device_memory_bytes=device_memory_bytes,
    )
    if target_weights is None or draft_weights is None or not target_kv or draft_kv is None or pair.context is None:
        return parts
    plain, both = None, pair.context
    if device_memory_bytes is not None:
        most = max_num_seqs * pair.context
        room = int(device_memory_bytes * utilization) - target_weights
        plain = max(0, min(most, room // target_kv))
        both = max(0, min(most, (room - draft_weights) // (target_kv + draft_kv)))
    return parts.model_copy(update={"kv_tokens": both, "kv_tokens_plain": plain, "added_bytes": draft_weights + draft_kv * both})


def check_memory(pair: Pair, memory: Memory, utilization: float, max_num_seqs: int) -> Finding:
    """vLLM starts only where one request of the full context fits; below that the target has to run without a draft."""
    target, draft = memory.target_weights_bytes, memory.draft_weights_bytes
    point = Point("memory", target, draft)
    if memory.added_bytes is None or memory.kv_tokens is None or pair.context is None or target is None or draft is None:
        caches = f"KV caches of {memory.target_kv_bytes_per_token} and {memory.draft_kv_bytes_per_token} bytes a token"
        seen = f"weights of {target} and {draft} bytes, {caches}, a context of {pair.context} tokens"
        return point.warning(f"The files do not say enough to know what the draft adds ({seen}): complete config.json, use safetensors.")
    added = f"The draft adds {memory.added_gb} GB ({memory.added_percent}%) to each device with a KV cache for {memory.kv_tokens} tokens"
    if memory.device_memory_bytes is None or memory.kv_tokens_plain is None:
        return point.ok(f"{added}.")
    sizes = f"weights of {target / 1e9:.3g} and {draft / 1e9:.3g} GB in {utilization:.0%} of {memory.device_memory_bytes / 1e9:.3g} GB"
    if memory.kv_tokens_plain < pair.context:
        what = f"The target alone leaves KV cache for {memory.kv_tokens_plain} of the {pair.context} tokens of one request ({sizes})"
        return point.failure(f"{what}: use more devices or a quantized target, or lower max_model_len.")
    if memory.kv_tokens < pair.context:
        what = f"Target and draft leave KV cache for {memory.kv_tokens} of the {pair.context} tokens of one request ({sizes})"
        return point.failure(f"{what}: use mode ngram, a smaller draft, a lower max_model_len or a higher gpu_memory_utilization.")
    room = f"{memory.kv_tokens_plain} without it; {memory.kv_tokens // max_num_seqs} for each of {max_num_seqs} requests; {sizes}"
    if memory.kv_tokens < SCARCE_SHARE * memory.kv_tokens_plain:
        return point.warning(f"{added} ({room}): fewer requests run at once. Take a smaller draft, or use mode ngram.")
    return point.ok(f"{added} ({room}).")


def _sum(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _split(total: int | None, devices: int) -> int | None:
    return None if total is None else -(-total // devices)
