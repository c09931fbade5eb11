"""A site of linear, gated_linear or matmul seen as a batch of products y[M, N] = epilogue(x[M, K] w[N, K]^T)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand, Param, Site
from frtc.kernels.views import moves_as_vectors

EPILOGUE_TYPES = ("f32", "bf16", "f16")
# Places of the optional operands in a site; x and w are 0 and 1.
PLACES: Mapping[str, Mapping[str, int]] = {
    "linear": {"bias": 2, "residual": 3, "gate": 4, "rows": 5, "alpha": 6, "x_scale": 7, "inv": 8},
    "gated_linear": {"up": 2, "rows": 3, "alpha": 4, "x_scale": 5, "inv": 6, "bias": 7},
}
GROUP = 8  # columns that an epilogue takes at once
UNALIGNED = "an operand of the product starts at no multiple of 16 bytes"
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
class Argument:
    """A parameter of an epilogue: its C++ type and its value."""

    cuda: str
    param: Param


@dataclass(frozen=True, slots=True)
class Product:
    """Sizes and operands. N counts the columns of the product: 2F where gated. w is [K, N] where `k_rows`.

    rows      place in the site of the i32 that counts the rows of y (of each batch) that are specified
    alpha     fp32 factors of the columns of the product, ld 1, or one for all, ld 0
    x_scale   fp32 factors of the rows; with a norm moments of x's rows, which make up for it: row_factors.cuh
    inv       fp32 factor of an e4m3 result
    whole     groups of eight columns exist or do not, and all that the epilogue reads and writes moves as vectors
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
    alpha: Matrix | None = None
    x_scale: Matrix | None = None
    inv: Matrix | None = None
    whole: bool = False
    norm: str = "none"
    eps: float = 0.0
    moments_at_once: int = 1  # that one load brings

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
        gated, whole = (str(flag).lower() for flag in (self.gated, self.whole))
        alpha = f"frtc::Alpha::{'none' if self.alpha is None else 'each' if self.alpha.ld else 'one'}"
        return f"frtc::Epilogue<{', '.join(types)}, frtc::Act::{self.act}, {gated}, {alpha}, {self.factors()}, {whole}>"

    def factors(self) -> str:
        """The C++ type of the factors of rows."""
        if self.norm != "none":
            return f"frtc::MomentFactors<{self.k}, {str(self.norm == 'layer').lower()}, {self.moments_at_once}>"
        return "frtc::NoFactors" if self.x_scale is None else "frtc::GivenFactors"

    def params(self) -> tuple[Param, ...]:
        """The first parameters of a kernel: x, w, rows, M, N, K, row strides of x and w, batch strides of x and w."""
        rows = NULL if self.rows is None else Param("operand", self.rows)  # null: all, or no kernel can tell
        return (
            *(Param("operand", matrix.index) for matrix in (self.x, self.w)),
            rows,
            *(Param("i32", value) for value in (self.m, self.n, self.k, self.x.ld, self.w.ld)),
            *(Param("i64", matrix.batch) for matrix in (self.x, self.w)),
        )

    def arguments(self) -> tuple[Argument, ...]:
        """The last parameters of a kernel, which its epilogue takes (epilogue.cuh): pointers to bias, residual, gate,
        alpha, x_scale, inv, y, row strides of residual, gate, x_scale, y, batch strides of the same; of a norm eps."""
        typed = [(matrix, matrix.cuda if matrix else "frtc::None") for matrix in (self.bias, self.residual, self.gate)]
        typed += [(matrix, "float") for matrix in (self.alpha, self.x_scale, self.inv)]  # the type also where absent
        strided = (self.residual, self.gate, self.x_scale, self.y)
        return (
            *(Argument(f"const {cuda}*", Param("operand", m.index) if m else NULL) for m, cuda in typed),
            Argument(f"{self.y.cuda}*", Param("result", self.y.index)),
            *(Argument("int", Param("i32", matrix.ld if matrix else 0)) for matrix in strided),
            *(Argument("long long", Param("i64", matrix.batch if matrix else 0)) for matrix in strided),
            *self.eps_argument(),
        )

    def eps_argument(self) -> tuple[Argument, ...]:
        """The last of an epilogue's, where there is a norm."""
        return () if self.norm == "none" else (Argument("float", Param("f32", self.eps)),)


def types_of(arguments: Sequence[Argument]) -> str:
    """The end of a template-id: the types of the pack of parameters."""
    return ", ".join(argument.cuda for argument in arguments)


def params_of(arguments: Sequence[Argument]) -> tuple[Param, ...]:
    return tuple(argument.param for argument in arguments)


