"""One graph for each op of the table, with each attribute away from its default somewhere."""

from __future__ import annotations

from collections.abc import Callable

from frtc.lowering import ir, ops
from frtc.lowering.ir import Graph, Node, Type, item


def leaf(name: str, dtype: str, *shape: int) -> Node:
    return ir.input_(name, Type(dtype, shape))


def weight(name: str, dtype: str, *shape: int) -> Node:
    return ir.weight(name, Type(dtype, shape))


X = leaf("x", "bf16", 2, 6, 8)
Y = leaf("y", "bf16", 2, 6, 8)
F = leaf("f", "f32", 2, 6, 8)
I = leaf("i", "i32", 6)  # noqa: E741 (integers)
B = leaf("b", "bool", 2, 6, 8)
C = leaf("c", "bool", 2, 6, 8)
N = leaf("n", "i32")
V = weight("v", "f32", 8)
W = weight("w", "bf16", 4, 8)
W2 = weight("w2", "bf16", 4, 8)
Q = leaf("q", "bf16", 4, 6, 8)
K = leaf("k", "bf16", 2, 5, 8)
TABLE = leaf("table", "f32", 6, 4)
KV = ir.state("kv", Type("bf16", (2, 12, 8)))

UNARY = "neg abs exp log tanh erf sin cos sqrt rsqrt floor sigmoid silu gelu_tanh gelu_erf".split()
BINARY = "add sub mul div mod pow minimum maximum floor_div".split()
COMPARE = "eq ne lt le gt ge".split()
REDUCE = "reduce_sum reduce_mean reduce_max".split()

EXAMPLES: dict[str, Callable[[], Node]] = {
    **{name: lambda name=name: ops.OPS[name](X, dtype="f32") for name in UNARY},
    **{name: lambda name=name: ops.OPS[name](X, V, dtype="f32") for name in BINARY},
    **{name: lambda name=name: ops.OPS[name](X, V) for name in COMPARE},
    **{name: lambda name=name: ops.OPS[name](X, axes=(-3, -1), keepdims=False, dtype="f32") for name in REDUCE},
    **{name: lambda name=name: ops.OPS[name](B, axes=(-1,)) for name in ("reduce_any", "reduce_all")},
    "and": lambda: ops.and_(B, C),
    "or": lambda: ops.or_(B, C),
    "not": lambda: ops.not_(B),
    "where": lambda: ops.where(B, X, -1.5, dtype="bf16"),
    "pointwise": lambda: item(
        ops.pointwise(
            X, V, expr=(("mul", 0, 1), ("const", -0.5), ("add", 2, 3), ("cast", 4, "bf16")), results=(2, 5),
            shape=(2, 6, 8), others=("f16",), dtype="f32",
        ), 1
    ),
    "cast": lambda: ops.cast(X, dtype="i8"),
    "argmax": lambda: ops.argmax(X, axis=-2, dtype="i32"),
    "cumsum": lambda: ops.cumsum(I, axis=-1, dtype="i64"),
    "softmax": lambda: ops.softmax(X, axis=-2, dtype="f32"),
    "reshape": lambda: ops.reshape(X, shape=(4, 24)),
    "transpose": lambda: ops.transpose(X, perm=(-1, -2)),
    "broadcast": lambda: ops.broadcast(V, shape=(3, 8)),
    "slice": lambda: ops.slice_(X, axis=-1, start=1, stop=8, step=3),
    "concat": lambda: ops.concat(X, Y, X, axis=-2),
    "pad": lambda: ops.pad(X, axis=-1, before=1, after=2, value=-0.0),
    "iota": lambda: ops.iota(size=7, dtype="f64"),
    "view": lambda: ops.view(X, shape=(2, 8), strides=(8, 1), offset=3),
    "embedding": lambda: ops.embedding(TABLE, I, dtype="bf16"),
    "index": lambda: ops.index(TABLE, N),
    "read": lambda: ops.read(KV),
    "write": lambda: ops.write(KV, leaf("new", "bf16", 2, 3, 8), N, axis=-2),
    "linear": lambda: ops.linear(X, W, BIAS, None, GATE, act="silu", dtype="f32"),
    "gated_linear": lambda: ops.gated_linear(X, W, W2, act="gelu_tanh", dtype="f32"),
    "linear_rope_qkv": lambda: item(
        ops.linear_rope_qkv(
            leaf("rows8", "bf16", 6, 8), weight("qkv", "bf16", 64, 8), None, COS, SIN, None,
            weight("alpha64", "f32", 64), leaf("scales", "f32", 6, 1), heads=4, kv_heads=2, dtype="bf16",
        ), 1
    ),
    "linear_norm": lambda: item(
        ops.linear_norm(
            X, weight("square", "bf16", 8, 8), None, Y, V, None, None, None, V, weight("shift", "f32", 8),
            act="silu", kind="ada", eps=1e-5, per_row=True, dtype="e4m3",
        ), 2
    ),
    "linear_moments": lambda: item(
        ops.linear_moments(
            X, weight("square", "bf16", 8, 8), None, Y, V, None, None, None, V, leaf("inv", "f32"), act="silu",
            norm="layer", offset=1.0, stored="f16", dtype="e4m3",
        ), 2
    ),
    "quantize": lambda: ops.quantize(W, ops.channel_scale(W)),
    "channel_scale": lambda: ops.channel_scale(W),
    "matmul": lambda: ops.matmul(X, ops.transpose(Y, perm=(-1, -2)), dtype="f32"),
    "conv2d": lambda: ops.conv2d(
        leaf("image", "f32", 2, 3, 9, 9), weight("patch", "f32", 5, 3, 3, 3), stride=(2, 3), padding=(1, 0),
        dtype="bf16",
    ),
    "attention": lambda: ops.attention(
        Q, K, K, leaf("mask", "bool", 6, 5), N, scale=0.125, causal=True, resume=4, probs="bf16", dtype="f32"
    ),
    "rms_norm": lambda: ops.rms_norm(X, V, eps=1e-6, offset=1.0, inner="bf16", dtype="f32"),
    "ada_rms_norm": lambda: ops.ada_rms_norm(X, V, weight("shift", "f32", 8), eps=1e-5, dtype="f32"),
    "layer_norm": lambda: ops.layer_norm(X, None, V, eps=1e-5, dtype="f32"),
    "residual_norm": lambda: item(ops.residual_norm(X, Y, None, V, kind="rms", eps=1e-6, offset=1.0, dtype="f32"), 1),
    "rope": lambda: ops.rope(Q, COS, SIN, pairing="interleaved", dtype="f32"),
    "rope_qkv": lambda: item(
        ops.rope_qkv(
            leaf("qkv", "bf16", 6, 64), COS, SIN, heads=4, kv_heads=2, pairing="interleaved", dtype="f32"
        ), 2
    ),
}  # fmt: skip
BIAS, GATE = weight("bias", "f32", 4), weight("gate", "f32", 4)
COS, SIN = leaf("cos", "f32", 6, 4), leaf("sin", "f32", 6, 4)


def graph_of(node: Node, name: str = "g", variant: str = "") -> Graph:
    """A graph that returns `node` (for a write: that ends in it), with all its inputs and states declared."""
    found = list(ir.walk([node]))
    inputs = tuple(n for n in found if n.op == "input")
    states = tuple(n for n in found if n.op == "state")
    if node.op == "write":
        return Graph(name, inputs, (("value", ops.read(node)),), states, ((states[0]["name"], node),), variant)
    return Graph(name, inputs, (("out", node),), states, (), variant)
