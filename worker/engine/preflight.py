"""What can be known before an engine is started, and what to say when a start failed. No torch, no vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
from pydantic import ValidationError

from specbatch.domain import Mode
from specbatch.errors import EngineStartError
from specbatch.serving import suffix_missing
from specbatch.settings import Settings

GIB = 1024**3
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json")
MEMORY_WORDS = re.compile(
    r"out of memory|OutOfMemory|memory for the cache|Free memory on device|KV cache is needed|allocate memory", re.IGNORECASE
)
RAISED = re.compile(r"^(?:.*\s)?((?:\w+\.)*\w+(?:Error|Exception|Failure)): (.+)$")


def check(settings: Settings, mode: Mode, model: str, *, cpu: bool) -> None:
    """Raise EngineStartError for what cannot work: folders that are not there or not whole, a missing package, too little memory."""
    check_folder(model, "model")
    for name, value, modes in (("draft", settings.draft, (Mode.DRAFT_MODEL,)), ("eagle", settings.eagle, (Mode.EAGLE, Mode.EAGLE3))):
        if value is not None and mode in modes:
            check_folder(value, name, tokenizer=False)
    if mode is Mode.SUFFIX and (missing := suffix_missing()) is not None:
        raise EngineStartError(missing)
    if cpu:
        check_memory(settings, model, settings.draft if mode is Mode.DRAFT_MODEL else None)


def check_folder(model: str, name: str, *, tokenizer: bool = True) -> None:
    """A folder must hold config.json, and a tokenizer; what is neither a folder nor the form of a Hugging Face id is told so."""
    folder = Path(model).expanduser()
    said = f"SPECBATCH_{name.upper()} (--{name})"
    if not folder.is_dir():
        if model.startswith((".", "/", "~")) or model.count("/") > 1 or folder.exists():
            raise EngineStartError(f"there is no folder {model}: set {said} to a folder that holds config.json, or to a Hugging Face id")
        return
    if not (folder / "config.json").is_file():
        raise EngineStartError(f"{model} holds no config.json: set {said} to the folder of a Hugging Face model")
    if tokenizer and not any((folder / file).is_file() for file in TOKENIZERS):
        raise EngineStartError(f"{model} holds no tokenizer: save one beside the weights with tokenizer.save_pretrained({model!r})")


def check_memory(settings: Settings, *models: str | None) -> None:
    """Weights as they lie on disk plus the KV cache must fit into the memory that is free now: less would end in the kernel's killer."""
    weights = sum(file.stat().st_size for model in models if model is not None for file in Path(model).glob("*.safetensors"))
    needed, free = weights + settings.cpu_kv_cache_gib * GIB, psutil.virtual_memory().available
    if needed > free:
        raise EngineStartError(
            f"not enough memory: weights and KV cache need {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free: "
            "lower SPECBATCH_CPU_KV_CACHE_GIB, or use a smaller model"
        )


def explain(failed: BaseException, log: str, file: Path, model: str) -> EngineStartError:
    """One sentence for a failed start. `log` is what vLLM wrote since: the cause of a failure in its own process stands only there."""
    cause = next(_raised(log), None) or f"{type(failed).__name__}: {_first_line(failed)}"
    if any(isinstance(error, OSError) for error in _chain(failed)) and not Path(model).is_dir():
        advice = f"{model} was not found on this machine nor on the Hugging Face hub: check the name and the network, or set a folder"
    elif MEMORY_WORDS.search(cause):
        advice = "not enough memory: lower SPECBATCH_MAX_MODEL_LEN, SPECBATCH_MAX_NUM_SEQS or the model's size, or free the device"
    else:
        advice = "the engine did not start: check the model and the settings"
    return EngineStartError(f"{advice} ({cause[:500]}). vLLM's log: {file}")


def _first_line(failed: BaseException) -> str:
    if isinstance(failed, ValidationError):
        return "; ".join(error["msg"].removeprefix("Value error, ").splitlines()[0] for error in failed.errors())
    return next(iter(str(failed).strip().splitlines()), "without a word")


def _raised(log: str) -> Iterator[str]:
    """Errors named in a log, the first raised first: later ones only say that another process failed."""
    for line in log.splitlines():
        if found := RAISED.match(line.strip()):
            yield f"{found[1]}: {found[2]}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