def epilogue_refuses(p: Product, moments: bool = False) -> str:
    """Why epilogue.cuh has no such epilogue, or "". moments: whether the mainloop has threads find factors of rows."""
    if p.norm != "none" and not moments:
        return f"x_scale has moments of x's rows (norm {p.norm}), which this kernel makes no factors of"
    if p.norm == "layer" and p.moments_at_once == 1:
        return "pairs of moments are not at multiples of 8 bytes"
    for matrix in (p.bias, p.residual, p.gate, p.y):
        if matrix and matrix.dtype not in EPILOGUE_TYPES and not (matrix is p.y and p.inv and p.y.dtype == "e4m3"):
            return f"the epilogue has no {matrix.dtype}" + (" without inv" if matrix.dtype == "e4m3" else "")
    for name, scale in (("alpha", p.alpha), ("x_scale", p.x_scale), ("inv", p.inv)):
        if scale and scale.dtype != "f32":
            return f"{name} is {scale.dtype}; needs f32"
    return f"inv scales an e4m3 result, not {p.y.dtype}" if p.inv and p.y.dtype != "e4m3" else ""


def product_of(site: Site) -> Product | str:
    """The product that `site` is, or why its views are not rows of matrices."""
    return _matmul(site) if site.op == "matmul" else _linear(site)


def _linear(site: Site) -> Product | str:
    gated = site.op == "gated_linear"
    if site.attrs.get("per_row"):
        return "per-row results need a kernel that finishes whole rows"
    x, w = site.operands[:2]
    assert x is not None and w is not None
    if not (x.aligned and w.aligned):
        return UNALIGNED
    extras, (y,) = _extras(site), site.results
    if "up" in extras:
        return "gate and up are two weights; needs their rows interleaved in one"
    lead, out = x.shape[:-1], y.shape[-1]
    rows = {"x": x} | {name: extras[name] for name in ("residual", "gate", "x_scale") if name in extras} | {"y": y}
    strides = {name: _aligned(operand, (*lead, out))[:-1] for name, operand in rows.items()}
    split = _split_rows(lead, list(strides.values()))
    if split is None:
        return f"rows of {', '.join(strides)} with leading axes {lead} and strides {strides} are not evenly spaced"
    wide = {"b" if name == "bias" else name: extras[name] for name in ("bias", "residual", "gate") if name in extras}
    widths = {"b": w.shape[0]}  # of a gated product both halves have one
    if narrow := [name for name, operand in wide.items() if operand.shape[-1:] != (widths.get(name, out),)]:
        return f"{', '.join(narrow)} repeats along the last axis"
    columns: dict[str, Operand] = {name: extras[name] for name in ("alpha", "x_scale") if name in extras}
    if spread := _not_contiguous({"x": x, "w": w, "y": y, **wide, **columns}):
        return spread
    batch, m, steps = split
    places: dict[str, int] = {"x": 0, "y": 0, **PLACES[site.op]}
    found = {name: Matrix(places[name], rows[name].dtype, *step) for name, step in zip(strides, steps, strict=True)}
    vectors = [y, *(extras[name] for name in ("bias", "residual", "gate", "alpha") if name in extras)]
    norm = str(site.attrs.get("norm", "none"))
    for name in {"bias", "alpha", "inv"} & extras.keys():
        each = name == "alpha" and extras[name].shape[-1:] == (w.shape[0],)
        found[name] = Matrix(places[name], extras[name].dtype, int(each), 0)
    return Product(
        batch, m, w.shape[0], w.shape[1], gated, False, str(site.attrs.get("act", "none")),
        found["x"], Matrix(1, w.dtype, _step(w, 0), 0), found.get("bias"), found.get("residual"), found.get("gate"),
        found["y"], _rows(site, m), found.get("alpha"), found.get("x_scale"), found.get("inv"),
        w.shape[0] % GROUP == 0 and all(map(moves_as_vectors, vectors)),
        norm, float(site.attrs.get("eps", 0.0)), 1 if norm == "none" else _at_once(extras["x_scale"]),
    )  # fmt: skip


def _at_once(moments: Operand) -> int:
    """Elements of every row that one load brings: at multiples of their size, and the row is a multiple of them."""
    steps = [
        moments.shape[-1],
        *(step for extent, step in zip(moments.shape[:-1], moments.strides[:-1], strict=True) if extent > 1),
    ]
    return next(n for n in (4, 2, 1) if n == 1 or (moments.aligned and not any(step % n for step in steps)))


def _extras(site: Site) -> dict[str, Operand]:
    """The optional operands that the site has, by name."""
    given = {name: site.operands[place] for name, place in PLACES[site.op].items() if place < len(site.operands)}
    return {name: operand for name, operand in given.items() if operand is not None}


def _rows(site: Site, m: int) -> int | None:
    """The operand `rows`, which counts along axis -2: usable where the rows of the product are that axis alone."""
    rows = _extras(site).get("rows")
    usable = rows is not None and rows.dtype == "i32" and site.results[0].shape[-2] == m
    return PLACES[site.op]["rows"] if usable else None


def _matmul(site: Site) -> Product | str:
    a, b = site.operands
    assert a is not None and b is not None
    if not (a.aligned and b.aligned):
        return UNALIGNED
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
