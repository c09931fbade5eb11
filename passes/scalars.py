"""Device scalars of different programs as one expression: where the expressions are equal, so are the numbers."""

from __future__ import annotations

from collections.abc import Iterator

from frtc.lowering.ir import Let, Module, Node, Repeat, Run, Step, While, make, walk
from frtc.lowering.ops import POINTWISE, SHAPE


class Scalars:
    """Scalars in terms of inputs that no program changes.

    runs      programs of the schedule, in the order of their first runs
    early     names that are read before any program has written them
    writers   name -> the programs that write it, "" for the schedule itself
    """

    def __init__(self, module: Module) -> None:
        self.module, self.early = module, set(module.inputs)
        self.runs = list(dict.fromkeys(_runs(module.schedule)))
        self.writers: dict[str, set[str]] = {name: {""} for name in _set_by(module.schedule)}
        for graph in module.graphs:
            for name, _ in graph.outputs:
                self.writers.setdefault(name, set()).add(graph.name)
        self._known: dict[Node, Node | None] = {}

    def of(self, node: Node) -> Node | None:
        """`node` with what other programs wrote replaced by what they wrote; None if it is more than pointwise."""
        if node not in self._known:
            self._known[node] = self._resolved(node)
        return self._known[node]

    def _resolved(self, node: Node) -> Node | None:
        done: dict[Node, Node] = {}
        for n in walk([node]):
            found: Node | None = None
            if n.op == "input":
                found = self._written(n)
            elif n.is_const:
                found = n
            elif n.op in POINTWISE | SHAPE:
                found = make(n.op, [None if a is None else done[a] for a in n.args], dict(n.attrs), n.type, n.loc)
            if found is None:
                return None
            done[n] = found
        return done[node]

    def _written(self, node: Node) -> Node | None:
        """What the one program that writes this input computes, if it ran before anything read it."""
        name = node["name"]
        programs = self.writers.get(name)
        if programs is None:
            return node
        if len(programs) > 1 or not programs <= set(self.runs) or name in self.early:
            return None
        written = [n for g in self.module.graphs if g.name in programs for k, n in g.outputs if k == name]
        values = {self.of(n) if n.type == node.type else None for n in written}
        return values.pop() if len(values) == 1 else None


def _runs(steps: tuple[Step, ...]) -> Iterator[str]:
    for step in steps:
        if isinstance(step, Run):
            yield step.program
        elif isinstance(step, Repeat | While):
            yield from _runs(step.body)


def _set_by(steps: tuple[Step, ...]) -> Iterator[str]:
    """Names that the schedule itself sets."""
    for step in steps:
        if isinstance(step, Repeat | While):
            yield from _set_by(step.body)
        if isinstance(step, Let | Repeat):
            yield step.name if isinstance(step, Let) else step.index
