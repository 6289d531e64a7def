"""The target and the draft, and how they will be served."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specbatch.compat.checkpoint import Checkpoint
from specbatch.domain import Mode

# As vLLM derives a model's context (transformers_utils/model_arch_config_convertor.py, derive_max_model_len_and_key): the least of these.
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# These leave max_position_embeddings as it is; other scalings multiply it (config/model.py, _get_and_verify_max_len).
SCALED_ALREADY = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
DTYPE_BYTES = {"float64": 8, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Pair:
    target: Checkpoint
    draft: Checkpoint
    mode: Mode
    tensor_parallel: int
    draft_tensor_parallel: int
    max_model_len: int | None
    dtype: str
    target_quantization: str | None
    draft_quantization: str | None

    @property
    def is_head(self) -> bool:
        """An EAGLE head works on the target's hidden states, and has no tokenizer, context or embedding that is its own."""
        return self.mode in (Mode.EAGLE, Mode.EAGLE3) or self.draft.head_mode is not None

    @cached_property
    def context(self) -> int | None:
        """Tokens that the target will be served with."""
        return self.max_model_len or context_of(self.target)

    @cached_property
    def float_bytes(self) -> int:
        """Bytes of the dtype that both are served in: the draft takes the target's, and `auto` halves a float32 checkpoint."""
        return float_bytes_of(self.target, self.dtype)

    @cached_property
    def target_weights_bytes(self) -> int | None:
        return self.target.weights.served_bytes(self.float_bytes) if self.target.weights else None

    @cached_property
    def draft_weights_bytes(self) -> int | None:
        return self.draft.weights.served_bytes(self.float_bytes) if self.draft.weights else None

    @cached_property
    def size_ratio(self) -> float | None:
        """Target's bytes over the draft's. A decoding step reads every weight once, so bytes, not parameters, are its cost."""
        if not self.target_weights_bytes or not self.draft_weights_bytes:
            return None
        return self.target_weights_bytes / self.draft_weights_bytes


def float_bytes_of(target: Checkpoint, dtype: str) -> int:
    declared = str(target.config.get("dtype") or target.config.get("torch_dtype") or "float16")
    return DTYPE_BYTES.get(dtype) or min(2, DTYPE_BYTES.get(declared.removeprefix("torch."), 2))


def context_of(checkpoint: Checkpoint) -> int | None:
    """Tokens of context as vLLM derives them from the config; None where it says nothing."""
    lengths = [length for key in CONTEXT_KEYS if (length := checkpoint.number(key))]
    if not lengths:
        return None
    rope = checkpoint.config.get("rope_parameters") or checkpoint.config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    original = checkpoint.number("original_max_position_embeddings")
    if kind == "longrope" and original:
        return original
    scaled = kind in SCALED_ALREADY or "gemma3" in str(checkpoint.config.get("model_type"))
    return int(min(lengths) * (1.0 if scaled else float(rope.get("factor") or 1.0)))
