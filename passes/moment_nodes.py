"""Both ends of a norm that is deferred: the product in front of it, and those that read it (defer_norms.py)."""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.lowering.ops import OPS, add, linear, linear_moments, mul, reduce_mean, sub
from frtc.passes.norm_readers import DEFERRED, Unnormed
from frtc.passes.tables import entry_of, table_of

MOMENTS, Z = 1, 2  # results of linear_moments


def absorbs(reader: Node, norm: Node) -> bool:
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


def with_moments(source: Node, norm: Node, found: Unnormed) -> Node:
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


def reader_of(product: Node, norm: Node, found: Node) -> Node:
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
