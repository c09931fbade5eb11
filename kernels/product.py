"""A site of linear, gated_linear or matmul seen as a batch of products y[M, N] = epilogue(x[M, K] w[N, K]^T)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand, Param, Site

EPILOGUE_TYPES = ("f32", "bf16", "f16")
NULL = Param("i64", 0)  # a pointer that is never followed


@dataclass(frozen=True, slots=True)
class Matrix:
    """A strided operand: place in the site, dtype, elements from row to row and batch to batch (0: always the same)."""

    index: int
    dtype: str
    ld: int
    batch: int

    @property
    def cuda(self) -> str:
        return DTYPES[self.dtype].cuda


@dataclass(frozen=True, slots=True)
class Product:
    """Sizes and operands. N counts the columns of the product: 2F where gated. w is [K, N] where `k_rows`.

    rows   place in the site of the i32 that counts the rows of y (of each batch) that are specified
    """

    batch: int
    m: int
    n: int
    k: int
    gated: bool
    k_rows: bool
    act: str
    x: Matrix
    w: Matrix
    bias: Matrix | None
    residual: Matrix | None
    gate: Matrix | None
    y: Matrix
    rows: int | None = None

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def nbytes(self) -> float:
        """Bytes that must move: every operand once, the result once."""
        size = {name: DTYPES[name].itemsize for name in DTYPES}
        rows, out = self.batch * self.m, self.n // (2 if self.gated else 1)
        weights = (self.batch if self.w.batch else 1) * self.n * self.k * size[self.w.dtype]
        moved = weights + rows * self.k * size[self.x.dtype] + rows * out * size[self.y.dtype]
        for extra in (self.residual, self.gate):
            if extra is not None:
                moved += (rows if extra.ld else 1) * out * size[extra.dtype]
        return float(moved)

    def epilogue(self) -> str:
        """The C++ type of the epilogue."""
        types = [
            self.y.cuda,
            *(extra.cuda if extra else "frtc::None" for extra in (self.bias, self.residual, self.gate)),
        ]
        gated = "true" if self.gated else "false"
        return f"frtc::Epilogue<{', '.join(types)}, frtc::Act::{self.act}, {gated}>"

    def pointers(self) -> tuple[Param, ...]:
        """x, w, bias, residual, gate, y."""
        operands = (self.x, self.w, self.bias, self.residual, self.gate)
        given = [Param("operand", matrix.index) if matrix else NULL for matrix in operands]
        return (*given, Param("result", self.y.index))

    def specified(self) -> Param:
        """Pointer to the number of rows that anything reads; null: all, or no kernel can tell."""
        return NULL if self.rows is None else Param("operand", self.rows)

    def sizes(self) -> tuple[Param, ...]:
        """M, N, K, then the row strides of x, w, residual, gate, y."""
        strides = [matrix.ld if matrix else 0 for matrix in (self.x, self.w, self.residual, self.gate, self.y)]
        return tuple(Param("i32", value) for value in (self.m, self.n, self.k, *strides))

    def batches(self) -> tuple[Param, ...]:
        """Batch strides of x, w, residual, gate, y."""
        operands = (self.x, self.w, self.residual, self.gate, self.y)
        return tuple(Param("i64", matrix.batch if matrix else 0) for matrix in operands)


def product_of(site: Site) -> Product | str:
    """The product that `site` is, or why its views are not rows of matrices."""
    return _matmul(site) if site.op == "matmul" else _linear(site)


def _linear(site: Site) -> Product | str:
    gated = site.op == "gated_linear"
    x, w = site.operands[:2]
    assert x is not None and w is not None
    extras = (None, None, None) if gated else (*site.operands[2:], None, None, None)[:3]
    if gated and len(site.operands) > 2 and site.operands[2] is not None:
        return "gate and up are two weights; needs their rows interleaved in one"
    (y,) = site.results
    lead, out = x.shape[:-1], y.shape[-1]
    bias, residual, gate = extras
    rows = {"x": (x, 0), "residual": (residual, 3), "gate": (gate, 4), "y": (y, 0)}
    strides = {name: _aligned(operand, (*lead, out))[:-1] for name, (operand, _) in rows.items() if operand}
    split = _split_rows(lead, list(strides.values()))
    if split is None:
        return f"rows of {', '.join(strides)} with leading axes {lead} and strides {strides} are not evenly spaced"
    batch, m, steps = split
    matrices = {
        name: Matrix(rows[name][1], operand.dtype, *step)
        for name, step in zip(strides, steps, strict=True)
        if (operand := rows[name][0]) is not None
    }
    wide = {"b": bias, "residual": residual, "gate": gate}
    if narrow := [name for name, operand in wide.items() if operand and operand.shape[-1:] != (out,)]:
        return f"{', '.join(narrow)} repeats along the last axis"
    if spread := _not_contiguous({"x": x, "w": w, "y": y, **wide}):
        return spread
    return Product(
        batch, m, w.shape[0], w.shape[1], gated, False, str(site.attrs.get("act", "none")),
        matrices["x"], Matrix(1, w.dtype, _step(w, 0), 0), Matrix(2, bias.dtype, 0, 0) if bias else None,
        matrices.get("residual"), matrices.get("gate"), matrices["y"], _rows(site, m),
    )  # fmt: skip


def _rows(site: Site, m: int) -> int | None:
    """The operand `rows`, which counts along axis -2: usable where the rows of the product are that axis alone."""
    index = 3 if site.op == "gated_linear" else 5
    rows = site.operands[index] if index < len(site.operands) else None
    return index if rows is not None and rows.dtype == "i32" and site.results[0].shape[-2] == m else None


def _matmul(site: Site) -> Product | str:
    a, b = site.operands
    assert a is not None and b is not None
    (y,) = site.results
    lead, (m, n), k = y.shape[:-2], y.shape[-2:], a.shape[-1]
    views = [_aligned(operand, (*lead, 1, 1))[: len(lead)] for operand in (a, b, y)]
    steps = [_fold(lead, view) for view in views]
    if any(step is None for step in steps):
        return f"batch axes {lead} with strides {views} are not evenly spaced"
    if spread := _not_contiguous({"a": a, "y": y}):
        return spread
    k_rows = b.strides[-1] == 1 or n == 1
    if not k_rows and b.strides[-2] != 1:
        return f"neither axis of b is contiguous: strides {b.strides}"
    batch_a, batch_b, batch_y = (step or 0 for step in steps)
    batch = 1
    for extent in lead:
        batch *= extent
    return Product(
        batch, m, n, k, False, k_rows, "none",
        Matrix(0, a.dtype, _step(a, -2), batch_a), Matrix(1, b.dtype, _step(b, -2 if k_rows else -1), batch_b),
        None, None, None, Matrix(0, y.dtype, _step(y, -2), batch_y),
    )  # fmt: skip


def _aligned(operand: Operand | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of `operand` broadcast to the rank of `shape`; 0 along the axes where it repeats."""
    assert operand is not None
    missing = len(shape) - len(operand.shape)
    own = zip(operand.shape, operand.strides, strict=True)
    return (0,) * missing + tuple(0 if extent == 1 else stride for extent, stride in own)


