"""Writes a safetensors file of any size piece by piece: header first, tensor bytes in any order and from any thread."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from frtc.models.checkpoint import DTYPES

SPELLING = {name: kind for kind, (name, _) in DTYPES.items()}


Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (element type as in the IR, shape)


def header(tensors: Layout, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Leading bytes of the file, where each tensor begins behind them, and how many bytes all tensors take.

    Tensors lie in the order of their names, without gaps.
    """
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offsets, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items()):
        kind = SPELLING[dtype]
        offsets[name], end = end, end + math.prod(shape) * DTYPES[kind][1].itemsize
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets, end


class SafetensorsWriter:
    """A new file of full length with its header; `write` fills it."""

    def __init__(self, path: Path, tensors: Layout, metadata: Mapping[str, str]) -> None:
        head, self._offsets, size = header(tensors, metadata)
        self._base = len(head)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._put(head, 0)
        os.ftruncate(self._fd, self._base + size)

    def write(self, name: str, piece: np.ndarray[Any, Any], at: int) -> None:
        """Puts `piece` `at` bytes behind the tensor's start."""
        self._put(np.ascontiguousarray(piece).view(np.uint8).data, self._base + self._offsets[name] + at)

    def _put(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._fd)
