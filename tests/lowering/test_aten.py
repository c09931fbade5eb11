"""Every row of the ATen tables: a line of torch, traced, interpreted, compared with what torch computes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frtc.lowering import aten, aten_create, aten_pointwise, from_torch
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph
from frtc.lowering.text import parse, show
from frtc.lowering.verify import verify
from tests.lowering.tiny import array

SDPA = F.scaled_dot_product_attention
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


X, Y = normal(2, 3, 4), normal(2, 3, 4)
XB, YB = X.bfloat16(), Y.bfloat16()
D = normal(3, 4, dtype=torch.float64)
I, J = torch.tensor([[3, -2, 7, 0]]), torch.tensor([[2, 3, -4, 5]])  # noqa: E741
I32 = torch.tensor([5, -1, 2], dtype=torch.int32)
P, Q = X > 0, Y > 0
N = torch.tensor(3, dtype=torch.int32)
S = torch.tensor(0.3337)  # f32 scalar tensor, rounded when it meets bf16
IDS = torch.tensor([[1, 0], [2, 2]])
W, V = normal(5, 4), normal(5)
QH, KH, VH = normal(1, 4, 3, 8), normal(1, 2, 6, 8), normal(1, 2, 6, 8)
K4, V4 = normal(1, 4, 6, 8), normal(1, 4, 6, 8)
MASK = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()

Case = tuple[Callable[..., object], tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    # arithmetic, also in bf16 with Python numbers and with scalar tensors, on integers, in float64
    "add": (lambda a, b: (a + b, a + 1, 2.5 + a), (X, Y)),
    "add_bf16": (lambda a, b, s: (a + b, a + 0.1, a * s, a / 3, s - a), (XB, YB, S)),
    "add_alpha": (
        lambda a, b: (
            torch.add(a, b, alpha=0.3),
            torch.sub(a, b, alpha=2),
            torch.rsub(a, 1.5, alpha=3),
            torch.rsub(a, b),
        ),
        (X, Y),
    ),
    "add_mixed": (lambda a, b, n: (a + b, a * n, b - n, a * 2), (I, J, N)),
    "int_float": (lambda a: (a * 0.5, a / 2, a + 1.5, torch.sqrt(a * a)), (I,)),
    "bf16_f32": (lambda a, b: (a + b, a + b.sum(), b * a.sum()), (XB, Y)),
    "f64": (lambda a: (a * 0.1, 1 / a, a.float() * 3, torch.sin(a)), (D,)),
    "floor_divide": (lambda a, b: (a // b, a % b, torch.div(a, b, rounding_mode="floor"), a // 2, 7 % b), (I, J)),
    "floor_float": (lambda a, b: (torch.div(a, b, rounding_mode="floor"), torch.remainder(a, 0.7)), (X, Y)),
    "pow": (lambda a: (a.abs() ** 1.5, a**2, 2.0**a, a.abs() ** a, torch.square(a), torch.reciprocal(a)), (X,)),
    "addcmul": (lambda a, b: torch.addcmul(a, b, b, value=0.5), (XB, YB)),
    "clamp": (
        lambda a, b: (a.clamp(-0.5, 0.5), a.clamp(min=b), a.clamp_min(0.1), a.clamp_max(b), a.clamp_min(b), F.relu(a)),
        (X, Y),
    ),
    "clamp_int": (lambda a: (a.clamp(min=0), a.clamp_max(2)), (I,)),
    "maximum": (lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)), (X, Y)),
    "unary": (lambda a: (a.neg(), a.abs(), a.exp(), a.tanh(), a.erf(), a.sin(), a.cos(), a.floor(), a.sigmoid()), (X,)),
    "unary_positive": (lambda a: (a.abs().log(), a.abs().sqrt(), a.abs().rsqrt()), (X,)),
    "activations": (lambda a: (F.silu(a), F.gelu(a), F.gelu(a, approximate="tanh")), (X,)),
    "dropout": (lambda a: F.dropout(a, 0.5, training=False) + 1, (X,)),
    # comparisons and logic
    "compare": (
        lambda a, b: (a == b, a != b, a < b, a <= b, a > b, a >= b, a > 0.25, a != 0, a == 0, a <= 0.5, a < 0.5),
        (X, Y),
    ),
    "compare_int": (lambda a, b: (a == b, a < 1.5, a >= 2, a <= b), (I, J)),
    "logic": (
        lambda p, q: (p & q, p | q, ~p, p.logical_and(q), p.logical_or(q), p.logical_not(), p.logical_xor(q)),
        (P, Q),
    ),
    "logic_named": (lambda p, q: (torch.bitwise_and(p, q), torch.bitwise_or(p, q), torch.bitwise_not(p)), (P, Q)),
    "logic_numbers": (lambda a, b: (a.logical_and(b), a.bool(), a.logical_not()), (I, J)),
    "where": (
        lambda p, a, b: (
            torch.where(p, a, b),
            torch.where(p, a, -1e30),
            torch.where(p, 0.5, a),
            torch.where(p, 1.0, 0.0),
        ),
        (P, X, Y),
    ),
    "masked_fill": (lambda p, a, s: (a.masked_fill(p, -3.5), a.masked_fill(p, s)), (P, XB, S)),
    "cast": (
        lambda a, i: (a.to(torch.bfloat16), a.to(torch.int32), i.float(), a.double().float(), i.type_as(a)),
        (X, I),
    ),
    "copies": (
        lambda a: (
            a.clone() + 1,
            a.detach() + 2,
            torch.ops.aten.alias(a) - 1,
            a.contiguous() + 3,
            a + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        ),
        (X,),
    ),
    # creation
    "filled": (
        lambda a: (
            a + torch.full((4,), 0.5),
            torch.zeros(2, 1, 1) + a,
            a.new_ones(4) + a,
            torch.ones_like(a) * 2,
            torch.zeros_like(a),
        ),
        (X,),
    ),
    "filled_more": (
        lambda a: (a.new_zeros(3), torch.full_like(a, 7), a.new_full((2,), 3), torch.scalar_tensor(2.0) + a),
        (X,),
    ),
    "arange": (
        lambda a: (
            torch.arange(4) + 0 * a.long(),
            torch.arange(2, 10, 2) + a,
            torch.arange(1.0, 3.0, 0.5) + a,
            torch.arange(2, 6) + a,
        ),
        (X,),
    ),
    "linspace": (lambda a: torch.linspace(0.0, 47.0, 4) + a, (X,)),
    "triangles": (lambda a, p: (a.tril(), a.triu(1), p.tril(-1), torch.triu(torch.ones(3, 5), 2) + a.sum()), (X, P)),
    "fill": (lambda a: (a.clone().fill_(2.0) + 1, a.clone().zero_() + a), (X,)),
    # shape
    "views": (
        lambda a: (
            a.reshape(6, 4),
            a.flatten(1),
            a.view(2, -1, 2, 2),
            a[:, None].squeeze(1),
            a.unflatten(2, (2, 2)),
            a.mT.reshape(8, 3),
        ),
        (X,),
    ),
    "more_views": (
        lambda a, b: (
            a.reshape(6, 4),
            a.flatten(1),
            a.unflatten(2, (2, 2)),
            a.transpose(0, 1).contiguous(),
            a.reshape(6, 4).view_as(b) + b,
            a[:1].expand_as(b),
            a.to(b.long()),
        ),
        (X, Y),
    ),
    "squeeze": (lambda a: (a[:1].squeeze(), a[:1, :1].squeeze((0, 1)), a.unsqueeze(-1)), (X,)),
    "expand": (
        lambda a: (a[:, :1].expand(2, 5, 4), a[None].expand(3, -1, -1, -1), a.repeat(2, 1, 3), a.repeat(2, 1, 1, 1)),
        (X,),
    ),
    "repeat_interleave": (lambda a: a.repeat_interleave(3, dim=1), (X,)),
    "permute": (lambda a: (a.permute(2, 0, 1), a.transpose(0, -1), a[0].t(), a.mT, a.movedim(0, 2)), (X,)),
    "slice": (lambda a: (a[:, 1:], a[..., ::2], a[-1], a[:, -2:-1], a.narrow(2, 1, 2), a[5:]), (X,)),
    "split": (lambda a: (*a.split(3, -1), *a.split([1, 2], 1), *a.chunk(3, -1), *a.unbind(1)), (X,)),
    "cat": (
        lambda a, b: (
            torch.cat([a, b], -1),
            torch.stack([a, b], 1),
            torch.stack([a, b], -1),
            torch.cat([a, b.double()]),
        ),
        (X, Y),
    ),
    "pad": (lambda a: (F.pad(a, (1, 2)), F.pad(a, (0, 0, 2, 1), value=-1.5), F.pad(a, (-1, 1))), (X,)),
    "diff": (lambda a, i: (a.diff(), i.diff(prepend=i[:, :1] - 1), (i > 0).diff()), (X, I)),
    "roll_by_hand": (lambda a: torch.cat([a[..., 1:], a[..., :1]], -1), (X,)),
    # reductions
    "mean": (lambda a: (a.mean(), a.mean(-1), a.mean((0, 2), keepdim=True), a.mean(-1, dtype=torch.float64)), (X,)),
    "mean_bf16": (lambda a: (a.mean(-1), a.float().pow(2).mean(-1, keepdim=True), a.sum(0)), (XB,)),
    "sum": (lambda a, i, p: (a.sum(), a.sum(1), i.sum(), p.sum(-1), i.to(torch.int32).sum(-1)), (X, I, P)),
    "max": (
        lambda a: (
            a.amax(-1),
            a.max(),
            *a.max(1),
            a.amin(0, keepdim=True),
            a.argmax(-1),
            a.argmax(),
            a.argmax(1, True),
        ),
        (X,),
    ),
    "min": (lambda a: a.min(), (X,)),
    "any": (
        lambda p, i: (p.any(), p.any(-1), p.all(), p.all(1, keepdim=True), i.any(), p.any((0, 1)), p.all((0, 1))),
        (P, I),
    ),
    "variance": (lambda a: (a.var(-1), a.var(-1, correction=0, keepdim=True), a[0].var()), (X,)),
    "norm": (lambda a: (torch.linalg.vector_norm(a, dim=-1), F.normalize(a, dim=-1)), (X,)),
    "cumsum": (lambda a, p: (a.cumsum(-1), p.cumsum(1), a.cumsum(0)), (X, P)),
    "softmax": (
        lambda a: (a.softmax(-1), F.softmax(a, 1, dtype=torch.float32), torch.softmax(a.bfloat16(), -1, torch.float32)),
        (X,),
    ),
    # products
    "linear": (lambda a, w, b: (F.linear(a, w), F.linear(a, w, b)), (X, W, V)),
    "matmul": (
        lambda a, w: (
            a @ w.T,
            a @ w[0],
            a[0, 0] @ w.T,
            a[0, 0] @ w[1],
            a[0] @ w.T,
            torch.mv(w, w[0]),
            torch.dot(w[0], w[1]),
            torch.mm(w, a[0].T),
        ),
        (X, W),
    ),
    "bmm": (lambda a, b: torch.bmm(a, b.mT), (X, Y)),
    "einsum": (
        lambda a, b: (
            torch.einsum("bik,bjk->bij", a, b),
            torch.einsum("bik,jk->jbi", a, b[0]),
            torch.einsum("bik->kb", a),
            torch.einsum("ik,jl->ijkl", a[0], b[0]),
            torch.einsum("bik,bik->b", a, b),
        ),
        (X, Y),
    ),
    "addmm": (lambda a, w, b: (torch.addmm(b, a[0], w.T), torch.addmm(b, a[0], w.T, beta=0.5, alpha=2)), (X, W, V)),
    "baddbmm": (lambda a, b: torch.baddbmm(torch.ones(2, 3, 3), a, b.mT, beta=0.5), (X, Y)),
    "conv2d": (
        lambda a, w, b: (
            F.conv2d(a, w, b, stride=2),
            F.conv2d(a, w, padding=(1, 0)),
            F.conv2d(a, w, b, padding="valid"),
        ),
        (normal(2, 3, 6, 5), normal(4, 3, 2, 2), normal(4)),
    ),
    "layer_norm": (lambda a, w: (F.layer_norm(a, (4,)), F.layer_norm(a, (4,), w, w, 1e-3)), (X, W[0])),
    "rms_norm": (lambda a, w: (F.rms_norm(a, (4,)), F.rms_norm(a, (4,), w, 1e-3)), (X, W[0])),
    "attention": (lambda q, k, v, m: (SDPA(q, k, v), SDPA(q, k, v, m), SDPA(q, k, v, scale=0.3)), (QH, K4, V4, MASK)),
    "attention_causal": (lambda q, k, v: (SDPA(q, k, v, is_causal=True), SDPA(k, k, v, is_causal=True)), (QH, K4, V4)),
    "attention_grouped": (lambda q, k, v, m: SDPA(q, k, v, m[None, None], enable_gqa=True), (QH, KH, VH, MASK)),
    "attention_biased": (lambda q, k, v, b: SDPA(q, k, v, b, enable_gqa=True), (QH, KH, VH, normal(3, 6))),
    "attention_three_axes": (lambda q, k, v: SDPA(q, k, v), (QH[0], K4[0], V4[0])),
    # lookups
    "embedding": (lambda w, i: (F.embedding(i, w), F.embedding(i, w, padding_idx=0)), (W, IDS)),
    "index_select": (lambda a, i: (a.index_select(1, i[0]), a.index_select(-1, i[1])), (X, IDS)),
    "index": (
        lambda a, i: (a[i[:, 0].clamp(max=1)], a[:, i], a[i.clamp(max=1), i], a[..., -i], a[:, i - 1, i]),
        (X, IDS),
    ),
    "index_iota": (lambda a: a[torch.arange(2)[:, None], torch.arange(2)[None]], (X,)),
    "updates": (
        lambda a, b: (_placed(a, b[:, :2]), torch.select_scatter(a, b[:, 0], 1, -1), torch.slice_scatter(a, b, 0)),
        (X, Y),
    ),
    "index_updates": (lambda a, b: (a.index_copy(1, torch.arange(2) + 1, b[:, :2]), _put(a, b)), (X, Y)),
}

# Tensors that change in place and calls without a row: torch has to rewrite their program.
REWRITTEN = frozenset("copies fill views permute slice matmul bmm addmm baddbmm updates index_updates".split())


def _placed(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:, 1:] = b
    a[:, 0] = 0.5
    return a


def _put(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:, torch.arange(2)] = b[:, 1:]
    return a


class _Function(nn.Module):
    """One case as a module, so that a location names it."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


