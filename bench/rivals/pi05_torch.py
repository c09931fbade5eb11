"""Pi0.5 in plain PyTorch functions, as a strong baseline: real shapes, random weights, one CUDA graph for an inference.

    natural   the public implementations' op list: q, k, v and gate, up apart, modulation computed in every step
    tuned     merged q|k|v and gate|up, modulation precomputed, last prefix layer keys and values only
    fp8       tuned with torch._scaled_mm and static per-tensor scales

Layers are pure functions whose weights are arguments, so that one Inductor compilation serves every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
FP8_MAX = 448.0
HEADS, HEAD_DIM = 8, 256
VISION, VISION_MLP, VISION_HEADS, TOKENS = 1152, 4304, 16, 256
PREFIX, PREFIX_MLP, EXPERT, EXPERT_MLP, ACTION = 2048, 16384, 1024, 4096, 32
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    views: int = 2
    prompt: int = 48
    horizon: int = 50
    steps: int = 10
    vision_layers: int = 27
    layers: int = 18
    tuned: bool = True
    fp8: bool = False
    device: str = "cuda"

    @property
    def prefix(self) -> int:
        return self.views * TOKENS + self.prompt


Weight = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # w [N, K], bias, scale of x, scale of w


def random(shape: Shape, *size: int, std: float = 0.02) -> Tensor:
    return (torch.randn(*size, device=shape.device) * std).to(BF16)


def weight(shape: Shape, n: int, k: int, bias: bool = False) -> Weight:
    w = random(shape, n, k, std=1 / math.sqrt(k))
    b = random(shape, n) if bias else None
    if not shape.fp8:
        return w, b, None, None
    scale = (w.abs().max().float() / FP8_MAX).reshape(())
    return (w.float() / scale).to(FP8), b, torch.tensor(8.0 / FP8_MAX, device=shape.device), scale


def linear(x: Tensor, weight: Weight) -> Tensor:
    w, b, scale_x, scale_w = weight
    if scale_x is None or scale_w is None:
        return F.linear(x, w, b)
    stored = (x.float() / scale_x).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return torch._scaled_mm(
        stored, w.t(), scale_a=scale_x, scale_b=scale_w, bias=b, out_dtype=BF16, use_fast_accum=True
    )


def rms_norm(x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * (1 + scale.float())
    return (y if shift is None else y + shift.float()).to(BF16)


def rope_tables(start: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    frequency = 1.0 / (10000 ** (torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM))
    angle = torch.arange(start, start + count, device=device)[:, None] * frequency
    return angle.cos()[:, None, :], angle.sin()[:, None, :]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]"""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(BF16)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, 8, D] over one key head k, v [S, D]: the heads are rows."""
    rows = q.reshape(1, 1, -1, HEAD_DIM)
    return F.scaled_dot_product_attention(rows, k[None, None], v[None, None]).reshape(q.shape[0], HEADS * HEAD_DIM)


def projected(h: Tensor, qkv: tuple[Weight, ...], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k rotated, and v, from one merged weight or three."""
    y = (linear(h, qkv[0]) if len(qkv) == 1 else torch.cat([linear(h, w) for w in qkv], -1)).view(
        -1, HEADS + 2, HEAD_DIM
    )
    k = rope(y[:, HEADS : HEADS + 1], cos, sin).reshape(-1, HEAD_DIM)
    return rope(y[:, :HEADS], cos, sin), k, y[:, HEADS + 1].contiguous()


def gated(h: Tensor, gate_up: tuple[Weight, ...]) -> Tensor:
    gate, up = linear(h, gate_up[0]).chunk(2, -1) if len(gate_up) == 1 else [linear(h, w) for w in gate_up]
    return F.gelu(gate, approximate="tanh") * up


def vision_layer(x: Tensor, views: int, n1: Any, qkv: Weight, o: Weight, n2: Any, up: Weight, down: Weight) -> Tensor:
    y = linear(F.layer_norm(x, (VISION,), *n1, EPS), qkv).view(views, TOKENS, 3, VISION_HEADS, VISION // VISION_HEADS)
    q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
    x = x + linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(views * TOKENS, VISION), o)
    return x + linear(F.gelu(linear(F.layer_norm(x, (VISION,), *n2, EPS), up), approximate="tanh"), down)


