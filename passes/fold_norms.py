"""fold_norms: a norm's weights move into every linear that reads it.

    linear(rms_norm(x, w), W, b)      -> linear(rms_norm(x), W * (offset + w), b)
    linear(layer_norm(x, w, c), W, b) -> linear(layer_norm(x), W * w, b + W c)

The products are constant expressions: evaluated in float64 and rounded once, to the weights' type. Only where all
readers are linears with constant weights; otherwise the norm would have to be computed twice. And only where that
rounding costs nothing: a 16-bit W is exact as it is stored, W * w is not, and a norm applies its weights in float32 in
the same launch (docs/numerics.md has the measurement). After merge_linears, so that one norm feeds one linear.
"""

from __future__ import annotations

from frtc.lowering.ir import Graph, Module, Node, make, rebuild
from frtc.lowering.ops import add, layer_norm, linear, mul, rms_norm
from frtc.passes.rewrite import count

SIXTEEN_BITS = ("bf16", "f16")


def fold_norms(module: Module) -> Module:
    return module.map(_fold)


def _fold(graph: Graph) -> Graph:
    readers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for a in node.operands:
            readers.setdefault(a, []).append(node)
    roots = set(graph.roots)
    foldable = {
        n for n in readers if _has_constant_weights(n) and n not in roots and all(_absorbs(r, n) for r in readers[n])
    }

    def visit(old: Node, new: Node) -> Node:
        norm = old.args[0] if old.args else None
        if norm not in foldable or norm is None or old in foldable:
            return new
        bare = new.args[0]
        assert bare is not None
        count("fold_norms")
        return _absorb(new, norm, _without_weights(bare))

    return rebuild(graph, visit)


def _has_constant_weights(node: Node) -> bool:
    if node.op not in ("rms_norm", "layer_norm") or node.get("inner", "f32") != "f32":
        return False
    vectors = [a for a in node.args[1:] if a is not None]
    return bool(vectors) and all(a.is_const and len(a.shape) == 1 for a in vectors)


def _absorbs(reader: Node, norm: Node) -> bool:
    """The reader is a linear over `norm` alone whose weights are constant."""
    if reader.op not in ("linear", "gated_linear") or reader.args[0] is not norm or norm in reader.args[1:]:
        return False
    weights = reader.args[1:3]
    shifted = norm.op == "layer_norm" and norm.args[2] is not None
    constant = all(w is None or w.is_const for w in weights)
    return constant and not rounds(reader) and not (shifted and reader.op == "gated_linear")


def rounds(reader: Node) -> bool:
    """The linear's weights have 16 bits: their product with the norm's would be rounded."""
    weights = reader.args[1]
    return weights is not None and weights.dtype in SIXTEEN_BITS


def _without_weights(norm: Node) -> Node:
    bare = rms_norm if norm.op == "rms_norm" else layer_norm
    result: Node = bare(norm.args[0], eps=norm["eps"], dtype=norm.dtype, loc=norm.loc)
    return result


def _absorb(reader: Node, norm: Node, bare: Node) -> Node:
    scale = norm.args[1]
    if norm.op == "rms_norm" and scale is not None and norm["offset"]:
        scale = add(scale, norm["offset"], dtype="f32")
    args = [bare, *reader.args[1:]]
    for i in (1, 2) if reader.op == "gated_linear" else (1,):
        w = args[i]
        if w is not None and scale is not None:
            args[i] = mul(w, scale, dtype=w.dtype)
    shift = norm.args[2] if norm.op == "layer_norm" else None
    if shift is not None:
        moved = linear(shift, reader.args[1], dtype="f32")
        args[2] = moved if args[2] is None else add(args[2], moved, dtype="f32")
    return make(reader.op, args, dict(reader.attrs), reader.type, reader.loc)
