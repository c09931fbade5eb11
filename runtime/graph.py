"""One CUDA graph of explicit kernel nodes: a whole inference, or one stage.

Inside a stage the edges are those of Call.after; several launches of one call form a chain; a stage starts when the one
before it is complete. Addresses are written into the nodes; where one changes (a slot bound to other memory, another
round of a table), the nodes that hold it are updated in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frtc.runtime import tensor_map
from frtc.runtime.driver import Driver
from frtc.runtime.plan import ARENA, STATE, Call, Launch, Ref, Stage


@dataclass(slots=True)
class Node:
    """`round` indexes the tables that the launch reads."""

    handle: Any
    call: Call
    launch: Launch
    round: int


class Graph:
    """`events`: one to record at the start and after each step, or none.

    addresses   of the spaces, and of each slot as "slot" + its name; shared with the session, which changes it
    """

    def __init__(
        self,
        driver: Driver,
        functions: Sequence[Any],
        addresses: Mapping[str, int],
        steps: Sequence[tuple[Stage, int]],
        events: Sequence[Any] = (),
    ) -> None:
        self.driver, self.functions, self.addresses = driver, functions, addresses
        self.nodes: list[Node] = []
        self.graph = driver.call("cuGraphCreate", 0)
        self.executable: Any = None
        try:
            ends = self._record([], events[:1])
            for i, (stage, round) in enumerate(steps):
                ends = self._add_stage(stage, round, ends) or ends
                ends = self._record(ends, events[i + 1 : i + 2])
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

    def _add_stage(self, stage: Stage, round: int, start: list[Any]) -> list[Any]:
        """The nodes that complete the stage."""
        last: list[Any] = []  # of each call
        for call in stage.calls:
            after = [last[j] for j in call.after] or start
            for launch in call.launches:
                node = Node(None, call, launch, round)
                function = self.functions[launch.kernel]
                node.handle = self.driver.add_kernel(self.graph, after, function, launch, self._values(node))
                self.nodes.append(node)
                after = [node.handle]
            last += after
        waited_for = {j for call in stage.calls for j in call.after}
        return [handle for j, handle in enumerate(last) if j not in waited_for]

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
