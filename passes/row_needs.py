"""What an op reads of its operands' rows, given what is read of its result's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from frtc.lowering.ir import Node, Type
from frtc.lowering.ops import POINTWISE
from frtc.passes.scalars import Scalars

BY_ROW = frozenset({"rms_norm", "ada_rms_norm", "layer_norm", "residual_norm", "rope"})
PRODUCTS = {"linear": frozenset({0, 3, 4}), "gated_linear": frozenset({0}), "matmul": frozenset({0})}  # by row of these


@dataclass(frozen=True, slots=True)
class Rows:
    """What is read: along `axis` (negative) the elements before `length`, and those from `resume` on (-1: none)."""

    axis: int
    length: Node  # over inputs that no program changes
    resume: int = -1


Need = Rows | None  # None: all of it
Needs = dict[Node, Need]  # nothing reads a node that is absent


def either(a: Need, b: Need) -> Need:
    return a if a == b else None


def reads(node: Node, need: Need, scalars: Scalars) -> list[Need]:
    """What `node` reads of each operand for what is read of its result."""
    everything: list[Need] = [None] * len(node.args)
    if node.op == "attention":
        return _attention(node, need, scalars)
    if need is None:
        return everything
    type = node.type if isinstance(node.type, Type) else node.type[0]  # several results: rows in the same places
    size, by_row = type.shape[need.axis], need.axis != -1
    if node.op == "item" or (node.op == "concat" and node["axis"] != need.axis):
        return [need for _ in node.args]
    if node.op == "concat":
        first = node.operands[0].shape[need.axis]
        return [replace(need, resume=need.resume if need.resume < first else -1), *everything[1:]]
    if node.op in ("reshape", "transpose", "slice"):
        return [_moved(node, need, size)]
    if node.op in PRODUCTS and need.axis == -2:
        return [_aligned(a, need, size) if i in PRODUCTS[node.op] else None for i, a in enumerate(node.args)]
    if node.op in POINTWISE or node.op == "broadcast" or (node.op in BY_ROW and by_row):
        return [_aligned(a, need, size) for a in node.args]
    return everything


def _attention(node: Node, need: Need, scalars: Scalars) -> list[Need]:
    k, length = node.args[1], node.args[4]
    same = None if length is None or length.is_const else scalars.of(length)
    assert k is not None
    resume = node["resume"] if node["resume"] < k.shape[-2] else -1
    seen = None if same is None else Rows(-2, same, resume)
    rest = [None] * (len(node.args) - 3)
    return [need if need is not None and need.axis == -2 else None, seen, seen, *rest]


def _aligned(operand: Node | None, need: Rows, size: int) -> Need:
    """Operands broadcast as NumPy does: one that repeats along the axis is read for every row."""
    fits = operand is not None and operand.t.rank >= -need.axis and operand.shape[need.axis] == size
    return need if fits else None


def _moved(node: Node, need: Rows, size: int) -> Need:
    """The same rows of the operand of a reshape, a transpose or a slice."""
    source = node.operands[0]
    if node.op == "slice":
        whole = node["axis"] != need.axis or (node["start"] == 0 and node["step"] == 1)
        return need if whole else None
    if node.op == "transpose":
        perm = node["perm"]
        return replace(need, axis=perm[need.axis]) if -need.axis <= len(perm) else need
    before = prod(node.shape[: need.axis])
    axes = [i for i, n in enumerate(source.shape) if n == size > 1 and prod(source.shape[:i]) == before]
    return replace(need, axis=axes[0] - len(source.shape)) if axes else None
