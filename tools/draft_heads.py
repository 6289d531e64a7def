"""What drafts, as torch modules: an EAGLE head of generation 1 or 3, and a standalone draft. Each is saved as vLLM 0.32 and 0.33 load it.

Layouts: vllm/model_executor/models/llama_eagle.py, llama_eagle3.py. Training unrolls a head as vLLM runs it, on its own hidden states
("training-time test", EAGLE-3, arxiv.org/abs/2503.01840): the k-th draft attends to the target's past and to the drafts before it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb


class Drafter(Protocol):
    """`drafts` yields, for k = 0, 1, ..., features [rows, anchors, width] whose logits stand for the token k + 2 places after each anchor,
    where the k + 1 tokens between are the text's own."""

    def drafts(self, tokens: torch.Tensor, states: tuple[torch.Tensor, ...], steps: int) -> Iterator[torch.Tensor]: ...
    def logits(self, features: torch.Tensor) -> torch.Tensor: ...
    def save(self, folder: Path, dtype: torch.dtype) -> None: ...


class Attention(nn.Module):  # type: ignore[misc]
    """Grouped-query attention of one layer that keeps the keys of the target's past apart from those of its own drafts."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.size = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        heads, shared = config.num_attention_heads * self.size, config.num_key_value_heads * self.size
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)

    def forward(self, inputs: torch.Tensor, rotary: Any, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """`inputs`: [rows, anchors, width]. `past`: keys and values of the steps before, [rows, heads, anchors, size]."""
        rows, anchors, _ = inputs.shape
        query, key, value = (
            project(inputs).view(rows, anchors, -1, self.size).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        past.append((key.repeat_interleave(self.groups, 1), value.repeat_interleave(self.groups, 1)))
        (keys, values), own = past[0], past[1:]
        scale = self.size**-0.5
        mask = torch.ones(anchors, anchors, dtype=torch.bool, device=inputs.device).triu(1)
        scores = [(query @ keys.mT * scale).masked_fill(mask, float("-inf"))]
        scores += [(query * earlier).sum(-1, keepdim=True) * scale for earlier, _ in own]
        weights = torch.cat(scores, -1).float().softmax(-1).to(query.dtype)
        mixed = weights[..., :anchors] @ values
        for number, (_, earlier) in enumerate(own):
            mixed = mixed + weights[..., anchors + number, None] * earlier
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, anchors, -1))


class EagleHead(nn.Module):  # type: ignore[misc]
    """One decoder layer on a token's embedding and the target's hidden state before it. Embedding and output head stay the target's.

    Generation 1 reads the target's last hidden state; 3 reads the states after `layers`, and normalises its own.
    It starts by passing the hidden state on; what it attends to is the target's last layer's.
    """

    def __init__(self, target: Any, generation: int) -> None:
        super().__init__()
        config = target.config
        hidden, count = config.hidden_size, config.num_hidden_layers
        self.config, self.generation, self.target = config, generation, [target]  # in a list: no part of the module
        self.layers = [] if generation == 1 else sorted({min(2, count - 1), count // 2, max(count - 3, 0)})  # vLLM's default: 2, half, -3
        last = target.model.layers[-1]
        self.fc = nn.Linear(hidden * (2 if generation == 1 else len(self.layers)), hidden, bias=False)
        self.self_attn = Attention(config, hidden * (1 if generation == 1 else 2))
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        if generation == 3:
            self.input_layernorm, self.hidden_norm, self.norm = (LlamaRMSNorm(hidden, config.rms_norm_eps) for _ in range(3))
            self.norm.load_state_dict(target.model.norm.state_dict())
        self.rotary = LlamaRotaryEmbedding(config)
        with torch.no_grad():
            self.mlp.load_state_dict(last.mlp.state_dict())
            self.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
            for name in ("q_proj", "k_proj", "v_proj"):
                theirs = getattr(last.self_attn, name).weight
                getattr(self.self_attn, name).weight[:, -theirs.shape[1] :] = theirs
            for added in (self.self_attn.o_proj, self.mlp.down_proj):  # sized for the residual stream, which this layer does not see
                added.weight.zero_()
            self.fc.weight[:, -hidden:] += torch.eye(hidden)

    def drafts(self, tokens: torch.Tensor, states: tuple[torch.Tensor, ...], steps: int) -> Iterator[torch.Tensor]:
        """`tokens`: [rows, length]; `states`: the target's, [rows, length, hidden], after 0, 1, ... layers, the last one normalised."""
        anchors = tokens.shape[1] - steps
        embedded = self.target[0].model.embed_tokens(tokens)
        hidden = states[-1][:, :anchors]
        if self.generation == 3:
            hidden = self.fc(torch.cat([states[layer][:, :anchors] for layer in self.layers], -1))
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(steps):
            seen = embedded[:, step + 1 : step + 1 + anchors]
            places = torch.arange(step, step + anchors, device=tokens.device)[None]
            features, hidden = self._layer(seen, hidden, self.rotary(seen, places), past)
            yield features

    def _layer(self, seen: torch.Tensor, hidden: torch.Tensor, rotary: Any, past: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.generation == 1:
            hidden = inputs = self.fc(torch.cat([seen, hidden], -1))
        else:
            inputs = torch.cat([self.input_layernorm(seen), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(inputs, rotary, past)
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return (hidden if self.generation == 1 else self.norm(hidden)), hidden

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.target[0].lm_head(features.to(self.target[0].lm_head.weight.dtype))

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        layer = "layers.0" if self.generation == 1 else "midlayer"
        outside = ("fc.", "norm.")
        weights = {
            name if name.startswith(outside) else f"{layer}.{name}": tensor.to(dtype).cpu().contiguous()
            for name, tensor in self.state_dict().items()
        }
        kept = {key: value for key, value in self.config.to_dict().items() if key != "transformers_version"}
        kept |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "dtype": str(dtype).removeprefix("torch.")}
        if self.generation == 3:
            taken = {"eagle_aux_hidden_state_layer_ids": self.layers, "use_aux_hidden_state": True}
            kept |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": self.config.vocab_size, "eagle_config": taken} | taken
        else:
            kept |= {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


class StandaloneDraft(nn.Module):  # type: ignore[misc]
    """A Llama of `layers` of the target's layers, evenly spaced, with its embedding, output head and tokenizer."""

    def __init__(self, target: Any, layers: int, source: Path) -> None:
        super().__init__()
        self.source = source
        config = LlamaConfig(**target.config.to_dict() | {"num_hidden_layers": layers})
        self.model = LlamaForCausalLM(config)
        count = target.config.num_hidden_layers
        taken = [round(place * (count - 1) / max(layers - 1, 1)) for place in range(layers)]
        with torch.no_grad():
            self.model.lm_head.load_state_dict(target.lm_head.state_dict())
            self.model.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
            self.model.model.norm.load_state_dict(target.model.norm.state_dict())
            for ours, number in zip(self.model.model.layers, taken, strict=True):
                ours.load_state_dict(target.model.layers[number].state_dict())

    def drafts(self, tokens: torch.Tensor, states: tuple[torch.Tensor, ...], steps: int) -> Iterator[torch.Tensor]:
        anchors = tokens.shape[1] - steps
        features = self.model.model(tokens).last_hidden_state
        for step in range(steps):
            yield features[:, step + 1 : step + 1 + anchors]

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(features)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        self.model.to(dtype).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            if (self.source / name).exists():
                shutil.copy(self.source / name, folder)


class ParallelDraft(StandaloneDraft):
    """A standalone draft that reads a mask where its own tokens would stand, and so drafts all of them in one pass (arXiv 2504.18583)."""

    def __init__(self, target: Any, layers: int, source: Path, mask: int) -> None:
        super().__init__(target, layers, source)
        self.model.config.pard_token = mask  # where vLLM looks for it

    def drafts(self, tokens: torch.Tensor, states: tuple[torch.Tensor, ...], steps: int) -> Iterator[torch.Tensor]:
        """One pass over the text and, behind it, the masks of every anchor: all first ones, then all second ones, and so on."""
        rows, length = tokens.shape
        anchors, masks = length - steps, steps - 1
        here = torch.arange(length, device=tokens.device)
        after = [here[:anchors] + 2 + number for number in range(masks)]
        ids = torch.cat([tokens, tokens.new_full((rows, masks * anchors), self.model.config.pard_token)], 1)
        seen = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        text = seen[1 : 1 + anchors].repeat(masks, 1)  # a mask sees what its anchor's next token sees, and that anchor's masks up to itself
        own = torch.eye(anchors, dtype=torch.bool, device=tokens.device)
        earlier = torch.kron(torch.ones(masks, masks, dtype=torch.bool, device=tokens.device).tril(), own)
        visible = torch.cat([torch.cat([seen, seen.new_zeros(length, masks * anchors)], 1), torch.cat([text, earlier], 1)])
        places = torch.cat([here, *after])[None]
        features = self.model.model(ids, position_ids=places, attention_mask=visible[None, None]).last_hidden_state
        yield features[:, 1 : 1 + anchors]
        yield from features[:, length:].split(anchors, 1)
