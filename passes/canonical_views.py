"""Chains of reshape and transpose as strided views, and back: at most reshape, transpose, reshape.

    view over x[2,6]: transpose then reshape [3,4] of reshape [2,2,3]   ->   [(1, 3)], [(6, 2), (3, 2)]

Each axis of a view walks blocks (stride, extent) of x's row-major elements, outermost first; unit axes walk none.
"""

from __future__ import annotations

from frtc.lowering.ir import Node
from frtc.lowering.ops import reshape, transpose

Block = tuple[int, int]  # stride in elements of the source, extent
Axes = list[list[Block]]
Shape = tuple[int, ...]


def dense(shape: Shape) -> Axes:
    """The view that is the source itself."""
    axes: Axes = []
    stride = 1
    for n in reversed(shape):
        axes.insert(0, [(stride, n)] if n != 1 else [])
        stride *= n
    return axes


def merged(blocks: list[Block]) -> list[Block]:
    """Neighbours that walk memory without a gap become one block."""
    out: list[Block] = []
    for stride, n in blocks:
        if out and out[-1][0] == stride * n:
            out[-1] = (stride, out[-1][1] * n)
        else:
            out.append((stride, n))
    return out


def regrouped(axes: Axes, shape: Shape) -> Axes | None:
    """The view reshaped; None if an axis would take a part of a block that does not divide."""
    blocks = merged([b for axis in axes for b in axis])[::-1]
    out: Axes = []
    for extent in shape:
        axis: list[Block] = []
        while extent > 1:
            if not blocks:
                return None
            stride, n = blocks.pop()
            if extent % n == 0:
                axis.append((stride, n))
                extent //= n
            elif n % extent == 0:
                inner = n // extent
                axis.append((stride * inner, extent))
                blocks.append((stride, inner))
                extent = 1
            else:
                return None
        out.append(axis)
    return [merged(axis) for axis in out]


def view_of(source: Node, node: Node) -> Axes | None:
    """What `node`, a chain of reshapes and transposes over `source`, walks."""
    chain = []
    while node is not source:
        chain.append(node)
        node = node.operands[0]
    axes: Axes | None = dense(source.shape)
    for step in reversed(chain):
        if axes is None:
            return None
        if step.op == "reshape":
            axes = regrouped(axes, step.shape)
        else:
            lead = len(axes) - len(step["perm"])
            axes = axes[:lead] + [axes[p] for p in step["perm"]]
    return axes


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
    keys: list[tuple[int, int]] = []  # where each axis stands in the source: by stride, unit axes before what follows
    following = -1
    for i in reversed(range(len(axes))):
        following = axes[i][0][0] if axes[i] else following
        keys.insert(0, (-following, i - len(axes)))
    if not axes[0]:  # leading unit axes stay in front
        lead = next(i for i, axis in enumerate(axes) if axis)
        keys[:lead] = [(-(10**18), i) for i in range(lead)]
    order = sorted(range(len(axes)), key=keys.__getitem__)
    return transposed(_shaped(source, tuple(shape[i] for i in order)), [order.index(i) for i in range(len(axes))])


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
