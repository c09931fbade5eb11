"""The process that measures: a kernel that hangs, traps or corrupts memory takes nothing with it but this.

    python -m frtc.tuning.child [emulated]

It says who it is, then answers one line for each line it reads, the name of a file with a pickled Chain, or with the
name of that of a Trial. Its parent wrote these files; nothing else is unpickled. After a fault of the GPU it ends, as
its context is of no more use.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from frtc.errors import FrtcError
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand
from frtc.runtime.driver import Driver
from frtc.runtime.emulator import POISON
from frtc.runtime.graph import Graph
from frtc.runtime.plan import STATE, Ref, Stage
from frtc.tuning.chain import Chain
from frtc.tuning.inputs import Fill, elements, values
from frtc.tuning.process import own_output
from frtc.tuning.trial import Asked, run

WARM_UP, REPLAYS = 3, 21
SAMPLES = 1024  # elements of each result that the parent compares between candidates
EMULATED = "emulated"


class Bench:
    """One GPU with the operands of the last chain on it."""

    def __init__(self, driver: Driver | None = None) -> None:
        self.driver = driver or Driver()
        with self.driver.current():
            self.stream = self.driver.call("cuStreamCreate", 0)
            self.marks = [self.driver.call("cuEventCreate", 0) for _ in range(2)]
        self.blocks: dict[str, tuple[int, int]] = {}  # space -> (address, bytes)
        self.filled: tuple[Fill, ...] = ()

    def measure(self, chain: Chain) -> tuple[float, list[list[float]]]:
        """(microseconds of one call with all its launches, p50 of replays; some elements of each result)."""
        with self.driver.current():
            self._reserve(chain)
            modules = [self.driver.call("cuModuleLoadData", image.cubin) for image in chain.kernels]
            named = zip(modules, chain.kernels, strict=True)
            functions = [self.driver.function(module, image.symbol, image.smem) for module, image in named]
            addresses = {space: address for space, (address, _) in self.blocks.items()}
            steps = [(Stage("chain", chain.calls), 0)]
            graph = Graph(self.driver, functions, addresses, steps, self.marks)
            times = [self._replay(graph) for _ in range(WARM_UP + REPLAYS)][WARM_UP:]
            graph.destroy()
            for module in modules:
                self.driver.call("cuModuleUnload", module)
            return median(times) / len(chain.calls), [self._some(ref) for ref in chain.calls[-1].results]

    def clear(self) -> None:
        """Give the memory back: a whole program needs its own."""
        with self.driver.current():
            while self.blocks:
                self.driver.call("cuMemFree", self.blocks.popitem()[1][0])
        self.filled = ()

    def _replay(self, graph: Graph) -> float:
        graph.launch(self.stream)
        self.driver.call("cuStreamSynchronize", self.stream)
        return float(self.driver.call("cuEventElapsedTime", *self.marks)) * 1e3

    def _reserve(self, chain: Chain) -> None:
        """Memory for every space, operands filled, counters zero."""
        fresh = chain.fills != self.filled
        for space, nbytes in chain.spaces.items():
            address, had = self.blocks.get(space, (0, 0))
            if had < max(nbytes, 1):
                if address:
                    self.driver.call("cuMemFree", address)
                self.blocks[space], fresh = (self.driver.alloc(nbytes), max(nbytes, 1)), True
        if fresh:
            self.filled = ()
            for fill in chain.fills:
                self._fill(fill)
            self.filled = chain.fills
        self.driver.call("cuMemsetD8", self.blocks[STATE][0], 0, self.blocks[STATE][1])
        for ref in chain.calls[-1].results:  # what the candidate before computed must not pass for this one's
            address, nbytes = self._span(ref)
            if nbytes:
                self.driver.call("cuMemsetD8", address, POISON, nbytes)
        self.driver.call("cuCtxSynchronize")

    def _span(self, ref: Ref) -> tuple[int, int]:
        """(address, bytes) from the first to the last element."""
        nbytes = elements(Operand(ref.dtype, ref.shape, ref.strides)) * DTYPES[ref.dtype].itemsize
        return self.blocks[ref.space][0] + ref.offset, nbytes

    def _some(self, ref: Ref) -> list[float]:
        """Always the same elements, drawn at random."""
        address, nbytes = self._span(ref)
        host, dtype = np.empty(nbytes, np.uint8), DTYPES[ref.dtype].numpy
        if not nbytes:
            return []
        self.driver.call("cuMemcpyDtoH", host.ctypes.data, address, nbytes)
        generator = np.random.default_rng(nbytes)
        view = np.ndarray(ref.shape, dtype, host, 0, [s * dtype.itemsize for s in ref.strides])
        drawn = tuple(generator.integers(0, n, SAMPLES) for n in ref.shape)
        return [float(x) for x in np.atleast_1d(view[drawn] if ref.shape else view[()])]

    def _fill(self, fill: Fill) -> None:
        data, start = values(fill), self.blocks[fill.space][0] + fill.offset
        if data.nbytes:
            self.driver.call("cuMemcpyHtoD", start, data.ctypes.data, data.nbytes)
            for copy in range(1, fill.copies):
                self.driver.call("cuMemcpyDtoD", start + copy * fill.pitch, start, data.nbytes)


def main(how: str = "") -> int:
    say = own_output()
    try:
        bench = None if how == EMULATED else Bench()
    except FrtcError as error:
        say({"error": error.what, "hint": error.hint})
        return error.exit_code
    say({"device": asdict(bench.driver.device) if bench else {"name": "the CPU, emulated", "sm": 0}})
    for line in sys.stdin:
        try:
            say(answer(pickle.loads(Path(line.strip()).read_bytes()), bench))
        except FrtcError as error:
            say({"error": error.what})
            return 1
    return 0


def answer(asked: Chain | Asked, bench: Bench | None) -> dict[str, Any]:
    """To a Chain, or to a whole program with its weights; without a bench only that, emulated."""
    if isinstance(asked, Asked):
        if bench:
            bench.clear()
        return run(pickle.loads(Path(asked.path).read_bytes()), asked.probes, bench is not None)
    if bench is None:
        raise FrtcError("tune.process", "a chain is measured on a GPU, or not at all")
    us, some = bench.measure(asked)
    return {"us": us, "results": some}


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
