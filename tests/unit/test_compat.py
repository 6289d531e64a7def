"""Every guard of `check` fires on a pair made for it, names both values, and stays quiet on a pair that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbatch.compat import Finding, Report, Severity, check
from specbatch.compat.safetensors import read_weights
from specbatch.domain import Mode
from specbatch.errors import EngineStartError, UsageError
from tests.model_fixtures import CHAT_TEMPLATE, CONTEXT, VOCAB_SIZE, copy_with_config, copy_with_renamed_token, write_llama

TinyModel = Callable[[str, Callable[[Path], Path]], Path]


def finding(report: Report, name: str) -> Finding:
    return next(found for found in report.findings if found.check == name)


def named(report: Report, severity: Severity) -> list[str]:
    return [found.check for found in report.findings if found.severity is severity]


@pytest.fixture(scope="session")
def wide_llama(tiny_model: TinyModel) -> Path:
    """A target of over ten times the tiny Llama's bytes, with the same tokenizer."""
    return tiny_model("wide-llama", lambda folder: write_llama(folder, hidden_size=256, intermediate_size=512, num_hidden_layers=4))


@pytest.fixture(scope="session")
def padded_llama(tiny_model: TinyModel) -> Path:
    """The same tokenizer under an embedding with 64 rows more than tokens."""
    return tiny_model("padded-llama", lambda folder: write_llama(folder, vocab_size=VOCAB_SIZE + 64))


@pytest.fixture(scope="session")
def eagle_head(tiny_model: TinyModel, tiny_llama: Path) -> Path:
    """An EAGLE3 head's config for the tiny Llama, without a tokenizer, as heads are published."""

    def write(folder: Path) -> Path:
        copy_with_config(tiny_llama, folder, architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, max_position_embeddings=64)
        (folder / "tokenizer.json").unlink()
        return folder

    return tiny_model("eagle-head", write)


def test_a_small_draft_of_the_same_kind_passes_every_check(wide_llama: Path, tiny_llama: Path) -> None:
    report = check(wide_llama, tiny_llama)
    assert report.compatible
    assert named(report, Severity.OK) == [found.check for found in report.findings]
    assert len(report.findings) == 10
    report.require()


def test_a_renamed_token_is_refused_and_named(tiny_llama: Path, renamed_token_draft: Path) -> None:
    report = check(tiny_llama, renamed_token_draft)
    assert named(report, Severity.FAILURE) == ["token_ids"]
    found = finding(report, "token_ids")
    assert "1 of 512 token ids differs: id 2 is '<|unused|>' in the target and '<|tool|>' in the draft" in found.message
    assert (found.target_value, found.draft_value) == ("2: '<|unused|>'", "2: '<|tool|>'")
    with pytest.raises(EngineStartError, match=r"\[token_ids\] 1 of 512"):
        report.require()


def test_ids_that_are_swapped_are_found_at_equal_sizes(tiny_llama: Path, tmp_path: Path) -> None:
    swapped = copy_with_renamed_token(tiny_llama, tmp_path / "swapped")
    file = swapped / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    for index in range(300, 312):
        vocabulary[ordered[index]] = 611 - index
    file.write_text(json.dumps(tokenizer))
    message = finding(check(tiny_llama, swapped), "token_ids").message
    assert message.startswith("13 of 512 token ids differ: id 2 is")
    assert "and 8 more" in message


