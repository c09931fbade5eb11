"""Chains of reshape and transpose as strided views.

    x [2,6] as [2,2,3], its last two axes exchanged, then [2,6] again:   [(6, 2)], [(1, 3), (3, 2)]

Each axis of a view walks blocks (stride, extent) of x's row-major elements, outermost first; unit axes walk none.
"""

from __future__ import annotations

from frtc.lowering.ir import Node

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
