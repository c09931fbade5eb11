"""Gemma blocks as the Pi models use them: RMSNorm with 1 + w, rotary positions, one or few KV heads, gated-GELU MLP.

Sequences have no batch axis: x is [S, W], heads are [heads, S, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frtc.models.weights import Names, Shapes, depth

EPS = 1e-6
ROPE_THETA = 10_000.0

Pair = tuple[Tensor, Tensor]  # keys (rotated) and values, each [kv_heads, P, head_dim]
KV = list[Pair]  # one per layer


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """Sizes of one stack of layers."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int

    @staticmethod
    def of(shapes: Shapes, file: str) -> GemmaConfig:
        """Sizes from the shapes of a file's tensors under prefix `file`. These stacks have one KV head."""
        head_dim, width = shapes.ranked(f"{file}.layers.0.self_attn.k_proj.weight", 2)
        return GemmaConfig(
            width=width,
            layers=depth(shapes, f"{file}.layers.#.self_attn.k_proj.weight"),
            heads=shapes.ranked(f"{file}.layers.0.self_attn.q_proj.weight", 2)[0] // head_dim,
            kv_heads=1,
            head_dim=head_dim,
            mlp=shapes.ranked(f"{file}.layers.0.mlp.gate_proj.weight", 2)[0],
        )


def gemma_names(file: str, module: str, norm: str) -> Names:
    """Weight names of a stack: Hugging Face's Gemma under `file`, ours under `module`.

    norm: what follows a norm's name: "weight", or "dense.*" where the norm is adaptive.
    """
    there, here = f"{file}.layers.#", f"{module}.layers.#"
    linears = [("self_attn", "attn", name) for name in "qkvo"] + [
        ("mlp", "mlp", name) for name in ("gate", "up", "down")
    ]
    return (
        (f"{there}.input_layernorm.{norm}", f"{here}.norm1.{norm}"),
        (f"{there}.post_attention_layernorm.{norm}", f"{here}.norm2.{norm}"),
        *((f"{there}.{a}.{name}_proj.weight", f"{here}.{b}.{name}.weight") for a, b, name in linears),
    )


def rope_tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2j/head_dim), j < head_dim/2: both f32 [S, head_dim/2]. positions: i32 [S]."""
    j = torch.arange(head_dim // 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / ROPE_THETA ** (2.0 * j / head_dim)
    angles = positions.to(torch.float32)[:, None] * frequencies[None, :]
    return torch.cos(angles), torch.sin(angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding, in float32, rounded once: [x1 cos - x2 sin, x2 cos + x1 sin]. x: [heads, S, D]."""
    x1, x2 = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def normalized(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32 and left there."""
    x = x.to(torch.float32)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS)


class RmsNorm(nn.Module):
    """y = normalized(x) * (1 + w). The file holds w without the one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (normalized(x) * (1.0 + self.weight)).to(x.dtype)


class AdaRmsNorm(nn.Module):
    """y = normalized(x) * (1 + scale) + shift, with scale, shift and a gate for the residual from the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
        """x [S, W], cond f32 [W] -> y [S, W], gate [W]"""
        scale, shift, gate = self.dense(cond).chunk(3, dim=-1)
        return (normalized(x) * (1.0 + scale) + shift).to(x.dtype), gate.to(x.dtype)


class Attention(nn.Module):
    """Projections and grouped-query attention. Keys and values leave it before they are joined with others."""

    def __init__(self, c: GemmaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q = nn.Linear(c.width, c.heads * c.head_dim, bias=False, dtype=dtype)
        self.k = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False, dtype=dtype)
        self.v = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False, dtype=dtype)
        self.o = nn.Linear(c.heads * c.head_dim, c.width, bias=False, dtype=dtype)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[S, W] -> q [heads, S, D], k and v [kv_heads, S, D]; q and k rotated"""
        q, k, v = (f(x).view(x.shape[0], -1, self.head_dim).transpose(0, 1) for f in (self.q, self.k, self.v))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """visible: bool [S of q or 1, S of k], true where a query may read a key -> [S, W]"""
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        out: Tensor = self.o(a.transpose(0, 1).reshape(q.shape[1], -1))
        return out


class Mlp(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x))"""

    def __init__(self, c: GemmaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(c.width, c.mlp, bias=False, dtype=dtype)
        self.up = nn.Linear(c.width, c.mlp, bias=False, dtype=dtype)
        self.down = nn.Linear(c.mlp, c.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))
        return out


class Layer(nn.Module):
    """Gemma layer; its queries read the keys of the past, then the rows' own, and both go on to whoever comes next."""

    def __init__(self, c: GemmaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = RmsNorm(c.width)
        self.attn = Attention(c, dtype)
        self.norm2 = RmsNorm(c.width)
        self.mlp = Mlp(c, dtype)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor, past: Pair | None = None
    ) -> tuple[Tensor, Pair]:
        q, k, v = self.attn.qkv(self.norm1(x), cos, sin)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        x = x + self.attn(q, k, v, visible)
        return x + self.mlp(self.norm2(x)), (k, v)


class AdaLayer(nn.Module):
    """Gemma layer with adaptive norms; its queries read the keys of the past, then the rows' own."""

    def __init__(self, c: GemmaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = AdaRmsNorm(c.width)
        self.attn = Attention(c, dtype)
        self.norm2 = AdaRmsNorm(c.width)
        self.mlp = Mlp(c, dtype)

    def forward(self, x: Tensor, cond: Tensor, cos: Tensor, sin: Tensor, past: Pair, visible: Tensor) -> Tensor:
        h, gate = self.norm1(x, cond)
        q, k, v = self.attn.qkv(h, cos, sin)
        k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        x = x + gate * self.attn(q, k, v, visible)
        h, gate = self.norm2(x, cond)
        out: Tensor = x + gate * self.mlp(h)
        return out
