"""Llama blocks as small vision-language policies use them: plain RMSNorm, rotary positions, grouped heads, gated SiLU.

Sequences have no batch axis: x is [S, W], heads are [heads, S, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frtc.errors import FrtcError
from frtc.models.gemma import rotate
from frtc.models.weights import Names, Shapes, depth

EPS = 1e-5

KV = tuple[Tensor, Tensor]  # keys and values, each [kv_heads, S, head_dim]
Tables = tuple[Tensor, Tensor]  # cos and sin, each f32 [S, head_dim / 2]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of one stack of layers."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @staticmethod
    def of(shapes: Shapes, file: str, head_dim: int) -> LlamaConfig:
        """Sizes from the shapes of a file's tensors under prefix `file`, which do not tell the head dimension."""
        rows = {}
        for name in ("q_proj", "k_proj"):
            tensor = f"{file}.layers.0.self_attn.{name}.weight"
            rows[name] = shapes.ranked(tensor, 2)[0]
            if rows[name] % head_dim:
                what = f"{tensor} has {rows[name]} rows, no multiple of the head dimension {head_dim}"
                raise FrtcError("weights.shape", what, [("checkpoint", str(shapes.checkpoint))])
        heads, kv_heads = rows["q_proj"] // head_dim, rows["k_proj"] // head_dim
        if heads % kv_heads:
            what = f"{heads} query heads of {head_dim} over {kv_heads} key heads under {file}"
            raise FrtcError("weights.shape", what, [("checkpoint", str(shapes.checkpoint))])
        mlp, width = shapes.ranked(f"{file}.layers.0.mlp.gate_proj.weight", 2)
        layers = depth(shapes, f"{file}.layers.#.self_attn.k_proj.weight")
        return LlamaConfig(width, layers, heads, kv_heads, head_dim, mlp)


def llama_names(file: str, module: str) -> Names:
    """Weight names of a stack: Hugging Face's Llama under `file`, ours under `module`."""
    there, here = f"{file}.layers.#", f"{module}.layers.#"
    return (
        (f"{there}.input_layernorm.weight", f"{here}.norm1.weight"),
        (f"{there}.post_attention_layernorm.weight", f"{here}.norm2.weight"),
        *((f"{there}.self_attn.{name}_proj.weight", f"{here}.attn.{name}.weight") for name in "qkvo"),
        *((f"{there}.mlp.{name}_proj.weight", f"{here}.mlp.{name}.weight") for name in ("gate", "up", "down")),
    )


class RmsNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w, in float32, rounded once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
        return (wide * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Projections and grouped-query attention. `kv_width`: of what keys and values are made from, if not of x."""

    def __init__(self, c: LlamaConfig, dtype: torch.dtype, kv_width: int | None = None) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        source = kv_width or c.width
        self.q = nn.Linear(c.width, c.heads * c.head_dim, bias=False, dtype=dtype)
        self.k = nn.Linear(source, c.kv_width, bias=False, dtype=dtype)
        self.v = nn.Linear(source, c.kv_width, bias=False, dtype=dtype)
        self.o = nn.Linear(c.heads * c.head_dim, c.width, bias=False, dtype=dtype)

    def heads(self, rows: Tensor) -> Tensor:
        """[S, heads * head_dim] -> [heads, S, head_dim]"""
        return rows.view(rows.shape[0], -1, self.head_dim).transpose(0, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """visible: bool [S of q or 1, S of k], true where a query may read a key -> [S of q, W]"""
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        out: Tensor = self.o(a.transpose(0, 1).flatten(1))
        return out


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, c: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(c.width, c.mlp, bias=False, dtype=dtype)
        self.up = nn.Linear(c.width, c.mlp, bias=False, dtype=dtype)
        self.down = nn.Linear(c.mlp, c.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """x = x + attn(norm1(x)); x = x + mlp(norm2(x))"""

    def __init__(self, c: LlamaConfig, dtype: torch.dtype, kv_width: int | None = None) -> None:
        super().__init__()
        self.norm1 = RmsNorm(c.width)
        self.attn = Attention(c, dtype, kv_width)
        self.norm2 = RmsNorm(c.width)
        self.mlp = Mlp(c, dtype)

    def qkv(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """[S, W] -> q [heads, S, D], k and v [kv_heads, S, D] of the normed x; q and k rotated"""
        h, attn = self.norm1(x), self.attn
        q, k, v = (attn.heads(project(h)) for project in (attn.q, attn.k, attn.v))
        return rotate(q, *tables), rotate(k, *tables), v

    def close(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual sum of the attention, then the MLP's."""
        x = x + attended
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class SelfLayer(Layer):
    """Queries read `past`, if there is one, then the layer's own keys; hands out its own keys and values."""

    def forward(self, x: Tensor, tables: Tables, visible: Tensor, past: KV | None = None) -> tuple[Tensor, KV]:
        q, k, v = self.qkv(x, tables)
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1))
        return self.close(x, self.attn(q, keys, values, visible)), (k, v)


class CrossLayer(Layer):
    """Queries read keys and values that k and v make anew from another stack's; those are not rotated again."""

    def forward(self, x: Tensor, tables: Tables, visible: Tensor, source: KV) -> Tensor:
        attn = self.attn
        q = rotate(attn.heads(attn.q(self.norm1(x))), *tables)
        k, v = (
            attn.heads(project(part.transpose(0, 1).flatten(1)))
            for project, part in zip((attn.k, attn.v), source, strict=True)
        )
        return self.close(x, attn(q, k, v, visible))
