"""fuse_epilogues: what follows a linear moves into its epilogue, and gate and up are interleaved for theirs.

    act(linear(x, w, b))              -> linear(x, w, b, act)
    linear(..) * g                    -> linear(.., gate=g)            g one value per column, or of the result's shape
    r + linear(..)                    -> linear(.., residual=r)
    gated_linear(x, gate, up)         -> gated_linear(x, interleave(gate, up))
    add_behind_views: view(linear(..)) + constant -> view(linear(.., residual=constant))     the view moves nothing

The intermediate is no longer rounded to 16 bits nor written to memory. Only what some kernel can run (`implements`),
and only where nothing else reads the intermediate.
"""

from __future__ import annotations

from functools import partial

from frtc.lowering.ir import Module, Node
from frtc.lowering.ops import OPS, broadcast, concat, gated_linear, linear, reshape, view
from frtc.lowering.pattern import Var, once
from frtc.lowering.strided import Strided
from frtc.passes.rewrite import Implements, Pass, Rules, rewrite

Shape = tuple[int, ...]
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "silu")

product = Var("product", where=lambda n: isinstance(n, Node) and n.op == "linear" and not n.is_const)
other = Var("other")
x, gate_w, up_w, act = Var("x"), Var("gate_w", const=True), Var("up_w", const=True), Var("act")


def _bare(product: Node) -> bool:
    """No activation, residual or gate yet."""
    return product["act"] == "none" and product.args[3] is None and product.args[4] is None


def _with_act(node: Node, product: Node) -> Node | None:
    if not _bare(product):
        return None
    result: Node = linear(*product.args[:3], act=node.op, dtype=node.dtype, loc=product.loc)
    return result


def _with_gate(node: Node, product: Node, other: Node) -> Node | None:
    per_column = len(other.shape) == 1 and other.shape == product.shape[-1:]
    if product.args[3] is not None or product.args[4] is not None or not other.t.is_float:
        return None
    if not (per_column or other.shape == product.shape) or node.shape != product.shape:
        return None
    result: Node = linear(*product.args[:3], None, other, act=product["act"], dtype=node.dtype, loc=product.loc)
    return result


def _with_residual(node: Node, product: Node, other: Node) -> Node | None:
    if product.args[3] is not None or node.shape != product.shape or not other.t.is_float:
        return None
    if other.shape != product.shape:
        if not other.is_const:
            return None
        other = broadcast(other, shape=product.shape)
    args = (*product.args[:3], other, product.args[4])
    result: Node = linear(*args, act=product["act"], dtype=node.dtype, loc=product.loc)
    return result


def _interleaved(node: Node, x: Node, gate_w: Node, up_w: Node, act: str) -> Node:
    """Row 2i of the stacked weights is row i of the gate, row 2i + 1 row i of up."""
    rows, inner = gate_w.shape
    pairs = concat(*(reshape(w, shape=(rows, 1, inner)) for w in (gate_w, up_w)), axis=-2)
    result: Node = gated_linear(x, reshape(pairs, shape=(2 * rows, inner)), act=act, dtype=node.dtype, loc=node.loc)
    return result


EPILOGUES = Rules(
    "fuse_epilogue",
    [
        *((OPS[name](once(product)), _with_act) for name in ACTIVATIONS),
        (OPS["mul"](once(product), other), _with_gate),
        (OPS["add"](once(product), other), _with_residual),
    ],
)
INTERLEAVE = Rules("interleave_gate", [(gated_linear(x, gate_w, up_w, act=act), _interleaved)])


def add_behind_views(implements: Implements) -> Pass:
    """After layout, which finds that the transpositions around a patch embedding cancel."""

    def fused(node: Node, product: Node, other: Node, shape: Shape, strides: Shape, offset: int) -> Node | None:
        moves = not Strided(shape, strides, offset).is_packed or node.t.size != product.t.size
        more = any(product.args[5:])  # rows, scales
        if moves or more or node.shape != shape or product.args[3] is not None or not other.t.is_float:
            return None
        residual = reshape(broadcast(other, shape=node.shape), shape=product.shape)
        args = (*product.args[:3], residual, product.args[4])
        result: Node = linear(*args, act=product["act"], dtype=node.dtype, loc=product.loc)
        return reshape(result, shape=node.shape) if implements(result) else None

    seen = view(once(product), shape=Var("shape"), strides=Var("strides"), offset=Var("offset"))
    rules = Rules("add_behind_view", [(OPS["add"](once(seen), Var("other", const=True)), fused)])
    return lambda module: module.map(lambda graph: rewrite(graph, rules))


def fuse_epilogues(implements: Implements) -> Pass:
    """The pass for a target whose kernels run the nodes that `implements` accepts."""
    return partial(_run, implements=implements)


def _run(module: Module, implements: Implements) -> Module:
    return module.map(lambda graph: rewrite(graph, EPILOGUES, INTERLEAVE, allow=implements))