class _All(nn.Module):
    """Several cases in one program: export's cost is per program, not per op."""

    def __init__(self, cases: dict[str, Case]) -> None:
        super().__init__()
        self.cases = nn.ModuleDict({name: _Function(function) for name, (function, _) in cases.items()})

    def forward(self, args: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        return {name: torch.utils._pytree.tree_leaves(case(*args[name])) for name, case in self.cases.items()}


def _cases(rewritten: bool) -> dict[str, Case]:
    """Of the program that torch rewrites, all; of the one that is translated as it was exported, those that can be."""
    return {name: case for name, case in CASES.items() if rewritten or name not in REWRITTEN}


@functools.cache
def _exported(rewritten: bool) -> torch.export.ExportedProgram:
    cases = _cases(rewritten)
    args = {name: [a.clone() for a in args] for name, (_, args) in cases.items()}
    return from_torch.export(_All(cases).eval(), (args,), "all")


@functools.cache
def _eager() -> dict[str, list[Tensor]]:
    return {name: torch.utils._pytree.tree_leaves(function(*args)) for name, (function, args) in CASES.items()}


@functools.cache
def _graph(rewritten: bool) -> Graph:
    cases = _cases(rewritten)
    inputs = [f"{name}.x{i}" for name, (_, args) in cases.items() for i in range(len(args))]
    outputs = [f"{name}.y{i}" for name in cases for i in range(len(_eager()[name]))]
    return from_torch.translate(_exported(rewritten), inputs, outputs, "all")


def _part(name: str, rewritten: bool) -> Graph:
    """The results of one case."""
    whole, prefix = _graph(rewritten), f"{name}."
    outputs = tuple((k.removeprefix(prefix), n) for k, n in whole.outputs if k.startswith(prefix))
    return Graph(name, tuple(n for n in whole.inputs if n["name"].startswith(prefix)), outputs)


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_line_of_torch(name: str, rewritten: bool) -> None:
    if name not in _cases(rewritten):
        return
    graph = _part(name, rewritten)
    verify(graph)
    assert parse(show(graph)) == graph
    found = run(graph, {f"{name}.x{i}": array(a) for i, a in enumerate(CASES[name][1])})
    for i, y in enumerate(_eager()[name]):
        result, node = found[f"y{i}"], graph.outputs[i][1]
        assert node.shape == tuple(y.shape) and node.dtype == from_torch.DTYPES[y.dtype]
        exact = not y.dtype.is_floating_point
        tolerance = 0 if exact else 2**-8 if y.dtype == torch.bfloat16 else 2e-6
        np.testing.assert_allclose(
            result.astype(np.float64), array(y).astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=f"y{i}"
        )


def test_every_row_is_reached() -> None:
    reached = {_name(n) for rewritten in (False, True) for n in _exported(rewritten).graph.nodes}
    refused = {name for name, row in aten.load().items() if row in (aten_create.empty, aten_pointwise.dropout)}
    missing = aten.load().keys() - reached - refused
    assert not missing, f"rows that no case reaches: {sorted(missing)}"


def test_torch_rewrites_what_changes_in_place_or_has_no_row() -> None:
    as_exported, rewritten = ({_name(n) for n in _exported(which).graph.nodes} for which in (False, True))
    assert "reshape.default" in as_exported - rewritten
    for name in REWRITTEN:
        function, args = CASES[name]
        traced = torch.export.export(_Function(function).eval(), tuple(a.clone() for a in args), strict=False)
        assert not from_torch.is_plain(traced), name


def _name(node: torch.fx.Node) -> str:
    return str(node.target).removeprefix("aten.")
