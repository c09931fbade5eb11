"""quantize: products run in 8 bits, and the launch before each of them stores its result in FP8.

    y = norm(x); linear(y, w)  ->  static:  linear(norm(x, inv=1/s), quantize(w, c), alpha=s * c)
                                   rows:    y, s = norm(x, per_row); linear(y, quantize(w, c), alpha=c, x_scale=s)
    linear(y, w)               ->  w8a16:   linear(y, quantize(w, c), alpha=c)

s is the activation scale of the site, one for each round of a repeat, c the scale of each row of w. Producers are the
norms, attention, and products with an activation, also through views; no launch that only quantises appears. A site
whose x nothing can store in FP8, or that something else reads, stays as it is; `Note` says why.

After all fusions: it changes operands, never what is one launch. Before fuse_pointwise and name_weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from frtc.kernels.reference import REFERENCES
from frtc.lowering.ir import Graph, Module, Node, Type, input_, item, make, rebuild, tensor, weight
from frtc.lowering.ops import OPS, channel_scale, div, index, mul, reshape
from frtc.lowering.ops import quantize as stored_e4m3
from frtc.passes.precision import Precision
from frtc.passes.rewrite import Implements, Pass, count
from frtc.passes.sites import GemmSite, sites_of, weights_of

SCALE = "scale:"  # begins the keys of activation scales among the parameters
EMITTERS = frozenset({name for name, op in OPS.items() if "inv" in op.operands})
VIEWS = frozenset({"reshape", "transpose", "view"})


@dataclass(frozen=True, slots=True)
class Note:
    """What became of a site: "fp8", "w8a16" or "bf16", and why not what was asked for."""

    site: str
    program: str
    kind: str
    flops: float
    reason: str = ""


Told = Callable[[Note], None]


def quantize(implements: Implements, precision: Precision, told: Told = lambda note: None) -> Pass:
    """The pass; `told` hears of every site once."""
    return partial(_run, implements=implements, precision=precision, told=told)


def _run(module: Module, implements: Implements, precision: Precision, told: Told) -> Module:
    if precision.kinds == {"bf16"}:
        return module
    sites = sites_of(module)
    leaves: dict[str, Node] = {}
    graphs = []
    for graph in module.graphs:
        here = [s for s in sites if s.program == graph.name]
        graphs.append(_Quantizer(graph, here, implements, precision, told).run(leaves))
    definitions = tuple((leaf["name"], tensor(SCALE + site, leaf.t)) for site, leaf in sorted(leaves.items()))
    known = replace(module.weights, outputs=module.weights.outputs + definitions)
    return replace(module, graphs=tuple(graphs), weights=known)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where x comes from: the op that can store it in FP8, and the views between, nearest to x first."""

    producer: Node
    views: tuple[Node, ...]