def prefix_keys(x: Tensor, n1: Tensor, qkv: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    _, k, v = projected(rms_norm(x, n1), qkv, cos, sin)
    return k, v


def prefix_layer(
    x: Tensor, n1: Tensor, qkv: Any, o: Weight, n2: Tensor, gate_up: Any, down: Weight, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = projected(rms_norm(x, n1), qkv, cos, sin)
    x = x + linear(attention(q, k, v), o)
    return x + linear(gated(rms_norm(x, n2), gate_up), down), k, v


def expert_layer(
    x: Tensor, m1: Tensor, m2: Tensor, qkv: Any, o: Weight, gate_up: Any, down: Weight, cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, prefix: int,
) -> Tensor:  # fmt: skip
    scale, shift, gate = m1.chunk(3, -1)
    q, k, v = projected(rms_norm(x, scale, shift), qkv, cos, sin)
    keys[prefix:], values[prefix:] = k, v
    x = x + linear(attention(q, keys, values), o) * gate
    scale, shift, gate = m2.chunk(3, -1)
    return x + linear(gated(rms_norm(x, scale, shift), gate_up), down) * gate


def patches(images: Tensor, w: Tensor, b: Tensor, position: Tensor) -> Tensor:
    views = images.shape[0]
    x = images.view(views, 16, 14, 16, 14, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 588)
    return (F.linear(x, w, b).view(views, TOKENS, VISION) + position).reshape(-1, VISION)


def projector(x: Tensor, norm: Any, w: Weight) -> Tensor:
    return linear(F.layer_norm(x, (VISION,), *norm, EPS), w)


def action_in(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x.to(BF16), w, b)


def action_out(x: Tensor, m: Tensor, w: Tensor, b: Tensor, actions: Tensor, dt: float) -> Tensor:
    scale, shift, _ = m.chunk(3, -1)
    return actions + dt * F.linear(rms_norm(x, scale, shift), w, b).float()


LAYERS = (vision_layer, prefix_keys, prefix_layer, expert_layer, patches, projector, action_in, action_out)


class Pi05:
    """Weights and buffers; `run` is one inference from `images` and `noise` to `out`."""

    BEFORE = 0  # tokens of the expert between the prefix and the actions

    def __init__(self, shape: Shape) -> None:
        self.shape, s = shape, shape
        self.call: dict[str, Callable[..., Any]] = {f.__name__: f for f in LAYERS}
        norm = [(1 + random(s, VISION), random(s, VISION)) for _ in range(2 * s.vision_layers + 1)]
        self.vision_layers = [
            (norm[2 * i], weight(s, 3 * VISION, VISION, True), weight(s, VISION, VISION, True), norm[2 * i + 1],
             weight(s, VISION_MLP, VISION, True), weight(s, VISION, VISION_MLP, True))
            for i in range(s.vision_layers)
        ]  # fmt: skip
        self.patch = random(s, VISION, 588), random(s, VISION), random(s, TOKENS, VISION)
        self.projector = norm[-1], weight(s, PREFIX, VISION, True)
        self.prefix_layers = [self._gemma(PREFIX, PREFIX_MLP) for _ in range(s.layers)]
        self.expert_layers = [self._gemma(EXPERT, EXPERT_MLP) for _ in range(s.layers)]
        self.prefix_norms = [(random(s, PREFIX), random(s, PREFIX)) for _ in range(s.layers)]
        self.action_in = random(s, EXPERT, ACTION, std=0.2), random(s, EXPERT)
        self.action_out = random(s, ACTION, EXPERT, std=0.03), random(s, ACTION)
        self._buffers()
        self._expert()

    def _expert(self) -> None:
        """What the expert has beside its layers: adaptive norms."""
        s = self.shape
        self.dense = [(random(s, 3 * EXPERT, EXPERT), random(s, 3 * EXPERT)) for _ in range(2 * s.layers + 1)]
        self.time = [(random(s, EXPERT, EXPERT, std=0.03), random(s, EXPERT)) for _ in range(2)]
        self.modulation = [self._modulation(k) for k in range(s.steps)] if s.tuned else None

    def _gemma(self, width: int, mlp: int) -> tuple[Any, ...]:
        s = self.shape
        qkv = (HEADS + 2,) if s.tuned else (HEADS, 1, 1)
        gate_up = (2 * mlp,) if s.tuned else (mlp, mlp)
        return (
            tuple(weight(s, n * HEAD_DIM, width) for n in qkv), weight(s, width, HEADS * HEAD_DIM),
            tuple(weight(s, n, width) for n in gate_up), weight(s, width, mlp),
        )  # fmt: skip

    def _buffers(self) -> None:
        s = self.shape
        self.images = torch.randn(s.views, 224, 224, 3, device=s.device).to(BF16)
        self.prompt = random(s, s.prompt, PREFIX, std=1.0)
        self.noise = torch.randn(s.horizon, ACTION, device=s.device)
        self.out = torch.empty_like(self.noise)
        rows = s.prefix + self.BEFORE + s.horizon
        self.keys, self.values = (
            [torch.zeros(rows, HEAD_DIM, device=s.device, dtype=BF16) for _ in range(s.layers)] for _ in range(2)
        )
        self.prefix_rope = rope_tables(0, s.prefix, s.device)
        self.suffix_rope = rope_tables(s.prefix + self.BEFORE, s.horizon, s.device)
        period = 4e-3 * 1000 ** torch.linspace(0, 1, EXPERT // 2, device=s.device)
        angle = (1 - torch.arange(s.steps, device=s.device) / s.steps)[:, None] / period * 2 * math.pi
        self.embedded = torch.cat([angle.sin(), angle.cos()], -1).to(BF16)

    def _modulation(self, step: int) -> list[Tensor]:
        cond = self.embedded[step : step + 1]
        for w, b in self.time:
            cond = F.silu(F.linear(cond, w, b))
        return [F.linear(cond, w, b) for w, b in self.dense]

    def compile(self, mode: str = "default") -> None:
        self.call = {k: torch.compile(f, mode=mode, dynamic=False, fullgraph=True) for k, f in self.call.items()}

    def vision(self) -> Tensor:
        x = self.call["patches"](self.images, *self.patch)
        for layer in self.vision_layers:
            x = self.call["vision_layer"](x, self.shape.views, *layer)
        tokens: Tensor = self.call["projector"](x, *self.projector)
        return tokens

    def prefix(self, image_tokens: Tensor) -> None:
        s, x = self.shape, torch.cat([image_tokens, self.prompt])
        for i, ((qkv, o, gate_up, down), (n1, n2)) in enumerate(
            zip(self.prefix_layers, self.prefix_norms, strict=True)
        ):
            if s.tuned and i == s.layers - 1:
                k, v = self.call["prefix_keys"](x, n1, qkv, *self.prefix_rope)
            else:
                x, k, v = self.call["prefix_layer"](x, n1, qkv, o, n2, gate_up, down, *self.prefix_rope)
            self.keys[i][: s.prefix].copy_(k)
            self.values[i][: s.prefix].copy_(v)

    def denoise(self) -> None:
        s, actions = self.shape, self.noise
        for step in range(s.steps):
            m = self.modulation[step] if self.modulation else self._modulation(step)
            x = self.call["action_in"](actions, *self.action_in)
            for i, (qkv, o, gate_up, down) in enumerate(self.expert_layers):
                x = self.call["expert_layer"](
                    x, m[2 * i], m[2 * i + 1], qkv, o, gate_up, down, *self.suffix_rope,
                    self.keys[i], self.values[i], s.prefix,
                )  # fmt: skip
            actions = self.call["action_out"](x, m[-1], *self.action_out, actions, -1.0 / s.steps)
        self.out.copy_(actions)

    def run(self) -> None:
        self.prefix(self.vision())
        self.denoise()