def test_a_token_that_only_one_side_has_differs(tiny_llama: Path, tmp_path: Path) -> None:
    longer = copy_with_config(tiny_llama, tmp_path / "longer")
    tokenizer = json.loads((longer / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": VOCAB_SIZE, "content": "<|extra|>"})
    (longer / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "id 512 is no token in the target and '<|extra|>' in the draft" in finding(check(tiny_llama, longer), "token_ids").message


def test_a_unigram_vocabulary_counts_by_position(tiny_llama: Path, tmp_path: Path) -> None:
    folders = []
    for name, tokens in (("one", ["<unk>", "a", "b"]), ("two", ["<unk>", "b", "a"])):
        folder = copy_with_config(tiny_llama, tmp_path / name)
        vocabulary = [[token, -1.0] for token in tokens]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": vocabulary}, "added_tokens": []}))
        folders.append(folder)
    assert "2 of 3 token ids differ: id 1 is 'a' in the target and 'b' in the draft" in finding(check(*folders), "token_ids").message


def test_padding_of_the_embedding_asks_for_vllms_mapping(padded_llama: Path, tiny_llama: Path) -> None:
    report = check(padded_llama, tiny_llama)
    assert report.compatible
    assert report.use_heterogeneous_vocab
    found = finding(report, "vocab_size")
    assert found.severity is Severity.WARNING
    assert (found.target_value, found.draft_value) == (576, 512)
    assert not check(tiny_llama, tiny_llama).use_heterogeneous_vocab


def test_other_tokens_under_another_size_are_refused(padded_llama: Path, renamed_token_draft: Path) -> None:
    report = check(padded_llama, renamed_token_draft)
    assert named(report, Severity.FAILURE) == ["token_ids", "vocab_size"]
    assert not report.use_heterogeneous_vocab


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_another_end_of_text_warns(tiny_llama: Path, tmp_path: Path, file: str) -> None:
    other = copy_with_config(tiny_llama, tmp_path / "other", file, eos_token_id=[4, 0])
    if file == "config.json":  # generation_config.json wins over it, and has to step aside
        (other / "generation_config.json").unlink()
    report = check(tiny_llama, other)
    assert report.compatible
    assert "eos_token_id is [0] in the target and [0, 4] in the draft" in finding(report, "special_tokens").message


def test_another_chat_template_warns(tiny_llama: Path, tmp_path: Path) -> None:
    other = copy_with_config(tiny_llama, tmp_path / "other")
    (other / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("im_start", "turn"))
    report = check(tiny_llama, other)
    assert report.compatible
    found = finding(report, "chat_template")
    assert found.severity is Severity.WARNING
    assert found.target_value != found.draft_value
    assert str(found.draft_value) in found.message


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, [{"name": "tools", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]])
def test_a_template_in_the_tokenizers_config_is_the_same_one(tiny_llama: Path, tmp_path: Path, template: Any) -> None:
    older = copy_with_config(tiny_llama, tmp_path / "older", "tokenizer_config.json", chat_template=template)
    (older / "chat_template.jinja").unlink()
    assert finding(check(tiny_llama, older), "chat_template").severity is Severity.OK


def test_another_family_is_refused(tiny_llama: Path, qwen2_draft: Path) -> None:
    report = check(tiny_llama, qwen2_draft)
    assert named(report, Severity.FAILURE) == ["family"]
    assert "The target is a llama, the draft a qwen2." in finding(report, "family").message


def test_a_dense_draft_for_a_mixture_of_experts_is_of_its_family(tiny_llama: Path, tmp_path: Path) -> None:
    target = copy_with_config(tiny_llama, tmp_path / "moe", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    draft = copy_with_config(tiny_llama, tmp_path / "dense", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    assert finding(check(target, draft), "family").severity is Severity.OK


def test_a_shorter_context_is_refused_until_the_target_is_served_shorter(tiny_llama: Path, short_draft: Path) -> None:
    report = check(tiny_llama, short_draft)
    assert named(report, Severity.FAILURE) == ["context"]
    found = finding(report, "context")
    assert (found.target_value, found.draft_value) == (512, 128)
    assert "Set max_model_len to 128 or less" in found.message
    assert check(tiny_llama, short_draft, max_model_len=128).compatible
    assert not check(tiny_llama, short_draft, max_model_len=129).compatible


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4 * CONTEXT),
        ({"type": "dynamic", "factor": 2.0}, 2 * CONTEXT),
        ({"rope_type": "llama3", "factor": 8.0}, CONTEXT),
        ({"rope_type": "yarn", "factor": 4.0}, CONTEXT),
    ],
)
def test_context_follows_the_rope_scaling_as_in_vllm(tiny_llama: Path, tmp_path: Path, rope: dict[str, Any], context: int) -> None:
    scaled = copy_with_config(tiny_llama, tmp_path / "scaled", rope_parameters=None, rope_scaling=rope)
    assert finding(check(scaled, tiny_llama), "context").target_value == context


def test_quantization_has_to_match_unless_the_draft_is_tiny(
    tiny_llama: Path, quantized_llama: Path, wide_llama: Path, tmp_path: Path
) -> None:
    report = check(quantized_llama, tiny_llama)
    assert named(report, Severity.FAILURE) == ["quantization"]
    found = finding(report, "quantization")
    assert (found.target_value, found.draft_value) == ("awq", None)
    assert check(quantized_llama, quantized_llama).compatible
    assert "use a 16-bit draft" in finding(check(tiny_llama, quantized_llama), "quantization").message
    wide = copy_with_config(wide_llama, tmp_path / "wide", quantization_config={"quant_method": "awq", "bits": 4})
    assert check(wide, tiny_llama).compatible
    assert not check(tiny_llama, tiny_llama, quantization="fp8").compatible
    assert check(tiny_llama, tiny_llama, quantization="fp8", draft_quantization="fp8").compatible


def test_nvidias_quantization_file_is_read(tiny_llama: Path, tmp_path: Path) -> None:
    nvidia = copy_with_config(tiny_llama, tmp_path / "nvidia")
    (nvidia / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert finding(check(nvidia, tiny_llama), "quantization").target_value == "modelopt"


def test_tensor_parallel_sizes(tiny_llama: Path, eagle_head: Path) -> None:
    assert check(tiny_llama, tiny_llama, tensor_parallel=2, draft_tensor_parallel=2).compatible
    unequal = finding(check(tiny_llama, tiny_llama, tensor_parallel=2), "tensor_parallel")
    assert unequal.severity is Severity.FAILURE
    assert unequal.message.endswith("set draft_tensor_parallel_size to 2.")
    assert check(tiny_llama, eagle_head, tensor_parallel=2, mode=Mode.EAGLE3).compatible
    indivisible = finding(check(tiny_llama, tiny_llama, tensor_parallel=4, draft_tensor_parallel=4), "tensor_parallel")
    assert indivisible.severity is Severity.FAILURE
    assert "the target has 2 attention heads: split over one of 1, 2" in indivisible.message


def test_a_draft_that_is_too_large_warns(wide_llama: Path, tiny_llama: Path, noisy_draft: Path) -> None:
    larger = check(tiny_llama, wide_llama)
    assert larger.compatible
    assert "larger than its target" in finding(larger, "size_ratio").message
    equal = check(tiny_llama, noisy_draft)
    assert named(equal, Severity.WARNING) == ["size_ratio"]
    assert "a ratio of 1.0" in finding(equal, "size_ratio").message


def test_weights_are_counted_from_the_headers(tiny_llama: Path, sharded_llama: Path) -> None:
    from safetensors import safe_open

    with safe_open(tiny_llama / "model.safetensors", "pt") as stored:
        numbers = sum(stored.get_tensor(name).numel() for name in stored.keys())  # noqa: SIM118 (no mapping)
    whole, sharded = read_weights(tiny_llama), read_weights(sharded_llama)
    assert whole is not None
    assert sharded is not None
    assert len(list(sharded_llama.glob("*.safetensors"))) > 1
    assert whole.shapes == sharded.shapes
    assert whole.served_bytes(4) == sharded.served_bytes(4) == 4 * numbers
    assert whole.served_bytes(2) == 2 * numbers
    assert check(sharded_llama, sharded_llama).memory.target_weights_bytes == 2 * numbers


def test_packed_weights_keep_their_size(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "packed": {"dtype": "I32", "shape": [4, 2], "data_offsets": [0, 32]},
            "scale": {"dtype": "F32", "shape": [4], "data_offsets": [32, 48]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    weights = read_weights(tmp_path)
    assert weights is not None
    assert weights.served_bytes(2) == 32 + 8


def test_memory_adds_weights_and_kv_cache(tiny_llama: Path, eagle_head: Path) -> None:
    """float32: 2 (key, value) x 2 layers x 1 KV head x 32 dimensions x 4 bytes = 512 bytes a token and model, so that a GiB holds
    1,048,576 tokens of both: what vLLM 0.32 reports for this pair ("CPU KV cache size: 1,048,576 tokens")."""
    memory = check(tiny_llama, tiny_llama, dtype="float32").memory
    assert (memory.target_kv_bytes_per_token, memory.draft_kv_bytes_per_token) == (512, 512)
    assert memory.target_weights_bytes is not None
    assert memory.added_bytes == memory.target_weights_bytes + 512 * CONTEXT
    assert memory.added_percent == 100.0
    assert check(tiny_llama, tiny_llama).memory.target_kv_bytes_per_token == 256
    assert check(tiny_llama, eagle_head, mode=Mode.EAGLE3).memory.draft_kv_bytes_per_token == 128


def test_a_draft_that_reads_masks_is_known_by_its_config(tmp_path: Path, tiny_llama: Path, noisy_draft: Path) -> None:
    parallel = copy_with_config(noisy_draft, tmp_path / "parallel", pard_token=7)
    assert check(tiny_llama, parallel).parallel_drafting
    assert not check(tiny_llama, noisy_draft).parallel_drafting


def test_memory_is_of_one_device(tiny_llama: Path, wide_llama: Path) -> None:
    one = check(wide_llama, wide_llama).memory
    two = check(wide_llama, wide_llama, tensor_parallel=2, draft_tensor_parallel=2).memory
    assert one.target_weights_bytes is not None
    assert two.target_weights_bytes == one.target_weights_bytes // 2
    assert two.target_kv_bytes_per_token == one.target_kv_bytes_per_token  # a single KV head is repeated, not split


def test_deepseeks_latent_attention_keeps_one_vector_a_layer(tiny_llama: Path, tmp_path: Path) -> None:
    latent = copy_with_config(tiny_llama, tmp_path / "latent", kv_lora_rank=512, qk_rope_head_dim=64)
    assert check(latent, tiny_llama).memory.target_kv_bytes_per_token == 2 * (512 + 64) * 2


def test_a_device_that_is_too_small_names_what_gives_room(tiny_llama: Path) -> None:
    weights = check(tiny_llama, tiny_llama).memory.target_weights_bytes
    assert weights is not None
    cache = 256 * CONTEXT  # of one request, for one model

    def judge(device: int, **changes: Any) -> Finding:
        return finding(check(tiny_llama, tiny_llama, device_memory_bytes=device, gpu_memory_utilization=1.0, **changes), "memory")

    assert judge(2 * (weights + cache), max_num_seqs=1).severity is Severity.OK
    short = judge(2 * (weights + cache) - 1)
    assert short.severity is Severity.FAILURE
    assert "KV cache for 511 of the 512 tokens of one request" in short.message
    assert "use mode ngram" in short.message
    alone = judge(weights + cache - 1)
    assert "The target alone leaves KV cache for 511 of the 512 tokens" in alone.message
    assert judge(2 * (weights + cache), max_num_seqs=8).severity is Severity.WARNING


def test_utilization_bounds_the_device(tiny_llama: Path) -> None:
    memory = check(tiny_llama, tiny_llama, device_memory_bytes=10_000_000, gpu_memory_utilization=0.5, max_num_seqs=1000).memory
    assert memory.target_weights_bytes is not None
    assert memory.kv_tokens == (5_000_000 - 2 * memory.target_weights_bytes) // 512
    assert memory.kv_tokens_plain == (5_000_000 - memory.target_weights_bytes) // 256


def test_weights_in_another_format_leave_sizes_unknown(tiny_llama: Path, tmp_path: Path) -> None:
    pickled = copy_with_config(tiny_llama, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    report = check(tiny_llama, pickled)
    assert report.compatible
    assert named(report, Severity.WARNING) == ["size_ratio", "memory"]
    assert report.memory.added_percent is None


def test_an_eagle_head_needs_no_tokenizer_and_no_context(tiny_llama: Path, eagle_head: Path) -> None:
    report = check(tiny_llama, eagle_head, mode=Mode.EAGLE3)
    assert report.compatible, report.failures


def test_eagle_modes_refuse_what_is_no_head_of_theirs(tiny_llama: Path, wide_llama: Path, eagle_head: Path) -> None:
    whole = finding(check(wide_llama, tiny_llama, mode=Mode.EAGLE), "family")
    assert "LlamaForCausalLM is none" in whole.message
    other = finding(check(tiny_llama, eagle_head, mode=Mode.EAGLE), "family")
    assert "is of mode eagle3, not eagle: use mode eagle3" in other.message
    as_draft = finding(check(tiny_llama, eagle_head), "family")
    assert "use mode eagle3" in as_draft.message
    narrow = finding(check(wide_llama, eagle_head, mode=Mode.EAGLE3), "family")
    assert (narrow.target_value, narrow.draft_value) == (256, 64)
    assert {found.severity for found in (whole, other, as_draft, narrow)} == {Severity.FAILURE}


def test_a_head_of_another_vocabulary_is_refused(padded_llama: Path, eagle_head: Path) -> None:
    assert named(check(padded_llama, eagle_head, mode=Mode.EAGLE3), Severity.FAILURE) == ["vocab_size"]


def test_heads_are_known_by_their_config_or_their_weights(tiny_llama: Path, tmp_path: Path) -> None:
    """SafeAILab's first heads call themselves LlamaForCausalLM; speculators nests the layer's config."""
    import torch
    from safetensors.torch import save_file

    first = copy_with_config(tiny_llama, tmp_path / "first")
    save_file({"fc.weight": torch.zeros(64, 128)}, first / "model.safetensors")
    assert finding(check(tiny_llama, first, mode=Mode.EAGLE), "family").severity is Severity.OK
    nested = tmp_path / "nested"
    nested.mkdir()
    layer = json.loads((tiny_llama / "config.json").read_text()) | {"num_hidden_layers": 1}
    config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer}
    (nested / "config.json").write_text(json.dumps(config))
    report = check(tiny_llama, nested, mode=Mode.EAGLE3)
    assert report.compatible, report.failures
    assert report.memory.draft_kv_bytes_per_token == 128


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer.json .*save_pretrained"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "tokenizer.json holds no JSON object"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "not a whole safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]"), "describes no tensors"),
        (lambda folder: os.truncate(folder / "model.safetensors", 400_000), "its header promises"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "maps no tensors to files"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}'),
            r"1 of 1 weight files are missing \(model-1.safetensors",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_says_what_to_do(tiny_llama: Path, tmp_path: Path, spoil: Callable[[Path], Any], words: str) -> None:
    spoiled = copy_with_config(tiny_llama, tmp_path / "spoiled")
    spoil(spoiled)
    with pytest.raises(UsageError, match=words):
        check(tiny_llama, spoiled)


@pytest.mark.parametrize("model", ["no/such-model", "./nowhere/at/all", "builtin:nothing"])
def test_a_model_that_is_nowhere_says_how_to_fetch_it(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"neither a folder nor a model in the local Hugging Face cache.*hf download"):
        check(tiny_llama, model)


def test_a_model_in_the_local_cache_is_found_by_its_id(wide_llama: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads HF_HUB_CACHE once, when it is imported."""
    repository = tmp_path / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    copy_with_config(tiny_llama, repository / "snapshots" / ("0" * 40))
    program = f"from specbatch.compat import check; print(check({str(wide_llama)!r}, 'acme/tiny').compatible)"
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2], check=False
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.NGRAM, Mode.SUFFIX])
def test_a_mode_without_a_draft_has_nothing_to_check(tiny_llama: Path, mode: Mode) -> None:
    with pytest.raises(UsageError, match=f"mode {mode} has no draft to check"):
        check(tiny_llama, tiny_llama, mode=mode)


def test_the_report_travels_as_json(tiny_llama: Path, short_draft: Path) -> None:
    data = json.loads(check(tiny_llama, short_draft).model_dump_json())
    assert data["compatible"] is False
    assert data["memory"]["added_gb"] == pytest.approx(data["memory"]["added_bytes"] / 1e9, abs=1e-3)
    assert {"check", "severity", "target_value", "draft_value", "message"} == set(data["findings"][0])


def test_checking_loads_no_engine(tiny_llama: Path) -> None:
    program = (
        f"import sys; from specbatch.compat import check; check({str(tiny_llama)!r}, {str(tiny_llama)!r}); "
        "print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.stdout == "[]\n", done.stderr


def test_some_of_the_noisy_drafts_tokens_are_the_targets(tiny_llama: Path, noisy_draft: Path) -> None:
    """What other tests rely on: the copy proposes the target's greedy token often, and not always."""
    import torch
    from transformers import AutoModelForCausalLM

    target, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_llama, noisy_draft))
    prompt = torch.arange(100, 108).unsqueeze(0)
    with torch.inference_mode():
        text = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=128, max_new_tokens=128)
        proposed = draft(text).logits.argmax(-1)[0, 7:-1]
    agreement = (proposed == text[0, 8:]).float().mean().item()
    assert 0.2 < agreement < 0.9
