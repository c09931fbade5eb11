"""How one ATen call becomes IR: what a lowering sees, and the table of all lowerings.

A lowering is a function of a Call and the operands as torch passes them: tensors are IR nodes, everything else is
plain Python. It returns a node (a tuple for several results) of exactly the type that torch says. It raises Unsupported
with a reason where the IR cannot say what the call means; the importer adds the op, the module and the source line.

Numbers among the operands become literals in float32 (float64 beside float64 tensors), never in 16 bits: torch computes
16-bit arithmetic with a Python number in float32 and rounds the result once, and so do the references.

Each module below holds a table ATEN: name and overload of the ATen op -> lowering.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from frtc.kernels.dtypes import is_float
from frtc.lowering import ops
from frtc.lowering.ir import Node, Type

MODULES = ["aten_pointwise", "aten_create", "aten_shape", "aten_reduce", "aten_linalg", "aten_einsum", "aten_lookup"]

Result = Node | tuple[Node, ...]
Lowering = Callable[..., Result]
Scalar = int | float | bool


class Unsupported(Exception):
    """The IR has no form for this call; the message says which part of it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the types of its results as torch infers them."""

    types: tuple[Type, ...]

    @property
    def type(self) -> Type:
        return self.types[0]

    @property
    def dtype(self) -> str:
        return self.types[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.types[0].shape


def load() -> dict[str, Lowering]:
    """The lowering of every ATen op that we know."""
    table: dict[str, Lowering] = {}
    for name in MODULES:
        rows = importlib.import_module(f"frtc.lowering.{name}").ATEN
        twice = table.keys() & rows.keys()
        assert not twice, f"{sorted(twice)} defined in {name} and before it"
        table |= rows
    return table


def number(value: Scalar, common: str) -> Node:
    """A Python number beside tensors whose common element type is `common`."""
    if is_float(common) or isinstance(value, float):
        return ops.const(value, "f64" if common == "f64" else "f32")
    return ops.const(value, "bool" if isinstance(value, bool) and common == "bool" else common)


def operands(common: str, *values: Node | Scalar) -> list[Node]:
    """Operands of one pointwise op in their common element type.

    A float scalar that is a tensor is rounded to the common type first, as torch does on a GPU (`x_bf16 * scalar_f32`;
    on a CPU it does so in sums, but not in products).
    """
    nodes = []
    for value in values:
        node = value if isinstance(value, Node) else number(value, common)
        if isinstance(value, Node) and not node.shape and is_float(node.dtype) and is_float(common):
            node = cast(node, common)
        nodes.append(node)
    return nodes


def cast(x: Node, dtype: str) -> Node:
    """x in another element type; x itself where it has that type."""
    node: Node = x if x.dtype == dtype else ops.cast(x, dtype=dtype)
    return node


def reshape(x: Node, shape: tuple[int, ...]) -> Node:
    """x in another shape; x itself where it has that shape."""
    node: Node = x if x.shape == shape else ops.reshape(x, shape=shape)
    return node


def broadcast(x: Node, shape: tuple[int, ...]) -> Node:
    """x repeated to a shape; x itself where it has that shape."""
    node: Node = x if x.shape == shape else ops.broadcast(x, shape=shape)
    return node


def negative(axis: int, rank: int) -> int:
    """An axis counted from the end."""
    return axis if axis < 0 else axis - rank


def identity(c: Call, x: Node, *_: object, **__: object) -> Node:
    """Ops that return their operand, up to where and how it is stored."""
    return broadcast(cast(x, c.dtype), c.shape)
