"""One CUDA graph of explicit kernel nodes: a whole inference, or one stage.

Inside a stage the edges are those of Call.after; several launches of one call form a chain; a stage starts when the one
before it is complete. Where stages overlap, calls wait for calls instead, whatever stages they are of. Addresses are
written into the nodes; where one changes (a slot bound to other memory, another round of a table), the nodes that hold
it are updated in place. Copies of inputs and outputs may be nodes too, the first and the last, of memory that stays
where it is.

Edges from kernels to an early launch are programmatic: its blocks may begin when all blocks of those kernels have
released it or ended, and wait inside for the end of those kernels. That is the end of everything before them too. For
let kernel B be complete. Either it was early, then some thread of it has waited for the kernels before it; or it was
not, then it began after their end. So those are complete, and by induction all that come before. What they wrote is
visible: it was when the kernel behind them stopped waiting, or began. Therefore what a path orders needs no edge of its
own here either, and `after` means for early launches what it means for others. Edges between stages that overlap are
full, for a launch may read before it waits what stages before its own wrote (codegen/settled.py). FRTC_EDGES=full makes
no edge programmatic, FRTC_EDGES=serial has stages one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frtc.errors import UsageError
from frtc.runtime import tensor_map
from frtc.runtime.driver import Driver
from frtc.runtime.plan import ARENA, STATE, Call, Launch, Overlap, Ref, Stage, joined

EDGES = ("", "full", "serial")  # values of FRTC_EDGES


@dataclass(slots=True)
class Node:
    """`round` indexes the tables that the launch reads."""

    handle: Any
    call: Call
    launch: Launch
    round: int


@dataclass(frozen=True, slots=True)
class Lead:
    """A launch in front of all others that is of no stage: `addresses` are its parameters."""

    function: Any
    launch: Launch
    addresses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes between pinned memory and the device, by their addresses."""

    host: int
    device: int
    nbytes: int


