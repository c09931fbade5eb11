"""Sites of generated elementwise kernels that are judged: Pi0.5's, every op, every type, awkward views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.smxx_pointwise import COMPARE, FLOAT
from frtc.kernels.spec import Operand, Site
from tests.kernels.harness import fresh

packed = Operand.packed
Expr = Sequence[Sequence[Any]]


def program(
    operands: Sequence[Operand], results: Sequence[Operand], expr: Expr = (), values: Sequence[int] = ()
) -> Site:
    """`values`: which value each result holds; by default the last one."""
    last = len(operands) + len(expr) - 1
    attrs = {"expr": tuple(map(tuple, expr)), "results": tuple(values) or (last,), "shape": results[0].shape}
    return Site("pointwise", tuple(operands), tuple(results), attrs)


def patches(views: int, grid: int = 16, patch: int = 14) -> Site:
    """uint8 images [views, height, width, 3] to fp32 rows in the order of the convolution's weight, -1 .. 1."""
    line = grid * patch * 3
    shape = (views, grid, grid, 3, patch, patch)
    image = Operand("u8", shape, (grid * patch * line, patch * line, patch * 3, 1, line, 3))
    scaled = (("cast", 0, "f32"), ("const", 255.0), ("div", 1, 2), ("const", 2.0), ("mul", 3, 4))
    return program([image], [packed("f32", *shape)], (*scaled, ("const", -1.0), ("add", 5, 6)))


def positions(views: int) -> Site:
    """The learned positions, added to the patches of every view; fp32 until here."""
    operands = [packed("f32", views, 256, 1152), packed("f32", 256, 1152)]
    return program(operands, [packed("bf16", views, 256, 1152)], (("add", 0, 1),))


def angles(chunk: int, *ops: str) -> Site:
    """Each op of position * frequency of a chunk that starts at a device scalar."""
    expr = (("add", 0, 1), ("cast", 3, "f32"), ("mul", 4, 2), *((op, 5) for op in ops))
    operands = [packed("i32"), packed("i32", chunk, 1), packed("f32", 128)]
    return program(operands, [packed("f32", chunk, 128)] * len(ops), expr, range(6, 6 + len(ops)))


def euler(chunk: int, velocity: str = "f32") -> Site:
    """x + dt * v"""
    x = packed("f32", chunk, 32)
    return program([x, packed(velocity, chunk, 32)], [x], (("const", -0.1), ("mul", 1, 2), ("add", 0, 3)))


def copy(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int] = (), dtype: str = "bf16", to: str = ""
) -> Site:
    """A view with the strides `source` into one with the strides `target` (none: packed)."""
    shape = tuple(shape)
    result = Operand(to or dtype, shape, tuple(target)) if target else packed(to or dtype, *shape)
    return program([Operand(dtype, shape, tuple(source))], [result])


def real_sites() -> list[Site]:
    """Pi0.5: images to patches, positions, angles of a chunk, Euler steps, values into slices of a KV cache."""
    return [
        *(site(views) for site in (patches, positions) for views in (1, 2, 3)),
        *(angles(chunk, *ops) for chunk in (10, 50) for ops in (("cos",), ("sin",), ("cos", "sin"))),
        *(euler(chunk) for chunk in (10, 50)),
        program([packed("i32")], [packed("i32")], (("const", 512), ("add", 0, 1))),
        copy((50, 32), (32, 1), dtype="f32"),
        copy((1, 560, 256), (560 * 512, 512, 1), (610 * 256, 256, 1)),
        copy((560, 2048), (2048, 1)),
    ]


def awkward_sites() -> list[Site]:
    """Each op once in fp32, mixed types, integers and booleans, broadcasts, two results, odd and strided axes."""
    row, mask, column = packed("f32", 3, 37), packed("bool", 3, 40), packed("f16", 3, 1)
    positive = (("abs", 0), ("const", 0.5), ("add", 1, 2))
    ints, longs = packed("i32", 3, 40), packed("i64", 40)
    not_zero = (("const", 0), ("eq", 1, 2), ("const", 3), ("where", 3, 4, 1))
    return [
        *(program([row], [row], ((op, 0),)) for op in sorted(FLOAT - {"div", "pow", "log", "sqrt", "rsqrt"})),
        *(program([row], [row], ((op, 0),)) for op in ("neg", "abs")),
        *(program([row], [row], (*positive, (op, 3))) for op in ("log", "sqrt", "rsqrt")),
        program([row, row], [row], (*(("abs", 0), ("const", 0.5), ("add", 2, 3)), ("pow", 4, 1))),
        *(program([packed("bf16", 3, 40), column], [packed("f32", 3, 40)], ((op, 0, 1),))
          for op in ("add", "sub", "mul", "div", "minimum", "maximum")),
        *(program([packed("bf16", 3, 40), column], [mask], ((op, 0, 1),)) for op in sorted(COMPARE)),
        program([mask, packed("bool", 40)], [mask, mask], (("and", 0, 1), ("not", 2), ("or", 3, 1)), (2, 4)),
        program([mask, packed("bf16", 40), packed("f32")], [packed("bf16", 3, 40)], (("where", 0, 1, 2),)),
        *(program([ints, longs], [packed("i64", 3, 40)], (*not_zero, (op, 0, 5)))
          for op in ("add", "mul", "floor_div", "mod", "minimum")),
        program([ints, packed("f32", 40)], [packed("f32", 3, 40), ints, mask],
                (("mul", 0, 1), ("cast", 2, "i32"), ("cast", 3, "bool"), ("cast", 2, "bf16")), (5, 3, 4)),
        program([packed("bf16", 50, 1024), packed("f32", 1024)], [packed("bf16", 50, 1024), packed("f16", 50, 1024)],
                (("add", 0, 1), ("gelu_tanh", 2), ("silu", 2)), (3, 4)),
        program([], [Operand("f32", (8, 6), (16, 2))], (("const", float("-inf")),)),
        program([packed("i32"), packed("i32")], [packed("i32")], (("add", 0, 1),)),
        copy((4, 3, 8), (8, 32, 1)), copy((80, 60), (1, 80)), copy((8, 6), (0, 1), (16, 1)),
        copy((7,), (1,), dtype="i64"), copy((5, 1001), (1008, 1), (1016, 1)),
        copy((2, 3, 5, 7, 11), (1, 2, 6, 30, 210), dtype="u8"),
    ]  # fmt: skip


def inputs(site: Site, generator: np.random.Generator) -> list[NDArray[np.generic] | None]:
    """Integers from -50, bytes from 0; angles of thousands of radians; powers that fp32 holds."""
    found: list[NDArray[np.generic] | None] = []
    for operand in site.operands:
        assert operand is not None
        if DTYPES[operand.dtype].kind == "int":
            least = 0 if operand.dtype == "u8" else -50
            found.append(generator.integers(least, 200 if operand.dtype == "u8" else 50, operand.shape)
                         .astype(DTYPES[operand.dtype].numpy))  # fmt: skip
        else:
            found.append(fresh(operand, generator))
    op = site.attrs["expr"][-1][0] if site.attrs["expr"] else ""
    reach = {"sin": 5000.0, "cos": 5000.0, "exp": 20.0, "pow": 3.0}.get(op)
    if reach:
        for i, operand in enumerate(site.operands):
            if operand and operand.dtype == "f32":
                found[i] = generator.uniform(-reach, reach, operand.shape).astype(np.float32)
    return found
