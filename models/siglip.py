"""SigLIP vision tower, So400m or base: one token per square patch. No class token, no pooling head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frtc.errors import FrtcError
from frtc.models.weights import Names, Shapes, depth

HEAD_DIM = 72  # of every SigLIP So400m, 64 of every base; the file does not record head counts
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SiglipConfig:
    """Sizes of the tower. `image` and `patch` are edge lengths in pixels; `head_dim` is the model's to declare."""

    width: int
    layers: int
    mlp: int
    image: int = 224
    patch: int = 14
    head_dim: int = HEAD_DIM

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def side(self) -> int:  # patches along an edge
        return self.image // self.patch

    @property
    def tokens(self) -> int:  # per view
        return self.side**2

    @staticmethod
    def of(shapes: Shapes, file: str, head_dim: int = HEAD_DIM) -> SiglipConfig:
        """Sizes from the shapes of a file's tensors; `file` is the tower's prefix there."""
        width, _, patch, _ = shapes.ranked(f"{file}.embeddings.patch_embedding.weight", 4)
        if width % head_dim:
            what = f"the vision width {width} is no multiple of the head dimension {head_dim}"
            raise FrtcError("weights.shape", what, [("tensor", f"{file}.embeddings.patch_embedding.weight")])
        return SiglipConfig(
            width=width,
            layers=depth(shapes, f"{file}.encoder.layers.#.mlp.fc1.weight"),
            mlp=shapes.ranked(f"{file}.encoder.layers.0.mlp.fc1.weight", 2)[0],
            image=math.isqrt(shapes.ranked(f"{file}.embeddings.position_embedding.weight", 2)[0]) * patch,
            patch=patch,
            head_dim=head_dim,
        )


def siglip_names(file: str, module: str) -> Names:
    """Weight names: Hugging Face's SiglipVisionTransformer under `file`, ours under `module`."""
    there, here = f"{file}.encoder.layers.#", f"{module}.layers.#"
    return (
        (f"{file}.embeddings.patch_embedding.*", f"{module}.patch.*"),
        (f"{file}.embeddings.position_embedding.weight", f"{module}.position"),
        (f"{there}.layer_norm1.*", f"{here}.norm1.*"),
        (f"{there}.self_attn.q_proj.*", f"{here}.q.*"),
        (f"{there}.self_attn.k_proj.*", f"{here}.k.*"),
        (f"{there}.self_attn.v_proj.*", f"{here}.v.*"),
        (f"{there}.self_attn.out_proj.*", f"{here}.o.*"),
        (f"{there}.layer_norm2.*", f"{here}.norm2.*"),
        (f"{there}.mlp.fc1.*", f"{here}.fc1.*"),
        (f"{there}.mlp.fc2.*", f"{here}.fc2.*"),
        (f"{file}.post_layernorm.*", f"{module}.norm.*"),
    )


class SiglipLayer(nn.Module):
    """x = x + attn(norm1(x)); x = x + fc2(gelu_tanh(fc1(norm2(x)))). Views do not see each other; biases everywhere."""

    def __init__(self, c: SiglipConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.head_dim = c.heads, c.head_dim
        self.norm1 = nn.LayerNorm(c.width, EPS, dtype=dtype)
        self.q = nn.Linear(c.width, c.width, dtype=dtype)
        self.k = nn.Linear(c.width, c.width, dtype=dtype)
        self.v = nn.Linear(c.width, c.width, dtype=dtype)
        self.o = nn.Linear(c.width, c.width, dtype=dtype)
        self.norm2 = nn.LayerNorm(c.width, EPS, dtype=dtype)
        self.fc1 = nn.Linear(c.width, c.mlp, dtype=dtype)
        self.fc2 = nn.Linear(c.mlp, c.width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[V, T, W] -> [V, T, W]"""
        views, tokens, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            f(h).view(views, tokens, self.heads, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v)  # [V, heads, T, head_dim]
        x = x + self.o(a.transpose(1, 2).reshape(views, tokens, width))
        h = self.norm2(x)
        out: Tensor = x + self.fc2(F.gelu(self.fc1(h), approximate="tanh"))
        return out


class Siglip(nn.Module):
    """Patch embedding and positions in `stem`, the layers in `dtype`, then the last LayerNorm.

    Tokens are in the order of `squares` of `edge` x edge patches: no layer looks at their order, and whoever wants the
    patches of a square side by side (pixel shuffle) finds them so.
    """

    def __init__(self, c: SiglipConfig, dtype: torch.dtype, stem: torch.dtype = torch.float32, edge: int = 1) -> None:
        super().__init__()
        self.dtype, self.edge = dtype, edge
        self.patch = nn.Conv2d(3, c.width, c.patch, stride=c.patch, dtype=stem)
        self.position = nn.Parameter(torch.zeros(c.tokens, c.width, dtype=stem))
        self.layers = nn.ModuleList(SiglipLayer(c, dtype) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width, EPS, dtype=dtype)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels f32 [V, edge, edge, 3] in [-1, 1] -> [V, T, W]"""
        pixels = pixels.to(self.position.dtype)
        x = self.patch(pixels.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        x = squares(x, self.edge) + squares(self.position, self.edge)
        x = x.reshape(len(pixels), *self.position.shape).to(self.dtype)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


def squares(x: Tensor, edge: int) -> Tensor:
    """[.., T, W] -> [.., side, side, edge, edge, W], T = (side * edge)^2: squares of patches, all in row-major order.

    Squares of one patch stay [.., T, W].
    """
    if edge == 1:
        return x
    *lead, tokens, width = x.shape
    side = math.isqrt(tokens) // edge
    return x.view(*lead, side, edge, side, edge, width).transpose(-3, -4)
