"""What `bench` shows: the table, the document and the picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbatch import charts
from specbatch.comparison import Comparison, ModeCost, lines, markdown, peak_costs
from specbatch.domain import Mode, TaskType
from specbatch.errors import UsageError
from specbatch.tuning import BULK, Speed

GB = 10**9
SPEEDS = [
    Speed(
        Mode.NGRAM, TaskType.CODE, 1, 4, 414.4, 12, 1.0, 0.0201, 0.00241, 1000, 330, start_seconds=80.0, peak_memory_bytes=int(10.5 * GB)
    ),
    Speed(Mode.PLAIN, TaskType.CODE, 1, 0, 207.2, 12, 1.0, 0.0202, 0.00483, start_seconds=74.0, peak_memory_bytes=10 * GB),
    Speed(Mode.PLAIN, TaskType.CHAT, BULK, 0, 18606.0, 1024, 7.0),
    Speed(Mode.NGRAM, TaskType.CHAT, 4, 4, 9.25, 12, 1.0),
]


def compared(speeds: list[Speed] = SPEEDS) -> Comparison:
    return Comparison(model="a-model", device="a device", vllm="0.33.0", lines=lines(speeds), costs=peak_costs(speeds))


def test_modes_stand_side_by_side() -> None:
    assert markdown(compared()) == (
        "a-model on a device, vLLM 0.33.0. Latencies are medians in milliseconds.\n\n"
        "### code\n\n"
        "| requests at once | mode | tokens/s | of plain | first token | further token | acceptance |\n"
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| 1 | plain | 207 | 1.00x | 20.2 | 4.8 | - |\n"
        "| 1 | ngram K=4 | 414 | 2.00x | 20.1 | 2.4 | 33% |\n\n"
        "### chat\n\n"
        "| requests at once | mode | tokens/s | of plain | first token | further token | acceptance |\n"
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| 4 | ngram K=4 | 9.2 | - | - | - | - |\n"
        "| 1024 (bulk) | plain | 18,606 | 1.00x | - | - | - |\n\n"
        "### Start and memory\n\n"
        "| mode | start | memory added | of plain |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| plain | 74 s | 0.00 GB | +0.0% |\n"
        "| ngram K=4 | 80 s | 0.50 GB | +5.0% |\n"
    )


def test_memory_of_files_is_said_to_be_computed() -> None:
    cost = ModeCost(mode=Mode.DRAFT_MODEL, k=5, start_seconds=None, added_bytes=GB, added_percent=6.5, measured=False)
    assert "| draft_model K=5 | - | 1.00 GB (computed) | +6.5% |" in markdown(compared().model_copy(update={"costs": [cost]}))


def test_without_a_peak_of_plain_nothing_is_added() -> None:
    (cost,) = peak_costs(SPEEDS[:1])
    assert cost.added_bytes is None
    assert cost.added_percent is None


def test_the_document_can_be_read_back() -> None:
    assert Comparison.model_validate_json(compared().model_dump_json()) == compared()


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    charts.draw(compared(), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    with pytest.raises(UsageError, match=r"specbatch\[bench\]"):
        charts.draw(compared(), tmp_path / "bench.png")
