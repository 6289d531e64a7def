"""The sizes of a checkpoint's tensors, from the headers of its safetensors files.

Format (huggingface.co/docs/safetensors): 8 bytes, the header's length N as a little-endian unsigned integer; N bytes of JSON, mapping each
tensor's name to its dtype, shape and data_offsets (begin, end, counted from the header's end); then the data, without gaps.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.errors import UsageError

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Weights:
    """Bytes stored by dtype, and the shape of every tensor by its name."""

    stored_bytes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]

    def served_bytes(self, float_bytes: int) -> int:
        """Bytes once loaded: vLLM casts plain floats to its dtype of `float_bytes`, and keeps packed integers and 8-bit floats."""
        return sum(size // FLOAT_BYTES[dtype] * float_bytes if dtype in FLOAT_BYTES else size for dtype, size in self.stored_bytes.items())


def read_weights(folder: Path) -> Weights | None:
    """Reads the headers only: kilobytes, whatever the model's size. None without safetensors.

    Raises UsageError where a file that the index names is missing, cut short, or no safetensors file.
    """
    files = _files(folder)
    if not files:
        return None
    stored: Counter[str] = Counter()
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, tensor in _header(file).items():
            begin, end = tensor["data_offsets"]
            stored[tensor["dtype"]] += end - begin
            shapes[name] = tuple(tensor["shape"])
    return Weights(dict(stored), shapes)


def _files(folder: Path) -> list[Path]:
    """The files that vLLM would load. A folder may hold the same weights twice (consolidated.safetensors): the index decides."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as wrong:
            raise UsageError(f"{index} maps no tensors to files; fetch it again") from wrong
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UsageError(f"{folder}: {len(missing)} of {len(files)} weight files are missing ({missing[0]}, ...); finish the download")
        return files
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _header(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise UsageError(f"{file} is not a whole safetensors file ({size} bytes); fetch it again")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            promised = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (ValueError, KeyError, AttributeError, TypeError) as wrong:
            raise UsageError(f"{file} is not a safetensors file: its header describes no tensors; fetch it again") from wrong
    if size != promised:
        raise UsageError(f"{file} has {size} bytes, and its header promises {promised}; fetch it again")
    return header
