"""The IR: typed, SSA, immutable, interned.

A Graph computes named results from named inputs. A Module is a set of graphs (programs, with variants), the
expressions that make its weights from the model's parameters, and a schedule. Types carry an optional scale, so that
FP8, MX and NVFP4 are instances of one type. States are values that outlive a run: `write` returns the next version of
one, and the chain of versions orders all reads and writes.

Nodes are interned: equal means identical, so common subexpressions vanish as they are built. `loc` is not part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from frtc.kernels.dtypes import DTYPES

Attr = Any  # int, float, bool, str, None or a (nested) tuple of them


@dataclass(frozen=True, slots=True)
class Scale:
    """How stored elements become numbers: value = element * scale[block that holds it].

    dtype    element type of the scales (f32, e8m0, e4m3)
    block    elements per scale along each of the last axes; () is one scale for the whole tensor
    axis     the axis that the scales run along when block is (1,) (per channel, per row); None otherwise
    layout   order of the scales in memory ("linear", or a name that a kernel family defines)
    """

    dtype: str
    block: tuple[int, ...] = ()
    axis: int | None = None
    layout: str = "linear"

    def __str__(self) -> str:
        block = "x".join(map(str, self.block)) or "tensor"
        return f"{{{self.dtype} {block} {'_' if self.axis is None else self.axis} {self.layout}}}"


@dataclass(frozen=True, slots=True)
class Type:
    """Element type and shape of a value, and how its elements are scaled (None: they are the numbers)."""

    dtype: str
    shape: tuple[int, ...]
    scale: Scale | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:  # elements
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    @property
    def nbytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize

    @property
    def is_float(self) -> bool:
        return DTYPES[self.dtype].kind == "float"

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{self.scale or ''}"


AnyType = Type | tuple[Type, ...]
CONST_LEAVES = frozenset({"const", "weight", "tensor"})


class Node:
    """One value: op, operands (None where an optional one is absent), attributes, type. Built by the ops.

    is_const is true when the value depends on nothing but literals and parameters.
    """

    __slots__ = ("__weakref__", "args", "attrs", "is_const", "loc", "op", "type")
    op: str
    args: tuple[Node | None, ...]
    attrs: tuple[tuple[str, Attr], ...]
    type: AnyType
    loc: str
    is_const: bool

    def __getitem__(self, name: str) -> Attr:
        return dict(self.attrs)[name]

    def get(self, name: str, default: Attr = None) -> Attr:
        return dict(self.attrs).get(name, default)

    @property
    def operands(self) -> tuple[Node, ...]:
        return tuple(a for a in self.args if a is not None)

    @property
    def t(self) -> Type:
        """The type of a node with a single result."""
        assert isinstance(self.type, Type), f"{self.op} has several results"
        return self.type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.t.shape

    @property
    def dtype(self) -> str:
        return self.t.dtype

    def __repr__(self) -> str:
        return f"<{self.op} : {self.type}>"


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Node] = weakref.WeakValueDictionary()


def make(op: str, args: Iterable[Node | None], attrs: Mapping[str, Attr], type: AnyType, loc: str = "") -> Node:
    """The one node with these parts. A repeated call returns the same object; its first `loc` stays."""
    operands, pairs = tuple(args), tuple(sorted(attrs.items()))
    key = (op, operands, repr(pairs), type)  # repr tells 1, 1.0, True and -0.0 apart
    node = _interned.get(key)
    if node is None:
        node = object.__new__(Node)
        node.op, node.args, node.attrs, node.type, node.loc = op, operands, pairs, type, loc
        inputs = [a for a in operands if a is not None]
        node.is_const = op in CONST_LEAVES or (op != "state" and op != "input" and all(a.is_const for a in inputs))
        _interned[key] = node
    return node


@contextmanager
def fresh_nodes() -> Iterator[None]:
    """Intern in a table of its own: nodes made inside share nothing with those outside, not even their `loc`.

    A compilation runs inside one, so that what it writes does not depend on what the process traced before.
    """
    global _interned
    outside, _interned = _interned, weakref.WeakValueDictionary()
    try:
        yield
    finally:
        _interned = outside


def input_(name: str, type: Type) -> Node:
    return make("input", (), {"name": name}, type)


def state(name: str, type: Type) -> Node:
    """The version of a state at the start of a run."""
    return make("state", (), {"name": name}, type)


def weight(name: str, type: Type) -> Node:
    """A weight by name; the module's `weights` graph says what it is made of."""
    return make("weight", (), {"name": name}, type)


def tensor(key: str, type: Type) -> Node:
    """A parameter of the model by its name: a leaf of weight expressions. Who evaluates one looks its value up."""
    return make("tensor", (), {"key": key}, type)


def item(node: Node, index: int) -> Node:
    """Result `index` of a node with several results."""
    assert isinstance(node.type, tuple)
    return make("item", (node,), {"index": index}, node.type[index], node.loc)


