"""Emit: a program's nodes become calls, in order: kernel chosen, operands placed, launches computed.

Views and constants cost nothing, an `index` by the round of a repeat is an address that moves from round to round, and
a concat is written in place by its parts. Everything else needs a kernel; where a kernel refuses a strided operand, the
operand is copied first, and that is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from frtc.codegen.placement import Placement, parts, targets
from frtc.codegen.places import Buffer, Place, new_place, padded
from frtc.codegen.pointwise import copy_site, scalar, site_attrs
from frtc.codegen.states import in_order, outlived
from frtc.errors import FrtcError
from frtc.kernels.catalog import Catalog, Choice, NoKernel
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand, Site
from frtc.kernels.targets import Target
from frtc.lowering.ir import Graph, Node, Type
from frtc.lowering.ops import POINTWISE
from frtc.lowering.strided import Strided
from frtc.runtime.plan import ARENA, STATE

WeightPlace = Callable[[Node], Place]
Places = tuple[Place | None, ...]


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
    outlived: frozenset[Node] = frozenset()

    def run(self) -> list[Emitted]:
        self.wanted = targets(self.graph, self.placement)
        self.outlived = outlived(self.graph)
        for node in in_order(self.graph):
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
        elif node.op == "read":
            self._read(node)
        elif node.op == "write":
            self._write(node)
        elif not (node.op == "const" or node.is_const):
            self._call(node)

    def _counts(self, node: Node | None) -> bool:
        return node is not None and node.op == "input" and node["name"] == self.counter

    def _place(self, node: Node | None) -> Place:
        assert node is not None
        if node not in self.places:
            name = "the round of its loop" if self._counts(node) else f"{node.op} of {node.type}"
            what = f"program {self.graph.name} reads {name}, which lies nowhere on the device"
            hint = "run all passes: they turn what depends on constants and rounds alone into weights and tables"
            raise FrtcError("codegen.unplaced", what, [("at", node.loc)] if node.loc else (), hint)
        return self.places[node][0]

    def _view(self, node: Node) -> Place:
        source = self._place(node.args[0])
        packed = Strided(node["shape"], node["strides"], node["offset"])
        place = source.view(packed)
        if place is None:  # padding between rows: close the gaps first
            gapless = _gapless(source.dtype, source.strided.shape)
            self._copy(source, gapless, node.loc)
            place = gapless.view(packed)
        assert place is not None
        return place

    def _entry(self, node: Node) -> Place:
        """Entry k of a table, k the round: an address with a step."""
        table = self._place(node.args[0])
        assert table.step == 0, "a table of tables by one counter"
        inner = Strided(table.strided.shape[1:], table.strided.strides[1:], table.strided.offset)
        size = table.strided.strides[0] * _itemsize(table)
        return replace(table, strided=inner, step=size)

    def _assemble(self, node: Node) -> None:
        """Parts that are not yet where the whole expects them are copied there. A reshape of a place may be a view."""
        if node.op == "reshape" and (place := self._reshaped(node)) is not None:
            self.places[node] = (place,)
            return
        whole = self.wanted[node]
        self.places[node] = (whole,)
        found = parts(node, whole)
        if not found:  # padded rows: the operand's shape is no view of the whole
            source = self._place(node.operands[0])
            gapless = _gapless(node.dtype, node.shape)
            inner = replace(gapless, strided=Strided.packed(source.strided.shape))
            self._copy(source, inner, node.loc)
            self._copy(gapless, whole, node.loc)
        for part, place in found:
            source = self._place(part)
            if not _same(source, place):
                self._copy(source, place, node.loc)

    def _reshaped(self, node: Node) -> Place | None:
        """The source where it lies in another shape; None if its strides do not express that."""
        source = self._place(node.args[0])
        strided = source.strided.reshape(node.shape)
        return None if strided is None else replace(source, strided=strided)

    def _read(self, node: Node) -> None:
        """The state's home; a copy where the next version is written before the last use."""
        home = self._place(node.args[0])
        if node in self.outlived:
            kept = new_place(ARENA, node.t)
            self._copy(home, kept, node.loc)
            home = kept
        self.places[node] = (home,)

    def _write(self, node: Node) -> None:
        """The value goes to its place in the state's home: a copy, or a launch that reads the place on the device."""
        state, value, at = node.args
        home = self._place(state)
        self.places[node] = (home,)
        start = 0 if not node.shape else scalar(at)
        if start is None:
            self._launch(node, "write", dict(node.attrs), [state, value, at], (home,))
            return
        place = home
        if node.shape:
            stop = int(start) + self._place(value).strided.shape[node["axis"]]
            if not 0 <= start <= stop <= node.shape[node["axis"]]:
                what = f"a write of [{start}, {stop}) leaves state {node.type} along axis {node['axis']}"
                raise FrtcError("codegen.position", what, [("at", node.loc)] if node.loc else ())
            place = replace(home, strided=home.strided.slice(node["axis"], int(start), stop, 1))
        self._copy(self._place(value), place, node.loc)

    def _call(self, node: Node) -> None:
        types = node.type if isinstance(node.type, tuple) else (node.t,)
        items = {n["index"]: n for n in self.graph.nodes if n.op == "item" and n.args[0] is node}
        wanted = [self.wanted.get(items[i]) if i in items else None for i in range(len(types))]
        if not isinstance(node.type, tuple):
            wanted = [self.wanted.get(node)]
        results = tuple(w or new_place(ARENA, t) for w, t in zip(wanted, types, strict=True))
        op, attrs, sources = node.op, dict(node.attrs), list(node.args)
        if node.op in POINTWISE or node.op == "pointwise":
            op, attrs, kept = site_attrs(node)
            sources = [*kept]
        self._launch(node, op, attrs, sources, results)
        self.places[node] = results

    def _launch(
        self, node: Node, op: str, attrs: dict[str, Any], sources: list[Node | None], results: tuple[Place, ...]
    ) -> None:
        operands = tuple(None if a is None else self._place(a) for a in sources)
        site, choice, read, written = self._select(op, attrs, operands, results)
        for old, new in zip(operands, read, strict=True):
            if old is not None and new is not None and new is not old:
                self._copy(old, new, node.loc)
        self._add(Emitted(node.loc, site, choice, read, written, node))
        for old, new in zip(written, results, strict=True):
            if new is not old:
                self._copy(old, new, node.loc)

    def _select(
        self, op: str, attrs: dict[str, Any], operands: Places, results: tuple[Place, ...]
    ) -> tuple[Site, Choice, Places, tuple[Place, ...]]:
        """A kernel, and the places it reads and writes: the given ones, or rows of their own where none takes those."""
        own = tuple(None if p is None else _own(p) for p in operands), tuple(_own(p) for p in results)
        refused = None
        for read, written in ((operands, results), (own[0], results), (operands, own[1]), own):
            site = Site(op, _operands(read), tuple(p.operand() for p in written), attrs)
            try:
                return site, self.catalog.select(site, self.target, self.families), read, written
            except NoKernel as error:
                refused = refused or error
        assert refused is not None
        raise refused

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
    same = steps[0] == steps[1] and a.strided.offset == b.strided.offset and a.step == b.step
    return a.buffer is b.buffer and same


def _gapless(dtype: str, shape: tuple[int, ...]) -> Place:
    """A buffer of its own whose rows follow each other."""
    return Place(Buffer(ARENA, Type(dtype, shape).nbytes), dtype, Strided.packed(shape))


def _own(place: Place) -> Place:
    """The same place if it begins and has rows like a value's own, else a new one."""
    type = Type(place.dtype, place.strided.shape)
    own = place.strided.strides == padded(type).strides and place.operand().aligned
    return place if own else new_place(ARENA, type)


def _operands(places: Sequence[Place | None]) -> tuple[Operand | None, ...]:
    return tuple(None if place is None else place.operand() for place in places)


def _itemsize(place: Place) -> int:
    return DTYPES[place.dtype].itemsize
