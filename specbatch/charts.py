"""The comparison as a picture. matplotlib is an extra: it is imported when a chart is drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from specbatch.comparison import Comparison, name
from specbatch.errors import UsageError

PANEL_INCHES = (4.2, 3.4)
DOTS_PER_INCH = 150


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(comparison: Comparison, file: Path) -> None:
    """A PNG: for each task, tokens a second and the ratio to plain, against requests at once. Raises UsageError without matplotlib."""
    if not can_draw():
        raise UsageError("a chart needs matplotlib: pip install 'specbatch[bench]'")
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(line.task for line in comparison.lines))
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * max(1, len(tasks)), 2 * height), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(2, max(1, len(tasks)), squeeze=False, sharex=True)
    for column, task in enumerate(tasks):
        top, bottom = axes[0][column], axes[1][column]
        points = [line for line in comparison.lines if line.task is task]
        for mode, k in dict.fromkeys((line.mode, line.k) for line in points):
            curve = [line for line in points if (line.mode, line.k) == (mode, k)]
            loads = [line.load for line in curve]
            top.plot(loads, [line.tokens_per_second for line in curve], marker="o", label=name(mode, k))
            bottom.plot(loads, [float("nan") if line.of_plain is None else line.of_plain for line in curve], marker="o")
        top.set(title=task.value, xscale="log", yscale="log", ylabel="tokens/s" if column == 0 else None)
        bottom.set(xlabel="requests at once", ylabel="speed relative to plain" if column == 0 else None)
        bottom.axhline(1.0, color="gray", linewidth=0.8)
        loads = sorted({line.load for line in points})
        bottom.set_xticks(loads, [str(load) for load in loads])
        bottom.minorticks_off()
    if tasks:
        axes[0][0].legend()
    figure.suptitle(f"{comparison.model} on {comparison.device}, vLLM {comparison.vllm}")
    figure.savefig(file)