def walk(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node below the roots once, operands first, in an order that depends only on the graph."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(r, False) for r in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.operands) if a not in seen)


@dataclass(frozen=True, slots=True)
class Graph:
    """One program (or one of its shape variants).

    inputs    "input" nodes in calling order
    states    "state" nodes: the versions at the start
    outputs   named results, in order
    writes    (state name, its last version) for each state that the program changes
    """

    name: str
    inputs: tuple[Node, ...]
    outputs: tuple[tuple[str, Node], ...]
    states: tuple[Node, ...] = ()
    writes: tuple[tuple[str, Node], ...] = ()
    variant: str = ""

    @property
    def roots(self) -> tuple[Node, ...]:
        return tuple(n for _, n in self.outputs) + tuple(n for _, n in self.writes)

    @property
    def nodes(self) -> list[Node]:
        """All nodes that the results need, operands first."""
        return list(walk(self.roots))

    def count(self, op: str) -> int:
        return sum(node.op == op for node in self.nodes)

    def users(self) -> dict[Node, int]:
        """How many operands and results read each node."""
        uses: dict[Node, int] = {}
        for node in self.nodes:
            for a in node.operands:
                uses[a] = uses.get(a, 0) + 1
        for root in self.roots:
            uses[root] = uses.get(root, 0) + 1
        return uses

    def replace(self, change: Mapping[Node, Node]) -> Graph:
        """The graph with its results (not their operands) exchanged by `change`."""
        return Graph(
            self.name,
            self.inputs,
            tuple((k, change.get(n, n)) for k, n in self.outputs),
            self.states,
            tuple((k, change.get(n, n)) for k, n in self.writes),
            self.variant,
        )


def rebuild(graph: Graph, visit: Callable[[Node, Node], Node]) -> Graph:
    """Rebuild bottom-up. `visit(old, new)` gets each node with its operands exchanged, and returns its successor."""
    done: dict[Node, Node] = {}
    for node in graph.nodes:
        args = tuple(None if a is None else done[a] for a in node.args)
        same = args == node.args
        done[node] = visit(node, node if same else make(node.op, args, dict(node.attrs), node.type, node.loc))
    return graph.replace(done)


@dataclass(frozen=True, slots=True)
class Run:
    """Run one program: inputs come from the environment by name, outputs go there."""

    program: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """Run `body` `count` times; `index` names the step number (i32[]) in the environment."""

    count: int
    index: str
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class While:
    """Run `body` as long as the scalar `condition` (bool[] or integer) in the environment is not zero."""

    condition: str
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Let:
    """`name` in the environment becomes what `source` is now: a loop-carried value before its first round."""

    name: str
    source: str


Step = Run | Repeat | While | Let


@dataclass(frozen=True, slots=True)
class Module:
    """A model: programs, the expressions that make their weights, and the schedule that runs them.

    graphs     all variants of all programs, in order
    weights    a graph without inputs: each output names a weight, its leaves are parameters
    schedule   what one inference runs
    outputs    (name outside, name in the environment) of each result of an inference
    """

    name: str
    graphs: tuple[Graph, ...]
    weights: Graph = field(default_factory=lambda: Graph("weights", (), ()))
    schedule: tuple[Step, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()

    def graph(self, name: str, variant: str = "") -> Graph:
        for g in self.graphs:
            if g.name == name and g.variant == variant:
                return g
        have = ", ".join(f"{g.name}[{g.variant}]" if g.variant else g.name for g in self.graphs)
        raise KeyError(f"module {self.name} has no program {name}[{variant}]; it has {have}")

    def map(self, change: Callable[[Graph], Graph]) -> Module:
        """The module with each program (not the weights) exchanged."""
        return replace(self, graphs=tuple(change(g) for g in self.graphs))

    @property
    def inputs(self) -> dict[str, Type]:
        """What an inference needs from outside: names read before any step has written them."""
        needed: dict[str, Type] = {}
        _collect_inputs(self, self.schedule, set(), needed)
        return needed


def _collect_inputs(module: Module, steps: tuple[Step, ...], known: set[str], needed: dict[str, Type]) -> None:
    for step in steps:
        if isinstance(step, Run):
            graphs = [g for g in module.graphs if g.name == step.program]
            for node in (n for g in graphs for n in g.inputs):
                if node["name"] not in known:
                    needed.setdefault(node["name"], node.t)
            known.update(k for g in graphs for k, _ in g.outputs)
        elif isinstance(step, Let):
            reader = next((n.t for g in module.graphs for n in g.inputs if n["name"] == step.name), None)
            if step.source not in known and reader is not None:
                needed.setdefault(step.source, reader)
            known.add(step.name)
        else:
            known |= {step.index} if isinstance(step, Repeat) else set()
            _collect_inputs(module, step.body, known, needed)
