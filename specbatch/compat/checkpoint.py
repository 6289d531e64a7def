"""A model folder as its small files describe it: config, tokenizer, chat template. Nothing here needs torch, transformers or vLLM."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specbatch.compat.safetensors import Weights, read_weights
from specbatch.domain import Mode
from specbatch.errors import UsageError

# A text model's settings lie under one of these in a multimodal or a speculators checkpoint.
NESTED_CONFIGS = ("text_config", "llm_config", "transformer_layer_config")


@dataclass(frozen=True)
class Checkpoint:
    name: str
    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, with a nested text model's settings laid over it. Raises UsageError without one."""
        if not (self.folder / "config.json").is_file():
            raise UsageError(f"{self.name}: there is no config.json in {self.folder}; give a folder in Hugging Face's format")
        config = self._read("config.json")
        nested: dict[str, Any] = next((config[key] for key in NESTED_CONFIGS if isinstance(config.get(key), dict)), {})
        # The outer names are the ones that choose vLLM's class; model_type is the text model's, by which families compare.
        return config | nested | {"architectures": config.get("architectures") or nested.get("architectures") or []}

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return self._read("generation_config.json")

    @cached_property
    def weights(self) -> Weights | None:
        """None where the folder holds no safetensors."""
        return read_weights(self.folder)

    @cached_property
    def has_tokenizer(self) -> bool:
        return (self.folder / "tokenizer.json").is_file()

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Every token and its id, added tokens included, from tokenizer.json. Raises UsageError without one."""
        if not self.has_tokenizer:
            raise UsageError(
                f"{self.name}: there is no tokenizer.json in {self.folder}; write one with "
                f"transformers' AutoTokenizer.from_pretrained({str(self.folder)!r}).save_pretrained({str(self.folder)!r})"
            )
        tokenizer = self._read("tokenizer.json")
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score, in the order of their ids
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        return vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}

    @cached_property
    def chat_template(self) -> str | None:
        """The default template: a file of its own, or an entry of tokenizer_config.json (a text, or a list of named ones)."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
        template = self._read("chat_template.json").get("chat_template") or self._read("tokenizer_config.json").get("chat_template")
        if isinstance(template, list):
            template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
        return template.strip() if isinstance(template, str) else None

    @cached_property
    def quantization(self) -> str | None:
        """The method by its name in vLLM, or None for plain floating point."""
        declared = self.config.get("quantization_config") or self.config.get("compression_config") or {}
        nvidia = self._read("hf_quant_config.json").get("quantization") or {}
        method = declared.get("quant_method") or ("modelopt" if nvidia.get("quant_algo") else None)
        return str(method) if method else None

    @cached_property
    def head_mode(self) -> Mode | None:
        """The mode whose head this is; None for a whole model.

        vLLM wraps any architecture's name, so a name alone does not decide: a head of the first generation often calls itself
        LlamaForCausalLM, and is known by `fc`, which joins an embedding and a hidden state into one.
        """
        names = [name.lower() for name in (*self.config["architectures"], str(self.config.get("speculators_model_type", "")))]
        if any("eagle3" in name or name.startswith("peagle") for name in names):
            return Mode.EAGLE3
        if any(re.match(r"eagle(?!\d)", name) for name in names):  # Eagle2_5_VL is a vision model
            return Mode.EAGLE
        joins = self.weights.shapes.get("fc.weight", ()) if self.weights else ()
        return Mode.EAGLE if len(joins) == 2 and joins[1] == 2 * joins[0] else None

    def number(self, *keys: str) -> int | None:
        """The first of these keys that the config fills with a number: families name the same size differently."""
        return next((int(self.config[key]) for key in keys if isinstance(self.config.get(key), int | float)), None)

    def _read(self, file: str) -> dict[str, Any]:
        path = self.folder / file
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as wrong:
            raise UsageError(f"{self.name}: {path} is not JSON ({wrong}); fetch the file again") from wrong
        if not isinstance(content, dict):
            raise UsageError(f"{self.name}: {path} holds no JSON object; fetch the file again")
        return content


def locate(model: str | Path) -> Checkpoint:
    """A folder, or an id in the local Hugging Face cache; never the network. Raises UsageError with what to do."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return Checkpoint(str(model), folder)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Checkpoint(str(model), Path(snapshot_download(str(model), local_files_only=True)))
    except (HFValidationError, LocalEntryNotFoundError) as missing:
        raise UsageError(
            f"{str(model)!r} is neither a folder nor a model in the local Hugging Face cache: check the path, "
            f"or fetch it with `hf download {model}`"
        ) from missing


def cached(model: str) -> bool:
    """Whether an id lies in the local Hugging Face cache."""
    try:
        locate(model)
    except UsageError:
        return False
    return True
