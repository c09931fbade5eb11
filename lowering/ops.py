"""The op table. The body of each function is the type rule; its docstring is the definition that the reference in
kernels/reference computes. Float arithmetic is in fp32 on operands in their storage type; the result is rounded once
to its own type; a rounding inside an op is named by an attribute ("f32": none).

Axes are negative (counted from the last), so that leading batch dimensions never change an attribute.
"""

from __future__ import annotations

from frtc import plugins
from frtc.kernels.dtypes import DTYPES
from frtc.lowering.ir import AnyType, Attr, Node, Type, make
from frtc.lowering.op import Op, op, require

# --- literals -----------------------------------------------------------------------------------------------------


def const(value: Attr, dtype: str = "f32", shape: tuple[int, ...] = ()) -> Node:
    """A literal with the number `value` in every element; exact, not rounded to dtype until it is stored."""
    value = float(value) if DTYPES[dtype].kind == "float" else bool(value) if dtype == "bool" else int(value)
    return make("const", (), {"value": value}, Type(dtype, shape))


def literal(data: bytes, dtype: str, shape: tuple[int, ...]) -> Node:
    """A literal array from its little-endian, row-major bytes."""
    require(len(data) == Type(dtype, shape).nbytes, f"{len(data)} bytes for {Type(dtype, shape)}")
    return make("const", (), {"data": data.hex()}, Type(dtype, shape))


# --- pointwise ----------------------------------------------------------------------------------------------------

_RISING = ("bool", "u8", "i8", "i32", "i64", "e4m3", "e5m2", "f16", "bf16", "f32", "f64")
_WIDTH = {name: i for i, name in enumerate(_RISING)}


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's rule."""
    rank = max(len(s) for s in shapes)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    out = tuple(max(extents) if 0 not in extents else 0 for extents in zip(*padded, strict=True))
    for s, p in zip(shapes, padded, strict=True):
        fits = all(a in (1, b) for a, b in zip(p, out, strict=True))
        require(fits, f"shape {list(s)} does not broadcast to {list(out)}")
    return out


def promote(*types: Type) -> str:
    """Element type of a result: the widest among the operands of highest rank-kind; bf16 with f16 gives f32."""
    kinds = {t.dtype for t in types}
    if {"bf16", "f16"} <= kinds:
        return "f32"
    tensors = [t for t in types if t.rank > 0] or list(types)
    floats = [t for t in tensors if t.is_float] or [t for t in types if t.is_float]
    return max((t.dtype for t in (floats or tensors)), key=lambda d: _WIDTH[d])


def _unary(x: Type, dtype: str | None) -> Type:
    return Type(dtype or x.dtype, x.shape)


def _binary(a: Type, b: Type, dtype: str | None) -> Type:
    return Type(dtype or promote(a, b), broadcast_shapes(a.shape, b.shape))


def _compare(a: Type, b: Type) -> Type:
    return Type("bool", broadcast_shapes(a.shape, b.shape))


def _logical(a: Type, b: Type) -> Type:
    require(a.dtype == b.dtype == "bool", f"operands {a} and {b} are not bool")
    return Type("bool", broadcast_shapes(a.shape, b.shape))


