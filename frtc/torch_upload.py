"""A checkpoint's tensors sent to a GPU by a few threads while the model is traced.

    with uploading(opened, device) as uploads:
        ...                                 # trace
        uploads.made(expression)            # a weight that only moves what the tensors hold, on the device, or None

Reading, copies of pages and copies to the device let Python go on. The host holds STAGING bytes a thread. Nothing is
sent where the device has no room for the tensors beside the weights that are made of them.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from frtc.codegen.weights import MOVES, Lookup
from frtc.lowering.ir import Graph, Node
from frtc.torch_ops import OPS
from frtc.torch_tensors import NUMPY, TORCH, bytes_of, stored

if TYPE_CHECKING:
    from frtc.compiler import Opened

THREADS = min(4, os.cpu_count() or 1)
STAGING = 16 << 20  # bytes of pinned memory for each thread
ROOM = 4 << 30  # bytes of the device beside tensors and weights: values of a run


class Uploads:
    """keys: parameter -> tensor of the checkpoint; each tensor is read and sent once."""

    def __init__(self, tensors: Lookup, keys: Mapping[str, str], device: torch.device) -> None:
        self.tensors, self.device, self.own = tensors, device, local()
        self.pool = ThreadPoolExecutor(THREADS, "upload")
        some = {key: parameter for parameter, key in keys.items()}
        sent = {key: self.pool.submit(self._sent, parameter) for key, parameter in some.items()}
        self.tensors_of: dict[str, Future[Tensor]] = {parameter: sent[key] for parameter, key in keys.items()}

    def made(self, expression: Node) -> Tensor | None:
        """The weight, contiguous; each tensor is rounded once to its type, as codegen/weights.py does."""
        nodes = Graph("weight", (), (("out", expression),)).nodes
        if any(n.op not in MOVES or (n.op == "tensor" and n["key"] not in self.tensors_of) for n in nodes):
            return None
        values: dict[Node, Tensor] = {}
        for node in nodes:
            if node.op != "tensor":
                values[node] = OPS[node.op](*(values[a] for a in node.operands), **dict(node.attrs))
                continue
            raw = self.tensors_of[node["key"]].result()
            if raw.dtype == torch.float64 and node.dtype != "f64":
                return None  # torch would round twice
            values[node] = stored(raw, node.t)
        return values[expression].contiguous()

    def close(self) -> None:
        """What nothing was made of goes."""
        self.pool.shutdown(cancel_futures=True)
        self.tensors_of = {}

    def _sent(self, parameter: str) -> Tensor:
        array = self.tensors(parameter)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        found = torch.empty(array.shape, dtype=TORCH[NUMPY[array.dtype]], device=self.device)
        to, (pinned, memory) = found.reshape(-1).view(torch.uint8), self._staging()
        for at in range(0, raw.size, STAGING):
            count = min(STAGING, raw.size - at)
            memory[:count] = raw[at : at + count]
            to[at : at + count].copy_(pinned[:count])  # returns when the bytes are there
        return found

    def _staging(self) -> tuple[Tensor, np.ndarray[Any, Any]]:
        """A thread's memory, as both see it."""
        if not hasattr(self.own, "pinned"):
            self.own.pinned = torch.empty(STAGING, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return self.own.pinned, bytes_of(self.own.pinned)


@contextmanager
def uploading(opened: Opened, device: torch.device) -> Iterator[Uploads | None]:
    """None on a CPU, and where there is no room."""
    if device.type != "cuda" or not _fits(opened, device):
        yield None
        return
    uploads = Uploads(opened.read, opened.keys, device)
    try:
        yield uploads
    finally:
        uploads.close()


def _fits(opened: Opened, device: torch.device) -> bool:
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = sum(opened.checkpoint.tensors[key].nbytes for key in set(opened.keys.values()))
    return free >= 2 * nbytes + ROOM
