"""An EAGLE head of the same function for a target that was widened without changing its own, at that target's cost.

    python tools/widen_head.py HEAD BIG OUT

HEAD was trained by tools/train_draft.py for the narrow target; BIG is the widened one's folder. As there, real dimensions come first, added
ones stay zero: output projections of what is added are zero, their inputs random, so that the arithmetic is real; norms are scaled for the
mean over more dimensions (BIG's rms_norm_eps is scaled already).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file

OF_THE_HEAD = ("architectures", "num_hidden_layers", "draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
NOISE = 0.02


def widen(
    head: Annotated[Path, typer.Argument(metavar="HEAD")],
    big: Annotated[Path, typer.Argument(metavar="BIG")],
    out: Annotated[Path, typer.Argument(metavar="OUT")],
) -> None:
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (head, big))
    torch.manual_seed(1)
    weights = {name: _wide(name, tensor, old, new) for name, tensor in load_file(head / "model.safetensors").items()}
    kept = new | {key: old[key] for key in (*OF_THE_HEAD, "tie_word_embeddings", "use_aux_hidden_state") if key in old}
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    typer.echo(f"{sum(tensor.numel() for tensor in weights.values()) / 1e6:.0f} M parameters")


def _wide(name: str, tensor: torch.Tensor, old: dict[str, int], new: dict[str, int]) -> torch.Tensor:
    narrow, wide = old["hidden_size"], new["hidden_size"]
    if tensor.ndim == 1:
        scaled = tensor.float() * math.sqrt(narrow / wide)
        return torch.cat([scaled, torch.ones(wide - narrow)]).to(tensor.dtype)
    size = new["head_dim"]
    inner = {
        "q_proj": new["num_attention_heads"] * size,
        "k_proj": new["num_key_value_heads"] * size,
        "v_proj": new["num_key_value_heads"] * size,
        "gate_proj": new["intermediate_size"],
        "up_proj": new["intermediate_size"],
        "o_proj": new["num_attention_heads"] * size,
        "down_proj": new["intermediate_size"],
    }
    part = name.split(".")[-2]
    if part in ("o_proj", "down_proj"):
        made = torch.zeros(wide, inner[part])
        made[:narrow, : tensor.shape[1]] = tensor
    else:  # reads one or more hidden states or embeddings, side by side
        blocks = tensor.split(narrow, 1)
        made = torch.zeros(wide, wide * len(blocks)) if part == "fc" else NOISE * torch.randn(inner[part], wide * len(blocks))
        for number, block in enumerate(blocks):
            made[: len(block), number * wide : number * wide + narrow] = block
    return made.to(tensor.dtype)


if __name__ == "__main__":
    typer.run(widen)