@op
def neg(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def abs_(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def exp(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def log(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def tanh(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def erf(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def sin(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def cos(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def sqrt(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def rsqrt(x: Type, *, dtype: str | None = None) -> Type:
    """1 / sqrt(x)"""
    return _unary(x, dtype)


@op
def floor(x: Type, *, dtype: str | None = None) -> Type:
    return _unary(x, dtype)


@op
def sigmoid(x: Type, *, dtype: str | None = None) -> Type:
    """1 / (1 + exp(-x))"""
    return _unary(x, dtype)


@op
def silu(x: Type, *, dtype: str | None = None) -> Type:
    """x * sigmoid(x)"""
    return _unary(x, dtype)


@op
def gelu_tanh(x: Type, *, dtype: str | None = None) -> Type:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))"""
    return _unary(x, dtype)


@op
def gelu_erf(x: Type, *, dtype: str | None = None) -> Type:
    """0.5 x (1 + erf(x / sqrt(2)))"""
    return _unary(x, dtype)


@op
def cast(x: Type, *, dtype: str) -> Type:
    """The same numbers in another element type; float to integer truncates towards zero."""
    return Type(dtype, x.shape)


@op(commutes=True)
def add(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    return _binary(a, b, dtype)


@op
def sub(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    return _binary(a, b, dtype)


@op(commutes=True)
def mul(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    return _binary(a, b, dtype)


@op
def div(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    return _binary(a, b, dtype)


@op
def floor_div(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    return _binary(a, b, dtype)


@op
def mod(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    """a - b * floor(a / b)"""
    return _binary(a, b, dtype)


@op
def pow_(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    return _binary(a, b, dtype)


@op(commutes=True)
def minimum(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    return _binary(a, b, dtype)


@op(commutes=True)
def maximum(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    return _binary(a, b, dtype)


@op(commutes=True)
def eq(a: Type, b: Type) -> Type:
    return _compare(a, b)


@op(commutes=True)
def ne(a: Type, b: Type) -> Type:
    return _compare(a, b)


@op
def lt(a: Type, b: Type) -> Type:
    return _compare(a, b)


@op
def le(a: Type, b: Type) -> Type:
    return _compare(a, b)


@op
def gt(a: Type, b: Type) -> Type:
    return _compare(a, b)


@op
def ge(a: Type, b: Type) -> Type:
    return _compare(a, b)


@op(commutes=True)
def and_(a: Type, b: Type) -> Type:
    return _logical(a, b)


@op(commutes=True)
def or_(a: Type, b: Type) -> Type:
    return _logical(a, b)


@op
def not_(x: Type) -> Type:
    require(x.dtype == "bool", f"operand {x} is not bool")
    return x


@op
def where(condition: Type, a: Type, b: Type, *, dtype: str | None = None) -> Type:
    """a where condition, else b"""
    require(condition.dtype == "bool", f"condition {condition} is not bool")
    return Type(dtype or promote(a, b), broadcast_shapes(condition.shape, a.shape, b.shape))


@op
def pointwise(
    *xs: Type,
    expr: tuple[Attr, ...],
    results: tuple[int, ...],
    shape: tuple[int, ...],
    others: tuple[str, ...] = (),
    dtype: str | None = None,
) -> AnyType:
    """A fused program of pointwise ops: steps (op, argument, ...), argument i being operand i, or step i - operands.

    ("const", value) is a number, ("cast", argument, dtype) rounds; between steps nothing else is rounded. The results
    are the values of these numbers, broadcast to `shape`; `others` are the element types of all but the last one.
    """
    known = len(xs) + len(expr)
    require(len(results) == len(others) + 1, f"{len(results)} results, element types of {len(others)} but the last")
    require(all(0 <= r < known for r in results), f"results {list(results)} of {known} values")
    require(broadcast_shapes(shape, *(x.shape for x in xs)) == shape, f"operands {xs} do not fit {list(shape)}")
    last = dtype or (promote(*xs) if xs else "f32")
    return _one(tuple(Type(each, shape) for each in (*others, last)))


# --- reductions ---------------------------------------------------------------------------------------------------


def _axis(x: Type, axis: int) -> int:
    require(-x.rank <= axis < 0, f"axis {axis} of {x}")
    return x.rank + axis


def _reduce(x: Type, axes: tuple[int, ...], keepdims: bool, dtype: str | None) -> Type:
    dropped = {_axis(x, a) for a in axes}
    kept = [1 if i in dropped else n for i, n in enumerate(x.shape) if keepdims or i not in dropped]
    return Type(dtype or x.dtype, tuple(kept))


@op
def reduce_sum(x: Type, *, axes: tuple[int, ...], keepdims: bool = True, dtype: str | None = None) -> Type:
    return _reduce(x, axes, keepdims, dtype)


@op
def reduce_mean(x: Type, *, axes: tuple[int, ...], keepdims: bool = True, dtype: str | None = None) -> Type:
    return _reduce(x, axes, keepdims, dtype)


@op
def reduce_max(x: Type, *, axes: tuple[int, ...], keepdims: bool = True, dtype: str | None = None) -> Type:
    return _reduce(x, axes, keepdims, dtype)


@op
def reduce_any(x: Type, *, axes: tuple[int, ...], keepdims: bool = True) -> Type:
    require(x.dtype == "bool", f"operand {x} is not bool")
    return _reduce(x, axes, keepdims, None)


@op
def reduce_all(x: Type, *, axes: tuple[int, ...], keepdims: bool = True) -> Type:
    require(x.dtype == "bool", f"operand {x} is not bool")
    return _reduce(x, axes, keepdims, None)


@op
def argmax(x: Type, *, axis: int, dtype: str = "i64") -> Type:
    """Index of the first largest element along `axis`, which disappears"""
    return _reduce(x, (axis,), False, dtype)


@op
def cumsum(x: Type, *, axis: int, dtype: str | None = None) -> Type:
    """Sum over all elements up to and including this one along `axis`."""
    _axis(x, axis)
    return _unary(x, dtype)


@op
def softmax(x: Type, *, axis: int = -1, dtype: str | None = None) -> Type:
    """exp(x - max(x)) / sum(exp(x - max(x))) along `axis`"""
    _axis(x, axis)
    return _unary(x, dtype)


# --- shape --------------------------------------------------------------------------------------------------------


@op
def reshape(x: Type, *, shape: tuple[int, ...]) -> Type:
    require(Type(x.dtype, shape).size == x.size, f"{x} does not have the elements of {list(shape)}")
    return Type(x.dtype, shape)


@op
def transpose(x: Type, *, perm: tuple[int, ...]) -> Type:
    """Axis i of the last len(perm) axes of the result is axis perm[i] (negative) of x; leading axes stay."""
    n = len(perm)
    require(n <= x.rank and sorted(perm) == list(range(-n, 0)), f"perm {list(perm)} of {x}")
    return Type(x.dtype, x.shape[: x.rank - n] + tuple(x.shape[p] for p in perm))


@op
def broadcast(x: Type, *, shape: tuple[int, ...]) -> Type:
    require(broadcast_shapes(x.shape, shape) == shape, f"{x} does not broadcast to {list(shape)}")
    return Type(x.dtype, shape)


@op
def slice_(x: Type, *, axis: int, start: int, stop: int, step: int = 1) -> Type:
    i = _axis(x, axis)
    require(0 <= start <= stop <= x.shape[i] and step > 0, f"[{start}:{stop}:{step}] of axis {axis} of {x}")
    return Type(x.dtype, x.shape[:i] + (-((start - stop) // step),) + x.shape[i + 1 :])


@op
def concat(*xs: Type, axis: int) -> Type:
    first, i = xs[0], _axis(xs[0], axis)
    for x in xs:
        same = x.dtype == first.dtype and x.shape[:i] + x.shape[i + 1 :] == first.shape[:i] + first.shape[i + 1 :]
        require(x.rank == first.rank and same, f"{x} does not continue {first} along axis {axis}")
    return Type(first.dtype, first.shape[:i] + (sum(x.shape[i] for x in xs),) + first.shape[i + 1 :])


@op
def pad(x: Type, *, axis: int, before: int, after: int, value: float = 0.0) -> Type:
    i = _axis(x, axis)
    return Type(x.dtype, x.shape[:i] + (before + x.shape[i] + after,) + x.shape[i + 1 :])


@op
def iota(*, size: int, dtype: str = "i32") -> Type:
    """0, 1, ..., size - 1"""
    return Type(dtype, (size,))


@op
def view(x: Type, *, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Type:
    """Element i of the result is element offset + sum(i * strides) of x's storage, row-major. No data moves."""
    require(len(shape) == len(strides), f"shape {list(shape)} and strides {list(strides)} differ in rank")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 0)
    require(offset >= 0 and last < max(x.size, 1), f"view up to element {last} of {x}")
    return Type(x.dtype, shape)


# --- lookups ------------------------------------------------------------------------------------------------------


@op
def embedding(table: Type, ids: Type, *, scale: float = 1.0, dtype: str | None = None) -> Type:
    """Rows of table [V, D] by ids [...], times scale: [..., D]"""
    require(table.rank == 2 and not ids.is_float, f"table {table}, ids {ids}")
    return Type(dtype or table.dtype, ids.shape + table.shape[-1:])


@op
def index(table: Type, i: Type) -> Type:
    """Entry i (integer []) of the leading axis of table."""
    require(i.rank == 0 and not i.is_float and table.rank > 0, f"table {table}, index {i}")
    return Type(table.dtype, table.shape[1:])


# --- states -------------------------------------------------------------------------------------------------------


@op
def read(s: Type) -> Type:
    """The value of this version of a state."""
    return s


@op
def write(s: Type, value: Type, at: Type, *, axis: int) -> Type:
    """The next version of a state: value takes the place from index `at` (integer []) on along `axis`."""
    i = _axis(s, axis) if s.rank else 0
    fits = value.dtype == s.dtype and value.rank == s.rank
    extents = enumerate(zip(value.shape, s.shape, strict=False))
    fits = fits and all(a == b or (j == i and a <= b) for j, (a, b) in extents)
    require(fits, f"value {value} does not fit into state {s} along axis {axis}")
    require(at.rank == 0 and not at.is_float, f"position {at} is not an integer scalar")
    return s


# --- results in FP8 -----------------------------------------------------------------------------------------------


def _emitted(y: Type, inv: Type | None, per_row: bool, rows: tuple[int, ...] | None = None) -> tuple[Type, ...]:
    """(y,), or (y, its scales): how every op that may store FP8 ends. docs/numerics.md

    inv       f32 []: y is stored times it
    per_row   y is stored times 448 / m, m the largest magnitude of its row, and m / 448 is one more result
    rows      shape of these scales where a row is more than the last axis
    """
    require(inv is None or (inv.dtype, inv.rank) == ("f32", 0), f"inv {inv} is not one f32")
    require(not (inv is not None and per_row), "inv and per_row exclude each other")
    require(not (inv is not None or per_row) or y.dtype == "e4m3", f"a scaled result is e4m3, not {y.dtype}")
    return (y, Type("f32", rows or (*y.shape[:-1], 1))) if per_row else (y,)


def _one(types: tuple[Type, ...]) -> AnyType:
    return types if len(types) > 1 else types[0]


MOMENTS = 32  # elements of a row that one of its moments is of
DEFERRED = {"none": 0, "rms": 1, "layer": 2}  # norms that a product makes up for, and the moments of each 32 elements


def moments(width: int, norm: str) -> int:
    """Moments of a row of `width` elements."""
    return -(-width // MOMENTS) * DEFERRED[norm]


def _scales_fit(x: Type, n: int, alpha: Type | None, x_scale: Type | None, norm: str = "none") -> None:
    require(alpha is None or (alpha.dtype == "f32" and alpha.shape in ((), (n,))), f"alpha {alpha} for {n} columns")
    require(norm in DEFERRED, f"norm {norm}")
    factors = moments(x.shape[-1], norm) or 1
    fits = x_scale is None or (x_scale.dtype, x_scale.shape) == ("f32", (*x.shape[:-1], factors))
    require(
        fits and (norm == "none" or x_scale is not None),
        f"x_scale {x_scale} does not fit the rows of x {x}, norm {norm}",
    )


# --- linear algebra -----------------------------------------------------------------------------------------------


def _matmul_flops(types: tuple[Type | None, ...], result: AnyType, attrs: object) -> float:
    assert isinstance(result, Type) and types[0] is not None
    return 2.0 * result.size * types[0].shape[-1]


def _product_flops(types: tuple[Type | None, ...]) -> float:
    """Of the first operand times the others, which are weights."""
    x, *weights = types
    assert x is not None
    return sum(2.0 * x.size * w.shape[0] for w in weights if w is not None)


@op(inner=("staged",), flops=lambda types, result, attrs: _product_flops(types[:2]))
def linear(
    x: Type,
    w: Type,
    b: Type | None = None,
    residual: Type | None = None,
    gate: Type | None = None,
    rows: Type | None = None,
    alpha: Type | None = None,
    x_scale: Type | None = None,
    inv: Type | None = None,
    *,
    act: str = "none",
    norm: str = "none",
    eps: float = 0.0,
    per_row: bool = False,
    staged: str = "bf16",
    dtype: str | None = None,
) -> AnyType:
    """residual + gate * act(x_scale * alpha * (x @ w.T) + b); x [..., K], w [N, K], b [N], residual [..., N], gate [N]
    or [..., N], x_scale [..., 1], alpha [N] or [].

    norm: x is a value before its norm, and the product makes up for it. x_scale then has the moments of each row as
    linear_moments gives them, and stands for 1 / sqrt(v + eps), v the mean square of K elements ("rms") or their
    variance ("layer").

    rows (integer []): what lies at or beyond it along axis -2 is unspecified, NaN too; references give NaN there.
    Where `per_row`, y is rounded to `staged` before the maximum of its row is known.
    """
    return _one(_emitted(_linear(x, w, b, residual, gate, rows, alpha, x_scale, dtype, norm), inv, per_row))


def _linear(
    x: Type,
    w: Type,
    b: Type | None,
    residual: Type | None,
    gate: Type | None,
    rows: Type | None,
    alpha: Type | None,
    x_scale: Type | None,
    dtype: str | None,
    norm: str = "none",
) -> Type:
    _counts_rows(x, rows)
    require(w.rank == 2 and x.rank >= 1 and x.shape[-1] == w.shape[1], f"inner sizes of x {x} and w {w} differ")
    _scales_fit(x, w.shape[0], alpha, x_scale, norm)
    out = x.shape[:-1] + w.shape[:1]
    for name, extra in (("b", b), ("residual", residual), ("gate", gate)):
        fits = extra is None or broadcast_shapes(extra.shape, out) == out
        require(fits, f"{name} {extra} does not fit {list(out)}")
    return Type(dtype or x.dtype, out)


def _counts_rows(x: Type, rows: Type | None) -> None:
    fits = rows is None or (rows.rank == 0 and not rows.is_float and x.rank >= 2)
    require(fits, f"rows {rows} is not an integer scalar that counts the rows of {x}")


@op(inner=("staged",), flops=lambda types, result, attrs: _product_flops(types[:3]))
def gated_linear(
    x: Type,
    gate: Type,
    up: Type | None = None,
    rows: Type | None = None,
    alpha: Type | None = None,
    x_scale: Type | None = None,
    inv: Type | None = None,
    b: Type | None = None,
    *,
    act: str,
    norm: str = "none",
    eps: float = 0.0,
    per_row: bool = False,
    staged: str = "bf16",
    dtype: str | None = None,
) -> AnyType:
    """act(x @ gate.T) * (x @ up.T); without `up`, `gate` is [2F, K] with row 2i of the gate and row 2i + 1 of up, and
    the products may be scaled and shifted: x_scale, norm and alpha ([2F] or []) as in linear, b [2F].

    rows (integer []): what lies at or beyond it along axis -2 is unspecified, NaN too; references give NaN there.
    Where `per_row`, y is rounded to `staged` before the maximum of its row is known.
    """
    _counts_rows(x, rows)
    require(x.shape[-1] == gate.shape[-1], f"inner size {x.shape[-1]} of x is not {gate.shape[-1]} of gate")
    require(up is None or (gate.dtype, gate.shape) == (up.dtype, up.shape), f"gate {gate} and up {up} differ")
    require(up is None or (alpha is x_scale is b is None), "scaled or shifted products of two weights")
    require(b is None or b.shape == gate.shape[:1], f"b {b} does not fit gate {gate}")
    _scales_fit(x, gate.shape[0], alpha, x_scale, norm)
    width = gate.shape[0] if up is not None else gate.shape[0] // 2
    return _one(_emitted(Type(dtype or x.dtype, x.shape[:-1] + (width,)), inv, per_row))


@op(flops=lambda types, result, attrs: _product_flops(types[:2]))
def linear_rope_qkv(
    x: Type,
    w: Type,
    b: Type | None = None,
    cos: Type | None = None,
    sin: Type | None = None,
    rows: Type | None = None,
    alpha: Type | None = None,
    x_scale: Type | None = None,
    *,
    heads: int,
    kv_heads: int,
    norm: str = "none",
    eps: float = 0.0,
    dtype: str | None = None,
) -> AnyType:
    """q [heads, S, D], k and v [kv_heads, S, D] of x [S, K]; q and k rotated by cos, sin [S, D/2] ("half" pairing).

    Rows 2i and 2i + 1 of w (and b, alpha) inside each head of q and k make elements i and i + D/2; v's are in order.
    Scales, norm and rows as in linear. Nothing is rounded between product and rotation.
    """
    y = _linear(x, w, b, None, None, rows, alpha, x_scale, dtype, norm)
    groups = heads + 2 * kv_heads
    require(x.rank == 2 and y.shape[1] % (2 * groups) == 0, f"x {x}, w {w} do not make {groups} heads")
    length, size = x.shape[0], y.shape[1] // groups
    fits = cos is not None and sin is not None and cos.shape == sin.shape == (length, size // 2)
    require(fits, f"tables {cos} and {sin} do not fit x {x}")
    q, kv = Type(y.dtype, (heads, length, size)), Type(y.dtype, (kv_heads, length, size))
    return (q, kv, kv)


@op(inner=("stored",), flops=lambda types, result, attrs: _product_flops(types[:2]))
def linear_norm(
    x: Type,
    w: Type,
    b: Type | None = None,
    residual: Type | None = None,
    gate: Type | None = None,
    rows: Type | None = None,
    alpha: Type | None = None,
    x_scale: Type | None = None,
    norm_w: Type | None = None,
    norm_b: Type | None = None,
    inv: Type | None = None,
    *,
    act: str = "none",
    kind: str,
    eps: float,
    offset: float = 0.0,
    per_row: bool = False,
    stored: str = "bf16",
    dtype: str | None = None,
) -> AnyType:
    """s = linear(..) rounded to `stored`; y = norm of the rounded s, as residual_norm makes it of norm_w and norm_b."""
    require(kind in ("rms", "layer", "ada"), f"kind {kind}")
    s = _linear(x, w, b, residual, gate, rows, alpha, x_scale, stored)
    _vectors_fit(s, norm_w=norm_w, norm_b=norm_b)
    return (s, *_emitted(Type(dtype or stored, s.shape), inv, per_row))


@op(inner=("stored",), flops=lambda types, result, attrs: _product_flops(types[:2]))
def linear_moments(
    x: Type,
    w: Type,
    b: Type | None = None,
    residual: Type | None = None,
    gate: Type | None = None,
    rows: Type | None = None,
    alpha: Type | None = None,
    x_scale: Type | None = None,
    norm_w: Type | None = None,
    inv: Type | None = None,
    *,
    act: str = "none",
    norm: str,
    offset: float = 0.0,
    stored: str = "bf16",
    dtype: str | None = None,
) -> AnyType:
    """(s, moments, z): s = linear(..) rounded to `stored`, its moments in fp32, z = s * (offset + norm_w) * inv.

    What a norm of s needs without reading s again (no norm_w: z = s * inv): its readers multiply z and make up for the
    rest (`norm` of linear).
    Moments [..., P] of P = ceil(N / 32) parts of 32 elements, the last one may be shorter: the sum of squares of each
    part ("rms"), or sum and sum of squares of the first, of the second, .. ("layer": [..., 2 P]).
    """
    require(norm in DEFERRED and norm != "none", f"norm {norm}")
    s = _linear(x, w, b, residual, gate, rows, alpha, x_scale, stored)
    _vectors_fit(s, norm_w=norm_w)
    z = _emitted(Type(dtype or stored, s.shape), inv, False)
    return (s, Type("f32", (*s.shape[:-1], moments(s.shape[-1], norm))), *z)


@op
def quantize(w: Type, scale: Type) -> Type:
    """e4m3 of w [N, K] / scale [N]: a weight in FP8"""
    require(w.rank == 2 and scale.shape == w.shape[:1], f"scale {scale} is not one for each row of w {w}")
    return Type("e4m3", w.shape)


@op
def channel_scale(w: Type) -> Type:
    """f32 [N]: largest magnitude of each row of w [N, K] / 448, or of all rows where that leaves less squared error"""
    require(w.rank == 2, f"w {w} is no matrix")
    return Type("f32", w.shape[:1])


@op(flops=_matmul_flops)
def matmul(a: Type, b: Type, *, dtype: str | None = None) -> Type:
    """a [..., M, K] @ b [..., K, N]"""
    require(a.rank >= 2 and b.rank >= 2 and a.shape[-1] == b.shape[-2], f"inner sizes of {a} and {b} differ")
    lead = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return Type(dtype or promote(a, b), (*lead, a.shape[-2], b.shape[-1]))


@op
def conv2d(
    x: Type,
    w: Type,
    b: Type | None = None,
    *,
    stride: tuple[int, int],
    padding: tuple[int, int] = (0, 0),
    dtype: str | None = None,
) -> Type:
    """Cross-correlation: x [..., C, H, W], w [O, C, h, w] -> [..., O, H', W']"""
    require(w.rank == 4 and x.rank >= 3 and x.shape[-3] == w.shape[1], f"channels of x {x} and w {w} differ")
    size = [(x.shape[i] + 2 * padding[i] - w.shape[i]) // stride[i] + 1 for i in (-2, -1)]
    return Type(dtype or x.dtype, x.shape[:-3] + (w.shape[0], size[0], size[1]))


def _attention_flops(types: tuple[Type | None, ...], result: AnyType, attrs: object) -> float:
    q, k, v = types[:3]
    assert q and k and v
    rows = q.size // q.shape[-1]
    return 2.0 * rows * k.shape[-2] * (q.shape[-1] + v.shape[-1])


@op(inner=("probs", "staged"), flops=_attention_flops)
def attention(
    q: Type,
    k: Type,
    v: Type,
    mask: Type | None = None,
    length: Type | None = None,
    inv: Type | None = None,
    *,
    scale: float,
    causal: bool = False,
    resume: int = -1,
    probs: str = "f32",
    per_row: bool = False,
    staged: str = "bf16",
    dtype: str | None = None,
) -> AnyType:
    """softmax(scale q k^T, over visible keys) v; q [..., Hq, Sq, D], k [..., Hkv, Sk, D], v [..., Hkv, Sk, Dv].

    Query head h reads key head h // (Hq / Hkv). Key j is visible to query i iff mask[..., i, j] where given, and
    (length absent, or j < length, or 0 <= resume <= j), and (not causal, or j <= i + Sk - Sq). Softmax in fp32;
    probabilities are rounded to `probs` before they meet v. A query that sees no key yields zeros. Where `per_row`, all
    heads of a token are one row, scales [..., Sq, 1], and y is rounded to `staged` before its maximum is known.
    """
    require(q.rank >= 3 and q.rank == k.rank == v.rank, f"ranks of q {q}, k {k}, v {v} differ")
    require(q.shape[-1] == k.shape[-1], f"head sizes of q {q} and k {k} differ")
    require(k.shape[:-1] == v.shape[:-1], f"k {k} and v {v} differ in heads or length")
    require(q.shape[:-3] == k.shape[:-3], f"batch of q {q} and k {k} differ")
    require(q.shape[-3] % k.shape[-3] == 0, f"{q.shape[-3]} query heads over {k.shape[-3]} key heads")
    scores = (*q.shape[:-1], k.shape[-2])
    if mask is not None:
        require(mask.dtype == "bool", f"mask {mask} is not bool")
        require(broadcast_shapes(mask.shape, scores) == scores, f"mask {mask} does not fit {list(scores)}")
    require(length is None or (length.rank == 0 and not length.is_float), f"length {length} is not an integer scalar")
    y = Type(dtype or q.dtype, (*q.shape[:-1], v.shape[-1]))
    return _one(_emitted(y, inv, per_row, (*q.shape[:-3], q.shape[-2], 1)))


# --- norms --------------------------------------------------------------------------------------------------------


def _vectors_fit(x: Type, **vectors: Type | None) -> None:
    for name, v in vectors.items():
        require(v is None or broadcast_shapes(v.shape, x.shape) == x.shape, f"{name} {v} does not fit x {x}")


@op(inner=("inner",))
def rms_norm(
    x: Type,
    w: Type | None = None,
    inv: Type | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    inner: str = "f32",
    per_row: bool = False,
    dtype: str | None = None,
) -> AnyType:
    """inner(x * rsqrt(mean(x^2) + eps)) * (offset + w) over the last axis"""
    _vectors_fit(x, w=w)
    return _one(_emitted(_unary(x, dtype), inv, per_row))


@op
def ada_rms_norm(
    x: Type,
    scale: Type,
    shift: Type,
    inv: Type | None = None,
    *,
    eps: float,
    per_row: bool = False,
    dtype: str | None = None,
) -> AnyType:
    """x * rsqrt(mean(x^2) + eps) * (1 + scale) + shift over the last axis"""
    _vectors_fit(x, scale=scale, shift=shift)
    return _one(_emitted(_unary(x, dtype), inv, per_row))


@op
def layer_norm(
    x: Type,
    w: Type | None = None,
    b: Type | None = None,
    inv: Type | None = None,
    *,
    eps: float,
    per_row: bool = False,
    dtype: str | None = None,
) -> AnyType:
    """(x - mean(x)) * rsqrt(var(x) + eps) * w + b over the last axis; biased variance"""
    _vectors_fit(x, w=w, b=b)
    return _one(_emitted(_unary(x, dtype), inv, per_row))


@op
def residual_norm(
    x: Type,
    r: Type,
    gate: Type | None = None,
    w: Type | None = None,
    b: Type | None = None,
    inv: Type | None = None,
    *,
    kind: str,
    eps: float,
    offset: float = 0.0,
    per_row: bool = False,
    dtype: str | None = None,
) -> AnyType:
    """s = x + gate * r, rounded to x's type; y = norm of the rounded s.

    kind "rms": rms_norm(s, w, offset); "layer": layer_norm(s, w, b); "ada": ada_rms_norm(s, scale=w, shift=b)
    """
    require(kind in ("rms", "layer", "ada"), f"kind {kind}")
    require(x.shape == r.shape, f"x {x} and r {r} differ")
    _vectors_fit(x, gate=gate, w=w, b=b)
    return (x, *_emitted(_unary(x, dtype), inv, per_row))


# --- positions ----------------------------------------------------------------------------------------------------


@op
def rope(x: Type, cos: Type, sin: Type, *, pairing: str = "half", dtype: str | None = None) -> Type:
    """Rotation of pairs by position: x [..., S, D], cos and sin [..., S, D/2].

    "half": (x1, x2) are the halves of the last axis; "interleaved": its even and odd elements.
    y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin
    """
    require(pairing in ("half", "interleaved"), f"pairing {pairing}")
    half = (*x.shape[:-1], x.shape[-1] // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        require(broadcast_shapes(table.shape, half) == half, f"{name} {table} does not fit x {x}")
    return _unary(x, dtype)


@op
def rope_qkv(
    x: Type, cos: Type, sin: Type, *, heads: int, kv_heads: int, pairing: str = "half", dtype: str | None = None
) -> AnyType:
    """q [heads, S, D], k and v [kv_heads, S, D] out of a projection x [S, (heads + 2 kv_heads) D]; q, k are rotated"""
    groups = heads + 2 * kv_heads
    require(x.rank == 2 and x.shape[1] % groups == 0, f"x {x} does not hold {groups} heads")
    rows, size = x.shape[0], x.shape[1] // groups
    require(cos.shape == sin.shape == (rows, size // 2), f"tables {cos} and {sin} do not fit x {x}")
    q, kv = Type(dtype or x.dtype, (heads, rows, size)), Type(dtype or x.dtype, (kv_heads, rows, size))
    return (q, kv, kv)


OPS: dict[str, Op] = {row.name: row for row in list(globals().values()) if isinstance(row, Op)}
for _module in plugins.table("ops", "frtc.lowering", ()).values():
    OPS |= {row.name: row for row in vars(_module).values() if isinstance(row, Op)}

POINTWISE = frozenset(
    "neg abs exp log tanh erf sin cos sqrt rsqrt floor sigmoid silu gelu_tanh gelu_erf cast add sub mul div floor_div "
    "mod "
    "pow minimum maximum eq ne lt le gt ge and or not where pointwise".split()
)
SHAPE = frozenset({"reshape", "transpose", "broadcast", "slice", "view"})  # move no data once they are strided views