def _split_rows(lead: Sequence[int], views: list[tuple[int, ...]]) -> tuple[int, int, list[tuple[int, int]]] | None:
    """(batch, rows, (row stride, batch stride) of each view): leading axes as one axis of rows, or as two."""
    for cut in range(len(lead) + 1):
        rows = [_fold(lead[cut:], view[cut:]) for view in views]
        batches = [_fold(lead[:cut], view[:cut]) for view in views]
        if None not in rows and None not in batches:
            batch = m = 1
            for i, extent in enumerate(lead):
                batch, m = (batch * extent, m) if i < cut else (batch, m * extent)
            return batch, m, [(row or 0, step or 0) for row, step in zip(rows, batches, strict=True)]
    return None


def _fold(extents: Sequence[int], strides: Sequence[int]) -> int | None:
    """Stride of the one axis that these axes form, None if they form none; 0 for no axis."""
    axes = [(extent, stride) for extent, stride in zip(extents, strides, strict=True) if extent > 1]
    for (_, outer), (extent, inner) in pairwise(axes):
        if outer != extent * inner:
            return None
    return axes[-1][1] if axes else 0


def _step(operand: Operand, axis: int) -> int:
    return operand.strides[axis] if operand.shape[axis] > 1 else 0


def _not_contiguous(operands: Mapping[str, Operand | None]) -> str:
    for name, operand in operands.items():
        if operand and operand.shape and operand.shape[-1] > 1 and operand.strides[-1] != 1:
            return f"last axis of {name} has stride {operand.strides[-1]}, needs 1"
    return ""
