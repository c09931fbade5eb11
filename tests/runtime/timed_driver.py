"""The null driver with a clock: a graph takes as long as its longest path of kernels with planted times.

Every kernel node also counts itself in the first byte of the states, as a kernel that works in place would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tests.runtime.null_driver import Graph, NullApi

STEP_US = 0.032  # of the clock
EMPTY_US = 1.5  # from one event of a graph to the next where nothing lies between
SWINGS = 20.0  # replays of a sixth of a swing of the clocks


class TimedApi(NullApi):
    """us      microseconds of each kernel, by symbol
    states   address of the states, when it is known
    swing    how far clocks swing, of all times
    found    the first byte of the states as each graph found it, with the graph's kernels
    """

    def __init__(self, sizes: dict[str, tuple[int, ...]], us: Mapping[str, float], sm: int = 90) -> None:
        super().__init__(sizes, sm)
        self.us, self.states, self.swing = us, 0, 0.0
        self.at: dict[int, float] = {}  # of events
        self.found: list[tuple[int, list[str]]] = []
        self.replays, self.now = 0, 0.0

    def do_cuGraphLaunch(self, graph: Graph, stream: Any) -> None:
        ends: dict[int, float] = {}
        self.replays += 1
        slower = 1 + self.swing * math.sin(self.replays / SWINGS)
        symbols = [what.symbol for _, _, kind, what in graph.nodes if kind == "kernel"]
        for handle, after, kind, what in graph.nodes:
            begin = max((ends[node] for node in after), default=0.0)
            ends[handle] = begin + (slower * self.us[what.symbol] if kind == "kernel" else EMPTY_US if after else 0.0)
            if kind == "event":
                self.at[what] = self.now + ends[handle]
        self.now += max(ends.values(), default=0.0)
        if self.states:
            first = self.device(self.states, 1)
            self.found.append((first[0], symbols))
            first[0] = (first[0] + len(symbols)) % 256

    def do_cuEventRecord(self, event: int, stream: Any) -> None:
        self.at[event] = self.now

    def do_cuEventElapsedTime(self, start: int, end: int) -> float:
        """Every third time a step late."""
        return (round((self.at[end] - self.at[start]) / STEP_US) + (self.replays % 3 == 0)) * STEP_US / 1e3

    def do_cuMemcpyDtoDAsync(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        self.device(to, nbytes)[:] = bytes(self.device(source, nbytes))
