"""Family, context, quantization, tensor parallelism and size: what the configs say about running the two side by side."""

from __future__ import annotations

import re

from specbatch.compat.checkpoint import Checkpoint
from specbatch.compat.pair import Pair, context_of
from specbatch.compat.report import Finding, Point
from specbatch.domain import Mode

VARIANT = re.compile(r"(_(moe|text|vl|mtp))+$")  # a dense draft for a mixture of experts is of the same family
TINY_SHARE = 4  # a 16-bit draft beside a quantized target counts as tiny up to a quarter of the target's bytes
GAINFUL_RATIO = 3  # below it a draft step costs so much of a target's that even full acceptance gains little


def check_family(pair: Pair) -> Finding:
    if pair.mode is not Mode.DRAFT_MODEL:
        return _check_head(pair)
    target, draft = family(pair.target), family(pair.draft)
    point = Point("family", target, draft)
    if head := pair.draft.head_mode:
        return point.failure(f"The target is a {target}, and the draft is a {head} head ({_architecture(pair.draft)}): use mode {head}.")
    if target != draft:
        return point.failure(f"The target is a {target}, the draft a {draft}. Use a smaller model of the target's family, or mode ngram.")
    return point.ok(f"Both are of the family {target}.")


def family(checkpoint: Checkpoint) -> str:
    return VARIANT.sub("", str(checkpoint.config.get("model_type") or "unknown"))


def _architecture(checkpoint: Checkpoint) -> str:
    return ", ".join(checkpoint.config["architectures"]) or "no architecture"


def _check_head(pair: Pair) -> Finding:
    target, head, mode = _architecture(pair.target), _architecture(pair.draft), pair.draft.head_mode
    point = Point("family", target, head)
    if mode is None:
        advice = "Give the head that was trained for this target, or use mode draft_model for a whole model"
        return point.failure(f"Mode {pair.mode} needs an {pair.mode} head for {target}, and {head} is none. {advice}.")
    if mode is not pair.mode:
        return point.failure(f"The head for {target} ({head}) is of mode {mode}, not {pair.mode}: use mode {mode}.")
    width = pair.target.number("hidden_size", "n_embd", "d_model")
    reads = pair.draft.number("target_hidden_size", "hidden_size")
    if width != reads:
        message = f"The target's hidden states are {width} wide, the head reads {reads}: use the head that was trained for this target."
        return Point("family", width, reads).failure(message)
    return point.ok(f"An {mode} head for hidden states {width} wide.")


def check_context(pair: Pair) -> Finding:
    """vLLM lets a head's positions follow the target's; a whole draft that is shorter lowers the engine's context, or crashes it."""
    target, draft = pair.context, context_of(pair.draft)
    point = Point("context", target, draft)
    if pair.is_head:
        return point.ok("A head takes over the target's context.")
    if target is None or draft is None:
        return point.warning(f"config.json gives contexts of {target} and {draft} tokens: set max_model_len to what both hold.")
    if draft >= target:
        return point.ok(f"The draft's {draft} tokens hold the target's {target}.")
    return point.failure(
        f"The target is served with {target} tokens of context, the draft holds {draft}. Set max_model_len to {draft} or less, "
        f"or use a draft of at least {target}, or mode ngram."
    )


def check_quantization(pair: Pair) -> Finding:
    """The same method, or a draft so small that its 16-bit weights cost little."""
    target = pair.target_quantization or pair.target.quantization
    draft = pair.draft_quantization or pair.draft.quantization
    point = Point("quantization", target, draft)
    if target == draft:
        return point.ok(f"Both are served in {target or 'floating point'}.")
    if draft is None and pair.is_head:
        return point.ok(f"A head stays in 16 bit beside a {target} target.")
    if draft is None and pair.size_ratio and pair.size_ratio >= TINY_SHARE:
        return point.ok(f"A small 16-bit draft beside a {target} target, 1/{pair.size_ratio:.0f} of its bytes.")
    advice = "use a 16-bit draft"
    if target:
        advice = f"quantize the draft with {target} too, or take one under 1/{TINY_SHARE} of the target's bytes"
    return point.failure(f"The target is served in {target or '16 bit'}, the draft in {draft or '16 bit'}: {advice}, or use mode ngram.")


def check_tensor_parallel(pair: Pair) -> Finding:
    """vLLM compiles a standalone draft on each of the target's ranks, so it refuses any other size than the target's
    (v1/spec_decode/draft_model.py, _raise_if_draft_tp_mismatch); a head may also run whole on each device."""
    target, draft = pair.tensor_parallel, pair.draft_tensor_parallel
    point = Point("tensor_parallel", target, draft)
    split = f"The target is split over {target} devices, the draft over {draft}"
    if draft != target and not (pair.is_head and draft == 1):
        return point.failure(f"{split}: set draft_tensor_parallel_size to {target}{' or 1' if pair.is_head else ''}.")
    for role, checkpoint, size in (("target", pair.target, target), ("draft", pair.draft, draft)):
        heads = checkpoint.number("num_attention_heads", "n_head")
        if heads and heads % size:
            fitting = ", ".join(str(fit) for fit in range(1, heads + 1) if heads % fit == 0)
            return point.failure(f"{split}, and the {role} has {heads} attention heads: split over one of {fitting}, or use mode ngram.")
    return point.ok("The attention heads of both divide by their devices.")


def check_size_ratio(pair: Pair) -> Finding:
    target, draft, ratio = pair.target_weights_bytes, pair.draft_weights_bytes, pair.size_ratio
    point = Point("size_ratio", target, draft)
    if ratio is None or target is None or draft is None:
        silent = " and ".join(folder.name for folder in (pair.target, pair.draft) if not folder.weights)
        return point.warning(
            f"No safetensors in {silent} (weights of {target} and {draft} bytes are seen): convert it, so that sizes are known."
        )
    sizes = f"The target's weights take {target / 1e9:.3g} GB, the draft's {draft / 1e9:.3g} GB"
    if ratio < 1:
        return point.warning(f"{sizes}: a draft that is larger than its target only slows it down. Swap them, or take a smaller draft.")
    if ratio < GAINFUL_RATIO:
        return point.warning(f"{sizes}, a ratio of {ratio:.1f}: drafting costs most of what it saves. Take a draft of a tenth or less.")
    return point.ok(f"{sizes}, a ratio of {ratio:.1f}.")
