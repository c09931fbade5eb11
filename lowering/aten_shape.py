"""ATen ops that move or repeat elements and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence

from frtc.lowering import ops
from frtc.lowering.aten import Call, Lowering, Unsupported, broadcast, cast, negative, reshape
from frtc.lowering.ir import Node


def view(c: Call, x: Node, *_: object) -> Node:
    """Any op whose result holds the same elements in the same order."""
    return reshape(x, c.shape)


def expand(c: Call, x: Node, *_: object, **__: object) -> Node:
    return broadcast(x, c.shape)


def repeat(c: Call, x: Node, times: Sequence[int]) -> Node:
    """The whole tensor `times` times along each axis; axes may be added in front."""
    shape = (1,) * (len(times) - len(x.shape)) + x.shape
    apart = tuple(n for t, extent in zip(times, shape, strict=True) for n in (1, extent))
    repeated = tuple(n for t, extent in zip(times, shape, strict=True) for n in (t, extent))
    return reshape(broadcast(reshape(x, apart), repeated), c.shape)


def repeat_interleave(c: Call, x: Node, times: int, dim: int | None = None, output_size: int | None = None) -> Node:
    """Each entry along `dim` `times` times in a row."""
    if not isinstance(times, int) or dim is None:
        raise Unsupported("repeat_interleave with counts per entry or without an axis")
    at = negative(dim, len(x.shape)) + len(x.shape) + 1
    apart = (*x.shape[:at], 1, *x.shape[at:])
    return reshape(broadcast(reshape(x, apart), (*x.shape[:at], times, *x.shape[at:])), c.shape)


def permute(c: Call, x: Node, axes: Sequence[int]) -> Node:
    perm = tuple(negative(a, len(axes)) for a in axes)
    if perm == tuple(range(-len(axes), 0)):
        return x
    node: Node = ops.transpose(x, perm=perm)
    return node


def transpose(c: Call, x: Node, a: int = 0, b: int = 1) -> Node:
    """Two axes exchanged."""
    axes = list(range(-len(x.shape), 0))
    if axes:
        a, b = negative(a, len(axes)), negative(b, len(axes))
        axes[a], axes[b] = axes[b], axes[a]
    return permute(c, x, axes)


def slice_(c: Call, x: Node, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Node:
    extent = x.shape[dim]
    first, last, _ = slice(start, stop).indices(extent)
    return cut(x, negative(dim, len(x.shape)), first, max(first, last), step)


def cut(x: Node, axis: int, start: int, stop: int, step: int = 1) -> Node:
    """x[start:stop:step] along an axis (negative); x itself where that is all of it."""
    if (start, stop, step) == (0, x.shape[axis], 1):
        return x
    node: Node = ops.slice_(x, axis=axis, start=start, stop=stop, step=step)
    return node


def select(c: Call, x: Node, dim: int, at: int) -> Node:
    """Entry `at` of one axis, which disappears."""
    at = at if at >= 0 else at + x.shape[dim]
    return reshape(cut(x, negative(dim, len(x.shape)), at, at + 1), c.shape)


def split(c: Call, x: Node, sizes: object, dim: int = 0) -> tuple[Node, ...]:
    """split, chunk, split_with_sizes: the pieces have the extents that torch found."""
    axis, parts, at = negative(dim, len(x.shape)), [], 0
    for piece in c.types:
        parts.append(cut(x, axis, at, at + piece.shape[axis]))
        at += piece.shape[axis]
    return tuple(parts)


def unbind(c: Call, x: Node, dim: int = 0) -> tuple[Node, ...]:
    axis = negative(dim, len(x.shape))
    return tuple(reshape(cut(x, axis, i, i + 1), t.shape) for i, t in enumerate(c.types))


def cat(c: Call, xs: Sequence[Node], dim: int = 0) -> Node:
    """Old torch lets an empty vector join anything: it adds nothing."""
    parts = [cast(x, c.dtype) for x in xs if x.shape != (0,) or len(c.shape) == 1]
    node: Node = parts[0] if len(parts) == 1 else ops.concat(*parts, axis=negative(dim, len(c.shape)))
    return node


def stack(c: Call, xs: Sequence[Node], dim: int = 0) -> Node:
    axis = negative(dim, len(c.shape))
    at = axis + len(c.shape)
    return cat(c, [reshape(x, (*x.shape[:at], 1, *x.shape[at:])) for x in xs], axis)


def pad(c: Call, x: Node, widths: Sequence[int], mode: str = "constant", value: float | None = None) -> Node:
    """Pairs (before, after), the last axis first; a negative width cuts."""
    if mode != "constant":
        raise Unsupported(f"padding mode {mode}")
    for i in range(0, len(widths), 2):
        axis, (before, after) = -1 - i // 2, widths[i : i + 2]
        x = cut(x, axis, max(0, -before), x.shape[axis] - max(0, -after))
        if before > 0 or after > 0:
            x = ops.pad(x, axis=axis, before=max(0, before), after=max(0, after), value=float(value or 0.0))
    return x


def diff(c: Call, x: Node, n: int = 1, dim: int = -1, prepend: Node | None = None, append: Node | None = None) -> Node:
    """x[1:] - x[:-1] along an axis, after `prepend` and `append` were joined to x"""
    if n != 1:
        raise Unsupported(f"differences of order {n}")
    axis = negative(dim, len(x.shape))
    parts = [p for p in (prepend, x, append) if p is not None]
    if len(parts) > 1:
        x = ops.concat(*parts, axis=axis)
    later, earlier = cut(x, axis, 1, x.shape[axis]), cut(x, axis, 0, x.shape[axis] - 1)
    node: Node = ops.ne(later, earlier) if c.dtype == "bool" else ops.sub(later, earlier, dtype=c.dtype)
    return node


ATEN: dict[str, Lowering] = {
    **{f"{name}.default": view for name in ("view", "_unsafe_view", "reshape", "view_as", "squeeze", "unsqueeze")},
    **{name: view for name in ("flatten.using_ints", "unflatten.int")},
    **{f"squeeze.{kind}": view for kind in ("dim", "dims")},
    **{f"{name}.default": expand for name in ("expand", "expand_as")},
    "repeat.default": repeat,
    "repeat_interleave.self_int": repeat_interleave,
    "permute.default": permute,
    "transpose.int": transpose,
    "t.default": transpose,
    "slice.Tensor": slice_,
    "select.int": select,
    **{name: split for name in ("chunk.default", "split.Tensor", "split_with_sizes.default")},
    "unbind.int": unbind,
    "cat.default": cat,
    "stack.default": stack,
    "pad.default": pad,
    "diff.default": diff,
}
