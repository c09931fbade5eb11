"""A small pre-norm transformer encoder with a padding mask: what goes through both doors, torch.export and ONNX."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, MLP, LAYERS, TOKENS, VOCABULARY = 32, 4, 64, 2, 10, 50
EPS = 1e-5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, EPS), nn.LayerNorm(WIDTH, EPS)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, MLP), nn.Linear(MLP, WIDTH)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """x [B, S, W], visible bool [B, 1, 1, S] -> [B, S, W]"""
        batch, tokens, width = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(batch, tokens, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.o(a.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Encoder(nn.Module):
    """ids i64 [1, S], valid bool [1, S] -> mean over the tokens after the last norm, f32 [1, W]"""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, EPS)

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for layer in self.layers:
            x = layer(x, valid[:, None, None, :])
        return self.norm(x).mean(1)


def example() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(7))
    return ids, torch.arange(TOKENS)[None] < 7
