"""Strided views as the shortest chains of ops: none, one, two, or at most reshape, transpose, reshape."""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.lowering.ops import reshape, transpose
from frtc.passes.canonical_views import Axes, Block, Shape, dense, merged, view_of


def composed(source: Node, node: Node) -> Node | None:
    """`node` in its shortest spelling over `source`: nothing, reshape, transpose, two of them, or three."""
    if 0 in node.shape:
        return None
    axes = view_of(source, node)
    if axes is None:
        return None
    blocks = merged([b for axis in axes for b in axis])
    if len(blocks) < 2:
        return source if source.shape == node.shape else reshape(source, shape=node.shape)
    short = _split_first(source, axes, node.shape) or _join_last(source, blocks, node.shape)
    return short or _both(source, blocks, node)


def _split_first(source: Node, axes: Axes, shape: Shape) -> Node | None:
    """(reshape,) transpose: each axis of the result is one block of the source."""
    if any(len(axis) > 1 for axis in axes):
        return None
    order = _as_in(source, axes) or _by_stride(axes)
    return transposed(_shaped(source, tuple(shape[i] for i in order)), [order.index(i) for i in range(len(axes))])


def _as_in(source: Node, axes: Axes) -> list[int]:
    """The axes in the order of the source's own; [] if they are not its axes."""
    units = [i for i, axis in enumerate(axes) if not axis]
    places = {axis[0]: i for i, axis in enumerate(axes) if axis}
    whole = dense(source.shape)
    if len(whole) != len(axes) or any(axis and axis[0] not in places for axis in whole):
        return []
    return [places[axis[0]] if axis else units.pop(0) for axis in whole]


def _by_stride(axes: Axes) -> list[int]:
    """The axes in the order of the source's elements; unit axes stay before what follows, leading ones in front."""
    keys: list[tuple[int, int]] = []
    following = -1
    for i in reversed(range(len(axes))):
        following = axes[i][0][0] if axes[i] else following
        keys.insert(0, (-following, i))
    for i in range(next(i for i, axis in enumerate(axes) if axis)):
        keys[i] = (-(1 << 62), i)
    return sorted(range(len(axes)), key=keys.__getitem__)


def _join_last(source: Node, blocks: list[Block], shape: Shape) -> Node | None:
    """transpose, reshape: no axis of the source is split."""
    whole = dense(source.shape)
    order = [i for i, axis in enumerate(whole) if not axis]
    for stride, n in blocks:
        inside = [i for i, axis in enumerate(whole) if axis and stride <= axis[0][0] < stride * n]
        if merged([whole[i][0] for i in inside]) != [(stride, n)]:
            return None
        order += inside
    return _shaped(transposed(source, order), shape)


def _both(source: Node, blocks: list[Block], node: Node) -> Node:
    """reshape, transpose, reshape"""
    ordered = sorted(blocks, reverse=True)
    split = _shaped(source, tuple(n for _, n in ordered))
    return _shaped(transposed(split, [ordered.index(b) for b in blocks]), node.shape)


def _shaped(node: Node, shape: Shape) -> Node:
    out: Node = node if node.shape == shape else reshape(node, shape=shape)
    return out


def transposed(node: Node, order: list[int]) -> Node:
    """Axis i of the result is axis order[i] (from the front) of node."""
    rank, lead = len(order), 0
    while lead < rank and order[lead] == lead:
        lead += 1
    perm = tuple(axis - rank for axis in order[lead:])
    out: Node = transpose(node, perm=perm) if perm else node
    return out


def normal(node: Node) -> Node:
    """`node`, a chain of reshapes and transposes, in its shortest spelling."""
    source = node
    while source.op in ("reshape", "transpose"):
        source = source.operands[0]
    return node if source is node else composed(source, node) or node
