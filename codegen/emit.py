"""Emit: a program's nodes become calls, in order: kernel chosen, operands placed, launches computed.

Views and constants cost nothing, an `index` by the round of a repeat is an address that moves from round to round, and
a concat is written in place by its parts. Everything else needs a kernel; where a kernel refuses a strided operand, the
operand is copied first, and that is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from frtc.codegen.placement import Placement, parts, targets
from frtc.codegen.places import Buffer, Place, new_place, padded
from frtc.codegen.pointwise import copy_site, scalar, site_attrs
from frtc.kernels.catalog import Catalog, Choice, NoKernel
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand, Site
from frtc.kernels.targets import Target
from frtc.lowering.ir import Graph, Node, Type
from frtc.lowering.ops import POINTWISE
from frtc.lowering.strided import Strided
from frtc.runtime.plan import ARENA, STATE

WeightPlace = Callable[[Node], Place]


@dataclass(slots=True)
class Emitted:
    """One call before memory is planned."""

    name: str
    site: Site
    choice: Choice
    operands: tuple[Place | None, ...]
    results: tuple[Place, ...]
    node: Node | None  # None for a copy
    scratch: Buffer | None = None
    counters: Buffer | None = None


@dataclass(slots=True)
class Emitter:
    """Emits one program.

    counter   name of the input that counts the rounds of the enclosing repeat, "" if there is none
    weights   where a weight node lies
    """

    graph: Graph
    placement: Placement
    target: Target
    catalog: Catalog
    families: tuple[str, ...]
    counter: str
    weights: WeightPlace
    calls: list[Emitted] = field(default_factory=list)
    places: dict[Node, tuple[Place, ...]] = field(default_factory=dict)
    wanted: dict[Node, Place] = field(default_factory=dict)

    def run(self) -> list[Emitted]:
        self.wanted = targets(self.graph, self.placement)
        for node in self.graph.nodes:
            self._visit(node)
        for name, node in self.graph.outputs:
            home = self.placement.shared[name]
            if not _same(self._place(node), home):
                self._copy(self._place(node), home, f"result {name}")
        return self.calls

    def _visit(self, node: Node) -> None:
        if node.op in ("input", "state"):
            if node["name"] != self.counter:
                self.places[node] = (self.placement.shared[node["name"]],)
        elif node.op == "weight":
            self.places[node] = (self.weights(node),)
        elif node.op == "item" and node.args[0] is not None:
            self.places[node] = (self.places[node.args[0]][node["index"]],)
        elif node.op == "view":
            self.places[node] = (self._view(node),)
        elif node.op == "index" and self._counts(node.args[1]):
            self.places[node] = (self._entry(node),)
        elif node.op in ("concat", "reshape") and not node.is_const:
            self._assemble(node)
        elif node.op in ("read", "write"):
            self._state(node)
        elif not (node.op == "const" or node.is_const):
            self._call(node)

    def _counts(self, node: Node | None) -> bool:
        return node is not None and node.op == "input" and node["name"] == self.counter

    def _place(self, node: Node) -> Place:
        return self.places[node][0]

    def _view(self, node: Node) -> Place:
        source = node.args[0]
        assert source is not None
        packed = Strided(node["shape"], node["strides"], node["offset"])
        place = self._place(source).view(packed)
        if place is None:  # padding between rows: close the gaps first
            gapless = Place(Buffer(ARENA, source.t.nbytes), source.dtype, Strided.packed(source.shape))
            self._copy(self._place(source), gapless, node.loc)
            place = gapless.view(packed)
        assert place is not None
        return place

    def _entry(self, node: Node) -> Place:
        """Entry k of a table, k the round: an address with a step."""
        assert node.args[0] is not None
        table = self._place(node.args[0])
        assert table.step == 0, "a table of tables by one counter"
        inner = Strided(table.strided.shape[1:], table.strided.strides[1:], table.strided.offset)
        size = table.strided.strides[0] * _itemsize(table)
        return replace(table, strided=inner, step=size)

    def _assemble(self, node: Node) -> None:
        """Parts that are not yet where the whole expects them are copied there."""
        whole = self.wanted[node]
        self.places[node] = (whole,)
        found = parts(node, whole)
        if not found:  # padded rows: the operand's shape is no view of the whole
            source = self._place(node.operands[0])
            gapless = Place(Buffer(ARENA, node.t.nbytes), node.dtype, Strided.packed(node.shape))
            inner = Place(gapless.buffer, node.dtype, Strided.packed(node.operands[0].shape))
            self._copy(source, inner, node.loc)
            self._copy(gapless, whole, node.loc)
        for part, place in found:
            source = self._place(part)
            if not _same(source, place):
                self._copy(source, place, node.loc)

    def _state(self, node: Node) -> None:
        source = node.args[0]
        assert source is not None
        home = self._place(source)
        if node.op == "write":
            value, at = node.args[1], scalar(node.args[2])
            assert value is not None
            if at is None:
                raise NotImplementedError("a state written at a position that only the device knows")
            target = home.strided.slice(node["axis"], int(at), int(at) + value.shape[node["axis"]], 1)
            self._copy(self._place(value), replace(home, strided=target), node.loc)
        self.places[node] = (home,)

    def _call(self, node: Node) -> None:
        types = node.type if isinstance(node.type, tuple) else (node.t,)
        items = {n["index"]: n for n in self.graph.nodes if n.op == "item" and n.args[0] is node}
        wanted = [self.wanted.get(items[i]) if i in items else None for i in range(len(types))]
        if not isinstance(node.type, tuple):
            wanted = [self.wanted.get(node)]
        results = tuple(w or new_place(ARENA, t) for w, t in zip(wanted, types, strict=True))
        sources = [a for a in node.args]
        if node.op in POINTWISE or node.op == "pointwise":
            op, attrs, kept = site_attrs(node)
            sources = kept
        else:
            op, attrs = node.op, dict(node.attrs)
        operands = [None if a is None else self._place(a) for a in sources]
        site = Site(op, _operands(operands), tuple(r.operand() for r in results), attrs)
        try:
            choice = self.catalog.select(site, self.target, self.families)
        except NoKernel as error:
            site, choice, operands = self._with_copies(site, operands, node, error)
        self.places[node] = results
        self._add(Emitted(node.loc, site, choice, tuple(operands), results, node))

    def _with_copies(
        self, site: Site, operands: list[Place | None], node: Node, error: NoKernel
    ) -> tuple[Site, Choice, list[Place | None]]:
        """Some operand's strides do not suit any kernel: copy the strided ones to gapless rows."""
        moved = [p if p is None or p.strided == padded(_type(p)) else new_place(ARENA, _type(p)) for p in operands]
        if moved == operands:
            raise error
        packed = replace(site, operands=_operands(moved))
        choice = self.catalog.select(packed, self.target, self.families)
        for old, new in zip(operands, moved, strict=True):
            if old is not None and new is not None and new is not old:
                self._copy(old, new, node.loc)
        return packed, choice, moved

    def _copy(self, source: Place, target: Place, name: str) -> None:
        site = copy_site(source.operand(), target.operand())
        choice = self.catalog.select(site, self.target, self.families)
        self._add(Emitted(name, site, choice, (source,), (target,), None))

    def _add(self, call: Emitted) -> None:
        kernel, config = call.choice.kernel, call.choice.config
        if size := kernel.scratch(call.site, config):
            call.scratch = Buffer(ARENA, size)
        if size := kernel.counters(call.site, config):
            call.counters = Buffer(STATE, size)
        self.calls.append(call)


def _same(a: Place, b: Place) -> bool:
    """The same elements in the same order; strides of axes with one element do not matter."""
    steps = [tuple(s if n > 1 else 0 for n, s in zip(p.strided.shape, p.strided.strides, strict=True)) for p in (a, b)]
    return a.buffer is b.buffer and steps[0] == steps[1] and a.strided.offset == b.strided.offset


def _operands(places: Sequence[Place | None]) -> tuple[Operand | None, ...]:
    return tuple(None if place is None else place.operand() for place in places)


def _itemsize(place: Place) -> int:
    return DTYPES[place.dtype].itemsize


def _type(place: Place) -> Type:
    return Type(place.dtype, place.strided.shape)
