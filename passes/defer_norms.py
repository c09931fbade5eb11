"""defer_norms: products take a value before its norm and make up for it, so that no launch reads it only to norm it.

    s = linear(x, w, ..); y = norm(s, ..); linear(y, W, b)  ->  (s, m, z) = linear_moments(x, w, ..)
                                                                linear(z, W', b + t W^T, x_scale=m, norm=..)

    rms, ada   y = r z + t, z = s * (offset + scale):   y W^T = r (z W^T) + t W^T,    r = 1 / sqrt(mean(s^2) + eps)
    layer      y = r (s - mean(s)) * w + t, z = s:      y W^T = r (s W'^T) + t W^T,   r = 1 / sqrt(var(s) + eps)
               W' is W * w less the mean of each of its rows, so that what all elements of s share falls out

m are the moments of s, of which the reader makes r. t W^T is constant, or one row of a table for each round. In FP8, z
has a static scale of its own; a calibration measures what each product would lose, and where that is too much the norm
stays (frtc/norm_noise.py, Scales.fallen). Weights of 16 bits stay as they are (rms, ada); W' is rounded anew, which
costs nothing where it becomes FP8, and elsewhere a layer_norm stays.

Only where kernels take both ends. What a program returns is not made so: there is one such product, its error goes into
all that follows, and no residual stream is beside it (docs/numerics.md). Before fuse_linear_norm, which has the norms
that stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from frtc.lowering.ir import Graph, Module, Node, Type, input_, item, make
from frtc.lowering.ops import OPS, add, linear, linear_moments, mul, reduce_mean, sub
from frtc.passes.fp8_nodes import VIEWS, emitted, in_8_bits
from frtc.passes.norm_readers import DEFERRED, Unnormed, bare, in_order, norms_of, unnormed_of
from frtc.passes.precision import Precision
from frtc.passes.rewrite import Implements, Pass, count
from frtc.passes.sites import GemmSite, sites_of, unnormed
from frtc.passes.tables import entry_of, table_of

MOMENTS, Z = 1, 2  # results of linear_moments


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
        last = {n for root in roots for n in _through_views(root)}
        norms: dict[Node, Node] = {}
        for source, norm in norms_of(self.graph, bare).items():
            behind = readers.get(norm, ())
            if norm in roots or last.intersection(behind) or source.args[0] in norms.values():
                continue  # the last: a product has moments to make up with, or stores some
            if self._fits(source, norm, behind):
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
                both[old] = _with_moments(new, norms[old], replace(found, w=norm_w))
                new = item(both[old], 0)
                count("defer_norms")
            elif old in sources:
                new = item(both[sources[old]], Z)
            elif first in sources:
                new = _reader(new, first, item(both[sources[first]], MOMENTS))
            done[old] = new
        return done

    def _fits(self, source: Node, norm: Node, readers: Sequence[Node]) -> bool:
        """Whether all readers make up for the norm, and kernels run both ends, in FP8 where the sites are asked to."""
        kinds = {self._kind(reader, norm) for reader in readers}
        found = unnormed_of(norm)
        if found is None or len(kinds) != 1 or not all(_absorbs(reader, norm) for reader in readers):
            return False
        (kind,) = kinds
        if not kind or (norm.op == "layer_norm" and kind != "fp8"):
            return False
        both = _with_moments(source, norm, found)
        products = [_reader(reader, norm, item(both, MOMENTS)) for reader in readers]
        wanted = [both, *products]
        if kind == "fp8":
            wanted.append(emitted(both, input_("?", Type("f32", ()))))
            wanted += [in_8_bits(product, input_("?", Type("e4m3", product.operands[0].shape))) for product in products]
        return all(map(self.implements, wanted))

    def _kind(self, reader: Node, norm: Node) -> str:
        """The precision of the product; "" where its norm stays."""
        site = self.sites.get(reader)
        if site is None or site.x is not norm:
            return ""
        kind = self.precision.of(site.name, site.program)
        stays = kind == "w8a16" or (kind == "fp8" and not self.precision.static)
        return "" if stays or (kind == "fp8" and unnormed(site.name) in self.precision.fallen) else kind


def _through_views(node: Node) -> list[Node]:
    """The node and what it is a view of."""
    found = [node]
    while found[-1].op in VIEWS:
        found += found[-1].operands[:1]
    return found


def _absorbs(reader: Node, norm: Node) -> bool:
    """A product by one weight, nothing scaled yet, whose bias and the norm's shift add to a constant."""
    names = OPS[reader.op].operands
    given = dict(zip(names, reader.args, strict=False))
    if reader.op not in ("linear", "gated_linear") or norm in reader.args[1:] or reader["per_row"]:
        return False
    scaled = [name for name in ("up", "alpha", "x_scale", "inv") if given.get(name) is not None]
    bias = given.get("b")
    weights = [a for a in norm.args[1:2] if a is not None]
    constant = norm.op != "layer_norm" or all(w.is_const for w in weights)  # they go into W
    shift = norm.args[2] if norm.op != "rms_norm" else None
    return (
        not scaled and constant and (bias is None or bias.is_const) and (shift is None or table_of(shift) is not None)
    )


def _with_moments(source: Node, norm: Node, found: Unnormed) -> Node:
    """linear_moments for the source of a norm."""
    inv = OPS["linear"].operands.index("inv")
    result: Node = linear_moments(
        *source.args[:inv],
        found.w,
        act=source["act"],
        norm=DEFERRED[norm.op],
        offset=found.offset,
        stored=source.dtype,
        dtype=norm.dtype,
        loc=norm.loc,
    )
    return result


def _reader(product: Node, norm: Node, found: Node) -> Node:
    """The product with the moments `found`; its first operand may be what it was, or z already."""
    names, args = OPS[product.op].operands, list(product.args)
    args += [None] * (len(names) - len(args))
    w = args[1]
    assert w is not None
    at = names.index("b")
    args[at] = _shifted(args[at], norm, w)
    if norm.op == "layer_norm":
        args[1] = _centred(w, norm.args[1])
    args[names.index("x_scale")] = found
    attrs = {**dict(product.attrs), "norm": DEFERRED[norm.op], "eps": norm["eps"], "dtype": product.dtype}
    return OPS[product.op].build(args, attrs, product.loc)


def _shifted(bias: Node | None, norm: Node, w: Node) -> Node | None:
    """bias + t W^T, where the norm has a shift."""
    shift = norm.args[2] if norm.op != "rms_norm" else None
    if shift is None:
        return bias
    found = table_of(shift)
    assert found is not None, "asked before"
    table, round = found
    moved = linear(table, w, dtype="f32")
    return entry_of(moved if bias is None else add(moved, bias, dtype="f32"), round)


def _centred(w: Node, scale: Node | None) -> Node:
    scaled = w if scale is None else mul(w, scale, dtype="f32")
    result: Node = sub(scaled, reduce_mean(scaled, axes=(-1,), dtype="f32"), dtype=w.dtype)
    return result