class Graph:
    """`events`: one to record at the start and after each step, or none. lead: the first launch, if there is one.

    copies      in front of everything to the device, and behind everything from there; or none
    overlap     of the first steps, where their calls wait for each other
    addresses   of the spaces, and of each slot as "slot" + its name; shared with the session, which changes it
    """

    def __init__(
        self,
        driver: Driver,
        functions: Sequence[Any],
        addresses: Mapping[str, int],
        steps: Sequence[tuple[Stage, int]],
        events: Sequence[Any] = (),
        lead: Lead | None = None,
        copies: tuple[Copy, Copy] | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self.driver, self.functions, self.addresses = driver, functions, addresses
        self.nodes: list[Node] = []
        edges = os.environ.get("FRTC_EDGES", "")
        if edges not in EDGES:
            raise UsageError("option.edges", f"FRTC_EDGES={edges}", [("known", ", ".join(EDGES[1:]))])
        self.full_edges, beside = edges == "full", overlap if edges != "serial" else None
        self.graph = driver.call("cuGraphCreate", 0)
        self.executable: Any = None
        try:
            ends = self._add_copy(copies[0], [], back=False) if copies else []
            ends = start = self._record(self._add_lead(lead, ends), events[:1])
            first = len(beside.stages) if beside else 0
            if beside:
                ends = self._add_overlap(beside, [stage for stage, _ in steps[:first]], start) or start
            for i, (stage, round) in enumerate(steps[first:], first):
                full = bool(events) or ends is start  # still: stages may have no calls
                ends = self._add_calls(stage.calls, [0] * len(stage.calls), round, ends, full) or ends
                ends = self._record(ends, events[i + 1 : i + 2])
            if copies:
                self._add_copy(copies[1], ends, back=True)
            self.executable = driver.call("cuGraphInstantiate", self.graph, 0)
        except BaseException:
            self.destroy()
            raise

    def launch(self, stream: Any) -> None:
        self.driver.call("cuGraphLaunch", self.executable, stream)

    def upload(self, stream: Any) -> None:
        self.driver.call("cuGraphUpload", self.executable, stream)

    def rebind(self, slot: str) -> None:
        """The address of a slot has changed."""
        self._update([node for node in self.nodes if any(ref.slot == slot for ref in _refs(node))])

    def set_round(self, round: int) -> None:
        """Tables are read at `round` from now on; for graphs of a single stage."""
        stale = [n for n in self.nodes if n.round != round and any(ref.step for ref in _refs(n))]
        for node in stale:
            node.round = round
        self._update(stale)

    def destroy(self) -> None:
        if self.executable is not None:
            self.driver.call("cuGraphExecDestroy", self.executable)
        self.driver.call("cuGraphDestroy", self.graph)

    def _add_copy(self, copy: Copy, after: list[Any], back: bool) -> list[Any]:
        to, source = (copy.host, copy.device) if back else (copy.device, copy.host)
        return [self.driver.add_copy(self.graph, after, to, source, copy.nbytes, back)]

    def _add_lead(self, lead: Lead | None, after: list[Any]) -> list[Any]:
        """What it writes are inputs, which early launches may read before they wait: edges from there are full."""
        if lead is None:
            return after
        return [self.driver.add_kernel(self.graph, after, lead.function, lead.launch, lead.addresses)]

    def _add_overlap(self, overlap: Overlap, stages: Sequence[Stage], start: list[Any]) -> list[Any]:
        of = [i for i, stage in enumerate(stages) for _ in stage.calls]
        return self._add_calls(joined(stages, overlap.after), of, 0, start, full=bool(start))

    def _add_calls(
        self, calls: Sequence[Call], stage: Sequence[int], round: int, start: list[Any], full: bool
    ) -> list[Any]:
        """The nodes that complete them. stage: of each call; full: edges from `start` are full, as they are from
        events."""
        last: list[Any] = []  # of each call
        for i, call in enumerate(calls):
            others = [last[j] for j in call.after if stage[j] != stage[i]]
            own = [last[j] for j in call.after if stage[j] == stage[i]] if call.after else start
            early = not self.full_edges and bool(call.after or not full)
            for launch in call.launches:
                node = Node(None, call, launch, round)
                self._add(node, *((others, own) if early and launch.early else (others + own, [])))
                others, own, early = [], [node.handle], not self.full_edges
            last += own
        waited_for = {j for call in calls for j in call.after}
        return [handle for j, handle in enumerate(last) if j not in waited_for]

    def _add(self, node: Node, full: list[Any], early: list[Any]) -> None:
        """With edges of both kinds from the nodes that it waits for."""
        function = self.functions[node.launch.kernel]
        node.handle = self.driver.add_kernel(self.graph, full, function, node.launch, self._values(node))
        self.driver.add_early_edges(self.graph, early, node.handle)
        self.nodes.append(node)

    def _record(self, after: list[Any], events: Sequence[Any]) -> list[Any]:
        for event in events:
            after = [self.driver.call("cuGraphAddEventRecordNode", self.graph, after, len(after), event)]
        return after

    def _update(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            function = self.functions[node.launch.kernel]
            self.driver.set_kernel(self.executable, node.handle, function, node.launch, self._values(node))

    def _values(self, node: Node) -> Iterator[int | float | tensor_map.Cell]:
        spaces = {"scratch": (ARENA, node.call.scratch[0]), "counters": (STATE, node.call.counters[0])}
        for kind, value in node.launch.params:
            if kind in ("operand", "result"):
                yield self._address(_ref(node.call, kind, int(value)), node.round)
            elif kind == "tensormap":
                map = node.launch.tensormaps[int(value)]
                yield self.driver.encode(map, self._address(tensor_map.ref_of(map, node.call), node.round))
            elif kind in spaces:
                space, offset = spaces[kind]
                yield self.addresses[space] + offset + int(value)
            else:
                yield value

    def _address(self, ref: Ref | None, round: int) -> int:
        """Null for an absent operand."""
        return 0 if ref is None else self.addresses[ref.space + ref.slot] + ref.offset + round * ref.step


def _ref(call: Call, kind: str, index: int) -> Ref | None:
    return call.operands[index] if kind == "operand" else call.results[index]


def _refs(node: Node) -> Iterator[Ref]:
    """What the launch is given the addresses of."""
    named = [(kind, int(value)) for kind, value in node.launch.params if kind in ("operand", "result")]
    for kind, index in (*named, *(map.of for map in node.launch.tensormaps)):
        ref = _ref(node.call, kind, index)
        if ref is not None:
            yield ref
