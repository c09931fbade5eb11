"""Sites of norms, rope, lookups and reductions that kernels are judged on: all of Pi0.5's, and awkward ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from frtc.kernels.spec import Operand, Site
from tests.kernels.harness import fresh

VIEWS, PROMPTS, HORIZONS = (1, 2, 3), (48, 200), (10, 50)
PATCHES = 256  # image tokens of a view
HEADS, HEAD = 8, 256  # query heads over one key head, and their size
EPS = 1e-6

packed = Operand.packed


def layer_norm(m: int, n: int, x: str = "bf16", affine: str = "f32", y: str = "") -> Site:
    vector = packed(affine, n) if affine else None
    return Site("layer_norm", (packed(x, m, n), vector, vector), (packed(y or x, m, n),), {"eps": EPS})


def rms_norm(
    m: int, n: int, x: str = "bf16", w: str = "f32", y: str = "", offset: float = 1.0, inner: str = "f32"
) -> Site:
    attrs = {"eps": EPS, "offset": offset, "inner": inner}
    return Site("rms_norm", (packed(x, m, n), packed(w, n) if w else None), (packed(y or x, m, n),), attrs)


def ada_rms_norm(m: int, n: int, x: str = "bf16", style: str = "f32", y: str = "") -> Site:
    vector = packed(style, n)
    return Site("ada_rms_norm", (packed(x, m, n), vector, vector), (packed(y or x, m, n),), {"eps": EPS})


def residual_norm(
    m: int,
    n: int,
    kind: str,
    x: str = "bf16",
    r: str = "bf16",
    gate: str = "",
    affine: str = "f32",
    y: str = "",
    own_styles: bool = False,
) -> Site:
    """`own_styles`: gate and affine have a row for each of x."""
    rows = (m,) if own_styles else ()
    vector = packed(affine, *rows, n) if affine else None
    factor = packed(gate, *rows, n) if gate else None
    operands = (packed(x, m, n), packed(r, m, n), factor, vector, None if kind == "rms" else vector)
    return Site(
        "residual_norm", operands, (packed(x, m, n), packed(y or x, m, n)), {"kind": kind, "eps": EPS, "offset": 1.0}
    )


INV = {"rms_norm": 2, "ada_rms_norm": 3, "layer_norm": 3, "residual_norm": 5}  # the place of that operand


def in_e4m3(site: Site, per_row: bool) -> Site:
    """The norm with its last result in e4m3: times one operand, or with a scale for each row."""
    *before, y = site.results
    results = (*before, replace(y, dtype="e4m3"))
    if per_row:
        scales = packed("f32", *y.shape[:-1], 1)
        return replace(site, results=(*results, scales), attrs={**site.attrs, "per_row": True})
    place = INV[site.op]
    operands = (*site.operands, *[None] * (place - len(site.operands)), packed("f32"))
    return replace(site, results=results, operands=operands)


def rope_qkv(rows: int, length: int, heads: int = HEADS, kv_heads: int = 1, d: int = HEAD, dtype: str = "bf16",
             angles: str = "f32", pairing: str = "half") -> Site:  # fmt: skip
    """k and v in slices of caches of `length` rows a head; q packed."""
    x = packed(dtype, rows, (heads + 2 * kv_heads) * d)
    angle = packed(angles, rows, d // 2)
    cache = Operand(dtype, (kv_heads, rows, d), (length * d, d, 1))
    results = (packed(dtype, heads, rows, d), cache, cache)
    return Site("rope_qkv", (x, angle, angle), results, {"heads": heads, "kv_heads": kv_heads, "pairing": pairing})


def rope(heads: int, rows: int, d: int, dtype: str = "bf16", angles: str = "f32", pairing: str = "half",
         gap: int = 0) -> Site:  # fmt: skip
    """x is [rows, heads, d] in memory, `gap` elements between rows, seen as [heads, rows, d]."""
    x, angle = Operand(dtype, (heads, rows, d), (d, heads * d + gap, 1)), packed(angles, rows, d // 2)
    return Site("rope", (x, angle, angle), (packed(dtype, heads, rows, d),), {"pairing": pairing})


def embedding(vocabulary: int, count: int, d: int, dtype: str = "bf16", ids: str = "i32", scale: float = 1.0) -> Site:
    operands = (packed(dtype, vocabulary, d), packed(ids, count))
    return Site("embedding", operands, (packed(dtype, count, d),), {"scale": scale})


def index(table: Sequence[int], dtype: str = "f32") -> Site:
    return Site("index", (packed(dtype, *table), packed("i32")), (packed(dtype, *table[1:]),), {})


def write(state: Sequence[int], value: Sequence[int], axis: int, dtype: str = "bf16") -> Site:
    return Site(
        "write", (packed(dtype, *state), packed(dtype, *value), packed("i32")), (packed(dtype, *state),), {"axis": axis}
    )


def reduce(
    op: str, shape: Sequence[int], axes: Sequence[int], x: str = "f32", y: str = "", keepdims: bool = False
) -> Site:
    gone = {len(shape) + axis for axis in axes}
    left = [1 if a in gone else n for a, n in enumerate(shape) if keepdims or a not in gone]
    return Site(op, (packed(x, *shape),), (packed(y or x, *left),), {"axes": tuple(axes), "keepdims": keepdims})


def softmax(m: int, n: int, x: str = "bf16", y: str = "") -> Site:
    return Site("softmax", (packed(x, m, n),), (packed(y or x, m, n),), {"axis": -1})


def cumsum(shape: Sequence[int], x: str, y: str, axis: int = -1) -> Site:
    return Site("cumsum", (packed(x, *shape),), (packed(y, *shape),), {"axis": axis})


def real_sites() -> list[Site]:
    """Pi0.5 at 1 to 3 views, prompts of 48 and 200, chunks of 10 and 50; norms with and without affine."""
    found = []
    for views in VIEWS:
        rows = views * PATCHES
        found += [
            layer_norm(rows, 1152),
            layer_norm(rows, 1152, affine=""),
            residual_norm(rows, 1152, "layer", affine=""),
        ]
    for tokens in (views * PATCHES + budget for views in VIEWS for budget in PROMPTS):
        found += [rms_norm(tokens, 2048), rms_norm(tokens, 2048, w=""), residual_norm(tokens, 2048, "rms", affine="")]
        found += [rope_qkv(tokens, tokens + 50), rope(1, tokens, HEAD, gap=HEAD)]
    for chunk in HORIZONS:
        found += [ada_rms_norm(chunk, 1024), residual_norm(chunk, 1024, "ada", gate="f32")]
        found += [residual_norm(chunk, 1024, "ada"), rope_qkv(chunk, 560 + chunk)]
    found += [embedding(4096, budget, 2048, scale=45.25) for budget in PROMPTS]
    return found


def awkward_sites() -> list[Site]:
    """Odd widths, one row, rows that share a block, every element type, strided results, rows of all threads."""
    gap = Operand("bf16", (5, 1001), (1032, 1))
    found = [
        *(rms_norm(m, n) for m, n in ((1, 1), (3, 7), (9, 72), (16 * 50, 128), (5, 1001), (2, 16384))),
        *(layer_norm(m, n, "f32") for m, n in ((1, 3), (9, 72), (5, 1001), (3, 4304))),
        rms_norm(50, 1024, "f16", "f16"), rms_norm(50, 1024, "f32", "bf16"), rms_norm(50, 1024, "f32", y="bf16"),
        rms_norm(50, 1024, "bf16", "bf16", offset=0.0, inner="bf16"), rms_norm(50, 1024, w="bf16", y="f32"),
        layer_norm(50, 1024, "f16", "f16"), layer_norm(50, 1024, "f32", "", "bf16"), layer_norm(7, 72, y="f32"),
        ada_rms_norm(50, 1000, "f32"), ada_rms_norm(9, 72, "f16", "bf16", "f32"),
        residual_norm(7, 1001, "ada", gate="f32", own_styles=True),
        residual_norm(50, 1024, "ada", "f32", "bf16", "f32"),
        residual_norm(9, 72, "layer", "f16", "f16", "bf16", "f16"), residual_norm(50, 4304, "rms", r="f32"),
        Site("rms_norm", (gap, None), (gap,), {"eps": EPS}),
        *(rope(3, 5, d, pairing=p) for d in (2, 10, 64, 72, 128) for p in ("half", "interleaved")),
        rope(4, 50, 128, "f32"), rope(4, 50, 128, "f16", "f16"), rope(4, 50, 128, angles="bf16"),
        rope_qkv(7, 90, 6, 2, 72), rope_qkv(7, 90, 16, 8, 128), rope_qkv(50, 50, 4, 4, 64, "f16", "f32", "interleaved"),
        embedding(50, 13, 33), embedding(50, 13, 33, ids="i64", scale=2.5), embedding(50, 7, 100, "f32"),
        index((10, 3, 1024)), index((10, 33), "bf16"), index((10,), "i32"),
        write((2, 600, 256), (2, 50, 256), -2), write((600, 7), (4, 7), -2), write((12,), (1,), -1, "i64"),
        *(reduce(f"reduce_{op}", (3, 50, 70), axes, keepdims=keep)
          for op in ("sum", "mean", "max") for axes, keep in (((-1,), True), ((-2, -1), False))),
        reduce("reduce_max", (60, 70), (-2,), "bf16"), reduce("reduce_mean", (60, 700), (-1,), "f16", "f32"),
        reduce("reduce_sum", (6, 70), (-1,), "i32", "i64"), reduce("reduce_mean", (6, 70), (-1,), "i32", "f32"),
        reduce("reduce_sum", (6, 70), (-1,), "bool", "i64"), reduce("reduce_max", (6, 70), (-1,), "i32"),
        reduce("reduce_any", (60, 3), (-1,), "bool"), reduce("reduce_all", (60, 3), (-1,), "bool"),
        *(softmax(m, n) for m, n in ((3, 7), (800, 128), (50, 968))), softmax(5, 1001, "f32"), softmax(5, 300, y="f32"),
        cumsum((968,), "bool", "i64"), cumsum((3, 73), "f32", "f32"), cumsum((73, 4), "i32", "i32", -2),
    ]  # fmt: skip
    return found


def inputs(site: Site, generator: np.random.Generator) -> list[NDArray[np.generic] | None]:
    """Operands in order: angles are cosines and sines of positions, ids and positions lie inside their table, e4m3 is
    stored times a number that lets the loudest elements saturate."""
    drawn = [None if o is None else _drawn(o, generator) for o in site.operands]
    if site.op in INV and len(site.operands) > INV[site.op] and site.operands[INV[site.op]]:
        drawn[INV[site.op]] = np.asarray(generator.uniform(8, 40), np.float32)
    if site.op in ("rope", "rope_qkv"):
        angles = generator.uniform(-np.pi, np.pi, site.operands[1].shape)  # type: ignore[union-attr]
        drawn[1:3] = [np.cos(angles).astype(drawn[1].dtype), np.sin(angles).astype(drawn[1].dtype)]  # type: ignore[union-attr]
    if site.op in ("embedding", "index"):
        table, ids = site.operands
        assert table is not None and ids is not None
        drawn[1] = generator.integers(0, table.shape[0], ids.shape).astype(drawn[1].dtype)  # type: ignore[union-attr]
    if site.op == "write":
        state, value, _ = site.operands
        assert state is not None and value is not None
        axis = int(site.attrs["axis"])
        drawn[2] = np.asarray(generator.integers(0, state.shape[axis] - value.shape[axis] + 1), np.int32)
    return drawn


def loud_ends(site: Site, generator: np.random.Generator) -> list[NDArray[np.generic] | None]:
    """The largest element of each row is its last."""
    x, *others = inputs(site, generator)
    assert x is not None
    x[..., -1] = 100
    return [x, *others]


def _drawn(operand: Operand, generator: np.random.Generator) -> NDArray[np.generic]:
    if operand.dtype in ("i32", "i64"):
        return generator.integers(-50, 50, operand.shape).astype({"i32": np.int32, "i64": np.int64}[operand.dtype])
    return fresh(operand, generator)
