"""defer_norms: products take a value before its norm and make up for it, so that no launch reads it only to norm it.

    s = linear(x, w, ..); y = norm(s, ..); linear(y, W, b)  ->  (s, m, z) = linear_moments(x, w, ..)
                                                                linear(z, W', b + t W^T, x_scale=m, norm=..)

    rms, ada   y = r z + t, z = s * (offset + scale):   y W^T = r (z W^T) + t W^T,    r = 1 / sqrt(mean(s^2) + eps)
    layer      y = r (s - mean(s)) * w + t, z = s:      y W^T = r (s W'^T) + t W^T,   r = 1 / sqrt(var(s) + eps)
               W' is W * w less the mean of each of its rows, so that what all elements of s share falls out

m are the moments of s, of which the reader makes r. t W^T is constant, or one row of a table for each round. In FP8, z
has a static scale of its own; a calibration measures what each product would lose, and where that is too much the norm
stays (frtc/norm_noise.py, Scales.fallen). Weights stay as they are (rms, ada); W' is rounded anew, which costs
nothing where it becomes FP8 or is fp32, and in 16 bits a layer_norm stays. Either end may be a product in fp32.

Only where kernels take both ends. In FP8, what a program returns is not made so: there is one such product, its error
goes into all that follows, and no residual stream is beside it (docs/numerics.md). Before fuse_linear_norm, which has
the norms that stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from frtc.lowering.ir import Graph, Module, Node, Type, input_, item, make
from frtc.passes.fp8_nodes import VIEWS, emitted, in_8_bits
from frtc.passes.moment_nodes import MOMENTS, Z, absorbs, reader_of, with_moments
from frtc.passes.norm_readers import bare, in_order, norms_of, unnormed_of
from frtc.passes.precision import Precision
from frtc.passes.rewrite import Implements, Pass, count
from frtc.passes.sites import GemmSite, sites_of, unnormed, weights_of


def defer_norms(implements: Implements, precision: Precision) -> Pass:
    """The pass for kernels that run the nodes which `implements` accepts."""
    return partial(_run, implements=implements, precision=precision)


def _run(module: Module, implements: Implements, precision: Precision) -> Module:
    sites = {site.node: site for site in sites_of(module)}
    return module.map(lambda graph: _Deferring(graph, sites, implements, precision).run())


@dataclass(frozen=True, slots=True)
class _Deferring:
    """One program."""

    graph: Graph
    sites: Mapping[Node, GemmSite]
    implements: Implements
    precision: Precision

    def run(self) -> Graph:
        readers: dict[Node, list[Node]] = {}
        for node in self.graph.nodes:
            for a in node.operands:
                readers.setdefault(a, []).append(node)
        roots = set(self.graph.roots)
        last = frozenset(n for root in roots for n in _through_views(root))
        norms: dict[Node, Node] = {}
        for source, norm in norms_of(self.graph, bare).items():
            behind = readers.get(norm, ())
            if norm in roots or source.args[0] in norms.values():
                continue  # a product has moments to make up with, or stores some
            if self._fits(source, norm, behind, last):
                norms[source] = norm
        return self.graph.replace(self._rewritten(norms))

    def _rewritten(self, norms: Mapping[Node, Node]) -> dict[Node, Node]:
        done: dict[Node, Node] = {}
        sources = {norm: source for source, norm in norms.items()}
        both: dict[Node, Node] = {}
        for old in in_order(self.graph.roots, norms):
            args = tuple(None if a is None else done[a] for a in old.args)
            new = old if args == old.args else make(old.op, args, dict(old.attrs), old.type, old.loc)
            first = old.args[0] if old.args else None
            if old in norms:
                found = unnormed_of(norms[old])
                assert found is not None
                norm_w = None if found.w is None else done[found.w]
                both[old] = with_moments(new, norms[old], replace(found, w=norm_w))
                new = item(both[old], 0)
                count("defer_norms")
            elif old in sources:
                new = item(both[sources[old]], Z)
            elif first in sources:
                new = reader_of(new, first, item(both[sources[first]], MOMENTS))
            done[old] = new
        return done

    def _fits(self, source: Node, norm: Node, readers: Sequence[Node], last: frozenset[Node]) -> bool:
        """Whether all readers make up for the norm, and kernels run both ends, in 8 bits where these are asked for."""
        kinds = {self._kind(reader, norm, reader in last) for reader in readers}
        found = unnormed_of(norm)
        if found is None or len(kinds) != 1 or not all(absorbs(reader, norm) for reader in readers):
            return False
        (kind,) = kinds
        if not kind or (norm.op == "layer_norm" and kind not in ("fp8", "f32")):
            return False
        both = with_moments(source, norm, found)
        products = [reader_of(reader, norm, item(both, MOMENTS)) for reader in readers]
        wanted = [both, *products]
        if kind == "fp8":
            both = emitted(both, input_("?", Type("f32", ())))
            wanted += [both, *(in_8_bits(product, _e4m3(product)) for product in products)]
        return all(map(self.implements, wanted)) and self._keeps_8_bits(source, both)

    def _kind(self, reader: Node, norm: Node, last: bool) -> str:
        """The precision of the product; "" where its norm stays. last: the program returns its result."""
        site = self.sites.get(reader)
        if site is None or site.x is not norm:
            weights = weights_of(reader)
            return "f32" if weights and all(w.is_const and w.dtype == "f32" for w in weights) else ""
        kind = self.precision.of(site.name, site.program)
        if kind == "fp8" and (last or not self.precision.static or unnormed(site.name) in self.precision.fallen):
            return ""
        return "" if kind == "w8a16" else kind

    def _keeps_8_bits(self, source: Node, both: Node) -> bool:
        """Whether linear_moments runs as the product before the norm is asked to. With scales per row norms stay."""
        site = self.sites.get(source)
        kind = self.precision.of(site.name, site.program) if site else ""
        if kind == "fp8":
            return self.precision.static and self.implements(in_8_bits(both, _e4m3(both)))
        return kind != "w8a16" or self.implements(in_8_bits(both, both.operands[0]))


def _e4m3(product: Node) -> Node:
    """Its x in FP8, from nowhere: for a question to the kernels."""
    return input_("?", Type("e4m3", product.operands[0].shape))


def _through_views(node: Node) -> list[Node]:
    """The node and what it is a view of."""
    found = [node]
    while found[-1].op in VIEWS:
        found += found[-1].operands[:1]
    return found