class _Quantizer:
    """One program."""

    def __init__(
        self, graph: Graph, sites: list[GemmSite], implements: Implements, precision: Precision, told: Told
    ) -> None:
        self.graph, self.implements, self.precision, self.told = graph, implements, precision, told
        self.sites = {site.node: site for site in sites if weights_of(site.node)[0].dtype != "e4m3"}  # not yet
        self.uses = graph.users()
        self.fp8: dict[Node, _Source] = {}  # consumer -> where its x comes from
        self.w8: set[Node] = set()
        self.emits: dict[Node, GemmSite] = {}  # producer -> the site whose scale it stores with
        self.views: set[Node] = set()
        self.reasons: dict[Node, str] = {}

    def run(self, leaves: dict[str, Node]) -> Graph:
        readers: dict[Node, list[Node]] = {}
        for node in self.graph.nodes:
            for a in node.operands:
                readers.setdefault(a, []).append(node)
        for node, site in self.sites.items():
            if node not in self.fp8:
                self._decide(site, readers[site.x])
        for node, site in self.sites.items():
            self._tell(node, site)
        graph = rebuild(self.graph, partial(self._visit, leaves=leaves))
        counters = [n for n in graph.nodes if n.op == "input" and n not in graph.inputs]
        return replace(graph, inputs=graph.inputs + tuple(counters))

    def _tell(self, node: Node, site: GemmSite) -> None:
        kind = "fp8" if node in self.fp8 else "w8a16" if node in self.w8 else "bf16"
        asked = self.precision.of(site.name, site.program)
        reason = "" if kind == asked else self.reasons.get(node, "")
        reason = self.precision.fallen.get(site.name, reason)
        self.told(Note(site.name, site.program, kind, site.flops, reason))
        count(f"quantize_{kind}")

    # --- decisions, in the order of the program: a producer is decided before those that read it ---

    def _decide(self, site: GemmSite, readers: list[Node]) -> None:
        kind = self.precision.of(site.name, site.program)
        if kind != "bf16" and site.node.op == "gated_linear" and site.node.args[2] is not None:
            self.reasons[site.node] = "gate and up are two weights"
        elif kind == "w8a16" and self.implements(self._consumer(site.node, site.x, None)):
            self.w8.add(site.node)
        elif kind == "w8a16":
            self.reasons[site.node] = "no kernel runs it with weights in 8 bits"
        elif kind == "fp8":
            found = self._fp8(site, readers)
            if isinstance(found, str):
                self.reasons[site.node] = found
                return
            for reader in readers:
                self.fp8[reader] = found
            self.emits[found.producer] = site
            self.views.update(found.views)

    def _fp8(self, site: GemmSite, readers: list[Node]) -> _Source | str:
        """Where x would be stored in FP8, or why it cannot be."""
        for reader in readers:
            other = self.sites.get(reader)
            if other is None or other.x is not site.x or site.x in reader.operands[1:]:
                return f"{reader.op} at {reader.loc or 'unknown'} reads its x, too"
            if self.precision.of(other.name, other.program) != "fp8":
                return f"{other.name} reads its x, too, and stays in 16 bits"
        if any(site.x is root for root in self.graph.roots):
            return "its x is a result of the program"
        source = self._source(site.x)
        if isinstance(source, str):
            return source
        if not all(self.implements(self._imagined(reader)) for reader in readers):
            return "no kernel runs it in FP8"
        return source

    def _imagined(self, product: Node) -> Node:
        """The product with its x in FP8, from nowhere: for a question to the kernels."""
        x = product.operands[0]
        scales = None if self.precision.static else input_("?", Type("f32", (*x.shape[:-1], 1)))
        return self._consumer(product, input_("?", Type("e4m3", x.shape)), scales)

    def _source(self, x: Node) -> _Source | str:
        views, node = [], x
        while node.op in VIEWS and node.args[0] is not None:
            views.append(node)
            node = node.args[0]
            if self.uses[node] != 1:
                return f"{node.op} at {node.loc or 'unknown'} has other readers"
        producer, result = (node.args[0], node["index"]) if node.op == "item" else (node, 0)
        if producer is None or producer.op not in EMITTERS:
            return f"{node.op} at {node.loc or 'unknown'} makes its x and stores no FP8"
        if node.op == "item" and result != 1:
            return f"its x is the sum of {producer.op}"
        if views and not self.precision.static and not _keeps_rows(producer, views[::-1]):
            return "views between move elements from row to row"
        base = self._imagined(producer) if producer in self.fp8 else producer
        if not self.implements(self._emitted(base, input_("?", Type("f32", ())))):
            return f"no kernel of {producer.op} stores FP8"
        return _Source(producer, tuple(views))

    # --- new nodes ---

    def _visit(self, old: Node, new: Node, leaves: dict[str, Node]) -> Node:
        if old in self.views:
            assert new.args[0] is not None
            new = OPS[old.op].build([new.args[0]], dict(old.attrs), old.loc)
        if old.op == "item" and old.args[0] in self.emits:
            assert new.args[0] is not None
            return item(new.args[0], old["index"])
        if old in self.fp8:
            new = self._fp8_consumer(old, new, leaves)
        elif old in self.w8:
            assert new.args[0] is not None
            new = self._consumer(new, new.args[0], None)
        if old not in self.emits:
            return new
        site = self.emits[old]
        emitted = self._emitted(new, self._entry(div(1.0, self._leaf(site, leaves)), site))
        return item(emitted, 0) if isinstance(emitted.type, tuple) and not isinstance(old.type, tuple) else emitted

    def _fp8_consumer(self, old: Node, new: Node, leaves: dict[str, Node]) -> Node:
        x, source = new.args[0], self.fp8[old]
        assert x is not None
        if self.precision.static:
            return self._consumer(new, x, None, self.emits[source.producer], leaves)
        producer = x
        while producer.op in VIEWS or producer.op == "item":
            assert producer.args[0] is not None
            producer = producer.args[0]
        assert isinstance(producer.type, tuple)
        scales = item(producer, len(producer.type) - 1)
        shape = (*x.shape[:-1], 1)
        return self._consumer(new, x, scales if scales.shape == shape else reshape(scales, shape=shape))

    def _consumer(
        self, node: Node, x: Node, x_scale: Node | None, site: GemmSite | None = None, leaves: Any = None
    ) -> Node:
        """The product with weights in 8 bits. site: whose activation scale is part of alpha."""
        operands = OPS[node.op].operands
        args = [x, *node.args[1:]]
        w = args[1]
        assert w is not None
        channel = channel_scale(w)
        args[1] = stored_e4m3(w, channel)
        alpha = channel
        if site is not None:
            leaf = self._leaf(site, leaves)
            alpha = self._entry(mul(leaf if leaf.shape == () else reshape(leaf, shape=(*leaf.shape, 1)), channel), site)
        args[operands.index("alpha")], args[operands.index("x_scale")] = alpha, x_scale
        return make(node.op, args, dict(node.attrs), node.type, node.loc)

    def _emitted(self, producer: Node, inv: Node) -> Node:
        """The producer with its last result in FP8."""
        attrs, args = dict(producer.attrs), list(producer.args)
        if self.precision.static:
            args[OPS[producer.op].operands.index("inv")] = inv
        else:
            attrs["per_row"] = True
        return OPS[producer.op].build(args, {**attrs, "dtype": "e4m3"}, producer.loc)

    def _leaf(self, site: GemmSite, leaves: dict[str, Node]) -> Node:
        leaf = weight(f"scale.{site.name}", Type("f32", () if site.rounds is None else (site.rounds,)))
        if self.precision.static:
            leaves[site.name] = leaf
        return leaf

    def _entry(self, table: Node, site: GemmSite) -> Node:
        """Entry of the round, where the site has one for each."""
        if site.rounds is None:
            return table
        entry: Node = index(table, input_(site.index, Type("i32", ())))
        return entry


def _keeps_rows(producer: Node, views: list[Node]) -> bool:
    """Whether the views lead from a result to the rows that share its scales, in their order."""
    types = producer.type if isinstance(producer.type, tuple) else (producer.t,)
    shape = types[-1].shape
    numbers = np.arange(types[-1].size).reshape(shape)
    rows = numbers.swapaxes(-2, -3) if producer.op == "attention" else numbers
    moved = numbers
    for view in views:
        moved = np.asarray(REFERENCES[view.op](moved, **dict(view.attrs)))
    heads = shape[-3] if producer.op == "attention" else 1
    return moved.shape[-1] == shape[-1] * heads and np.array_equal(moved.ravel(), rows.ravel())
