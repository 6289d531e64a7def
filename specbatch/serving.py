"""Which model a machine serves, and the names that requests may use for it. Imports neither vLLM nor torch: the API asks too."""

from __future__ import annotations

import importlib.util
import re

from specbatch.domain import Mode
from specbatch.errors import UsageError
from specbatch.gpus import has_gpu
from specbatch.settings import BUILTIN_MODEL, DEFAULT_ALIAS, Settings

MAX_NUM_SEQS = 256  # vLLM's own bound on requests in a step, where the settings name none
SUFFIX_PACKAGE = "arctic-inference==0.1.1"  # of the extra `suffix`


def slots(settings: Settings) -> int:
    """Requests that an engine decodes at once; the others wait inside."""
    return settings.max_num_seqs or MAX_NUM_SEQS


def resolve_model(settings: Settings) -> str:
    """The model to serve: the configured one, else the built-in one where no GPU is seen or the engine is scripted.

    Raises UsageError on a machine with a GPU and no model configured: a 135M model is not what such a machine is for.
    """
    if settings.model is not None:
        return settings.model
    if settings.engine == "scripted" or not has_gpu():
        return BUILTIN_MODEL
    raise UsageError(
        "this machine has a GPU and no model is configured: set SPECBATCH_MODEL (--model), "
        f"for example to Qwen/Qwen2.5-7B-Instruct, or to {BUILTIN_MODEL}"
    )


def served_names(settings: Settings) -> tuple[str, ...]:
    """Every name that a request's `model` may carry: as configured, its last part, the user's further names, and `default`."""
    return names_of(resolve_model(settings), *settings.served_names)


def names_of(model: str, *further: str) -> tuple[str, ...]:
    short = re.split(r"[/:]", model.rstrip("/"))[-1]
    return tuple(dict.fromkeys(name for name in (model, short, *further, DEFAULT_ALIAS) if name))


def suffix_missing() -> str | None:
    """What mode suffix needs on this machine, and how to get it; None where it is here."""
    if importlib.util.find_spec("arctic_inference") is not None:
        return None
    return f"mode suffix needs a package: run `pip install {SUFFIX_PACKAGE}` (a C++ compiler takes minutes over it), or use mode ngram"


def offered_modes(settings: Settings) -> tuple[Mode, ...]:
    """The modes that a worker with these settings offers, the one to start with first.

    As configured, else all that need nothing more than what is configured. Raises UsageError for a mode whose draft or head is missing.
    """
    if not settings.modes:
        offered = [Mode.NGRAM, Mode.PLAIN]
        offered += [Mode.SUFFIX] if settings.engine == "vllm" and suffix_missing() is None else []
        offered += [Mode.DRAFT_MODEL] if settings.draft else []
        offered += [Mode.EAGLE3, Mode.EAGLE] if settings.eagle else []  # the worker withholds the one that the head is not
        return tuple(offered)
    if Mode.DRAFT_MODEL in settings.modes and not settings.draft:
        raise UsageError("mode draft_model needs a draft model: set SPECBATCH_DRAFT (--draft), for example to Qwen/Qwen2.5-0.5B-Instruct")
    for mode in (Mode.EAGLE, Mode.EAGLE3):
        if mode in settings.modes and not settings.eagle:
            raise UsageError(f"mode {mode} needs a head: set SPECBATCH_EAGLE (--eagle) to a folder or a Hugging Face id")
    return settings.modes
