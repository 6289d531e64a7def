"""Tiny models on disk: a random Llama that vLLM loads on a CPU, and copies of it that each differ in one thing.

The plain functions write a folder and return it; the fixtures make each folder once a session. Load them with
`pytest_plugins = ["tests.model_fixtures"]`. torch and transformers are imported inside the functions, so that collecting tests stays cheap.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VOCAB_SIZE = 512
CONTEXT = 512
HIDDEN = 64
HEADS = 2  # of 32 dimensions: the smallest head that vLLM's CPU attention takes
KV_HEADS = 1
LAYERS = 2
UNUSED_TOKEN = "<|unused|>"
SPECIAL_TOKENS = ("<|end|>", "<|begin|>", UNUSED_TOKEN, "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOPING = 0.003
NOISE = 0.05  # of each weight's deviation: about half of the greedy drafts are then accepted (tests/unit/test_compat.py holds the range)

CORPUS = """
A batch is a file of requests. Each request names a model, holds messages, and is answered by one line of the output, in any order.
The worker reads a shard, drafts a few tokens cheaply, and lets the target model check them all in a single step; what agrees is kept.
def average(values: list[float]) -> float:
    if not values:
        raise ValueError("no values were given")
    return sum(values) / len(values)
class Counter:
    def __init__(self) -> None:
        self.total = 0
    def add(self, amount: int) -> None:
        self.total += amount
{"name": "Ana", "age": 31, "city": "Lisbon", "tags": ["reader", "swimmer"], "active": true, "address": {"street": "Rua Nova", "number": 7}}
{"name": "Bruno", "age": 27, "city": "Porto", "tags": ["cook"], "active": false, "address": {"street": "Avenida Central", "number": 112}}
Please summarise the following article in two sentences, extract every date and every price, and return them as JSON without further words.
Once upon a time a lighthouse keeper found a bottle with a letter inside; she answered it, and waited for the tide to carry her words away.
Por favor, resuma o texto abaixo e traduza a resposta para o inglês. Escribe una función que ordene una lista de números enteros.
The weather was cold yesterday, but today it is warm and bright. Where would you like to go? I would go to the market, then the museum.
"""


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of exactly VOCAB_SIZE entries with a chat template; entry UNUSED_TOKEN occurs in no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|begin|>", pad_token="<|end|>", model_max_length=CONTEXT
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder


def write_llama(folder: Path, *, seed: int = 0, attention: float = 1.0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """A random float32 Llama of 0.14 million parameters with its tokenizer; `changes` go to LlamaConfig.

    The weights deviate by 0.2, not by the usual 0.02: the greedy token then leads clearly, so that a little noise rejects some drafts only.
    `attention` scales what attention adds: at 1 greedy text does not repeat itself in 160 tokens, at LOOPING it soon repeats one token.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder)
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape | changes)).to(torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(attention)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def copy_with_noise(source: Path, folder: Path, *, noise: float = NOISE, seed: int = 1) -> Path:
    """A draft that is sometimes rejected: every weight moves by `noise` times its tensor's deviation."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(source / "model.safetensors")
    moved = {
        name: tensor + noise * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def copy_with_renamed_token(source: Path, folder: Path, *, token: str = UNUSED_TOKEN, renamed: str = "<|tool|>") -> Path:
    """The same model whose vocabulary differs in one entry, at the same size: id `token` reads `renamed`."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[renamed] = vocabulary.pop(token)
    for added in tokenizer["added_tokens"]:
        added["content"] = renamed if added["content"] == token else added["content"]
    file.write_text(json.dumps(tokenizer))
    return folder


def copy_with_config(source: Path, folder: Path, file: str = "config.json", **changes: Any) -> Path:
    """The same files, with `changes` to one JSON file; a value of None takes the key away."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def write_qwen2(folder: Path, *, seed: int = 0) -> Path:
    """Another family behind the same tokenizer: a Qwen2 of the same shape."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    write_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        eos_token_id=0,
        bos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def write_bert(folder: Path, *, seed: int = 0) -> Path:
    """An embedding model behind the same tokenizer: a random BERT of HIDDEN dimensions, which vLLM pools by itself (its first token)."""
    import torch
    from transformers import BertConfig, BertModel

    write_tokenizer(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
    )
    BertModel(config).to(torch.float32).save_pretrained(folder)
    return folder


def write_eagle(target: Path, folder: Path, *, generation: int = 1, seed: int = 2) -> Path:
    """A random EAGLE head (`generation` 1, or 3 for EAGLE3) for the Llama in `target`, as heads are published: no tokenizer, no embedding.

    `fc` joins an embedding and a hidden state (EAGLE), or the hidden states of both layers (EAGLE3, whose own layer takes twice the width).
    """
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    hidden, layer = config["hidden_size"], "layers.0" if generation == 1 else "midlayer"
    first = {name.replace("model.layers.0", layer): tensor for name, tensor in weights.items() if name.startswith("model.layers.0.")}
    generator = torch.Generator().manual_seed(seed)
    if generation == 1:
        del first[f"{layer}.input_layernorm.weight"]
        changes: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    else:
        for name in (f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"):
            first[name] = 0.2 * torch.randn(first[name].shape[0], 2 * hidden, generator=generator)
        first[f"{layer}.hidden_norm.weight"] = torch.ones(hidden)
        first |= {"norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}
        taken = {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True}
        changes = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["vocab_size"], "eagle_config": taken} | taken
    first["fc.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    save_file(first, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1} | changes))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Path]], Path]:
    """Makes a named folder once a session: `tiny_model("wide", lambda folder: write_llama(folder, hidden_size=128))`."""
    home = tmp_path_factory.mktemp("models")

    def make(name: str, write: Callable[[Path], Path]) -> Path:
        folder = home / name
        return folder if folder.exists() else write(folder)

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("tiny-llama", write_llama)


@pytest.fixture(scope="session")
def looping_llama(tiny_model: Callable[..., Path]) -> Path:
    """A target whose greedy text repeats itself: n-gram drafts are nearly all accepted."""
    return tiny_model("looping-llama", lambda folder: write_llama(folder, attention=LOOPING))


@pytest.fixture(scope="session")
def noisy_draft(tiny_model: Callable[..., Path], tiny_llama: Path) -> Path:
    return tiny_model("noisy-draft", lambda folder: copy_with_noise(tiny_llama, folder))


@pytest.fixture(scope="session")
def renamed_token_draft(tiny_model: Callable[..., Path], tiny_llama: Path) -> Path:
    return tiny_model("renamed-token-draft", lambda folder: copy_with_renamed_token(tiny_llama, folder))


@pytest.fixture(scope="session")
def short_draft(tiny_model: Callable[..., Path], tiny_llama: Path) -> Path:
    return tiny_model("short-draft", lambda folder: copy_with_config(tiny_llama, folder, max_position_embeddings=CONTEXT // 4))


@pytest.fixture(scope="session")
def qwen2_draft(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen2-draft", write_qwen2)


@pytest.fixture(scope="session")
def tiny_embedder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("tiny-embedder", write_bert)


@pytest.fixture(scope="session")
def quantized_llama(tiny_model: Callable[..., Path], tiny_llama: Path) -> Path:
    """Says that it is quantized, and is not: for checks that read configs, not for an engine."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return tiny_model("quantized-llama", lambda folder: copy_with_config(tiny_llama, folder, quantization_config=awq))


@pytest.fixture(scope="session")
def sharded_llama(tiny_model: Callable[..., Path]) -> Path:
    """The tiny Llama's weights, spread over several files with an index."""
    return tiny_model("sharded-llama", lambda folder: write_llama(folder, max_shard_size="300KB"))
