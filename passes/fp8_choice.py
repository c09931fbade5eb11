"""Which products of a program run in 8 bits, and which launch stores what they read: decisions, nothing is rewritten.

Sites are decided in the order of the program, so that a producer is decided before those that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from frtc.lowering.ir import Graph, Node, Type, input_
from frtc.passes.fp8_nodes import EMITTERS, VIEWS, emitted, in_8_bits, keeps_rows
from frtc.passes.precision import Precision
from frtc.passes.rewrite import Implements
from frtc.passes.sites import GemmSite


@dataclass(frozen=True, slots=True)
class Source:
    """Where x comes from: the op that can store it in FP8, and the views between, nearest to x first."""

    producer: Node
    views: tuple[Node, ...]


@dataclass(slots=True)
class Choice:
    """Of one program.

    fp8       product -> where its x comes from
    w8        products with weights alone in 8 bits
    emits     producer -> the site whose scale it stores with
    views     between producers and products
    reasons   product -> why it is not what was asked for
    """

    graph: Graph
    sites: dict[Node, GemmSite]
    implements: Implements
    precision: Precision
    uses: dict[Node, int] = field(init=False)
    fp8: dict[Node, Source] = field(default_factory=dict)
    w8: set[Node] = field(default_factory=set)
    emits: dict[Node, GemmSite] = field(default_factory=dict)
    views: set[Node] = field(default_factory=set)
    reasons: dict[Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uses = self.graph.users()
        readers: dict[Node, list[Node]] = {}
        for node in self.graph.nodes:
            for a in node.operands:
                readers.setdefault(a, []).append(node)
        for product, site in self.sites.items():
            if product not in self.fp8:
                self._decide(site, readers[site.x])

    def _decide(self, site: GemmSite, readers: Sequence[Node]) -> None:
        kind, product = self.precision.of(site.name, site.program), site.node
        if kind == "bf16":
            return
        if product.op == "gated_linear" and product.args[2] is not None:
            self.reasons[product] = "gate and up are two weights"
        elif kind == "w8a16" and self.implements(in_8_bits(product, site.x)):
            self.w8.add(product)
        elif kind == "w8a16":
            self.reasons[product] = "no kernel runs it with weights in 8 bits"
        elif isinstance(found := self._fp8(site, readers), str):
            self.reasons[product] = found
        else:
            self.fp8 |= dict.fromkeys(readers, found)
            self.emits[found.producer] = site
            self.views.update(found.views)

    def _fp8(self, site: GemmSite, readers: Sequence[Node]) -> Source | str:
        """Where x would be stored in FP8, or why it cannot be."""
        for reader in readers:
            other = self.sites.get(reader)
            if other is None or other.x is not site.x or site.x in reader.operands[1:]:
                return f"{_named(reader)} reads its x, too"
            if self.precision.of(other.name, other.program) != "fp8":
                return f"{other.name} reads its x, too, and stays in 16 bits"
        if any(site.x is root for root in self.graph.roots):
            return "its x is a result of the program"
        source = self._source(site.x)
        if isinstance(source, Source) and not all(self.implements(self._imagined(reader)) for reader in readers):
            return "no kernel runs it in FP8"
        return source

    def _source(self, x: Node) -> Source | str:
        views, node = [], x
        while node.op in VIEWS and node.args[0] is not None:
            views.append(node)
            node = node.args[0]
            if self.uses[node] != 1:
                return f"{_named(node)} has other readers"
        producer, result = (node.args[0], node["index"]) if node.op == "item" else (node, 0)
        if producer is None or producer.op not in EMITTERS:
            return f"{_named(node)} makes its x and stores no FP8"
        if node.op == "item" and isinstance(producer.type, tuple) and result != len(producer.type) - 1:
            return f"its x is the sum of {producer.op}"
        if views and not self.precision.static and not keeps_rows(producer, views[::-1]):
            return "views between move elements from row to row"
        base = self._imagined(producer) if producer in self.fp8 else producer
        inv = input_("?", Type("f32", ())) if self.precision.static else None
        if not self.implements(emitted(base, inv)):
            return f"no kernel of {producer.op} stores FP8"
        return Source(producer, tuple(views))

    def _imagined(self, product: Node) -> Node:
        """The product with its x in FP8, from nowhere: for a question to the kernels."""
        x = product.operands[0]
        scales = None if self.precision.static else input_("?", Type("f32", (*x.shape[:-1], 1)))
        return in_8_bits(product, input_("?", Type("e4m3", x.shape)), scales)


def _named(node: Node) -> str:
    return f"{node.op} at {node.loc or 'unknown'}"
