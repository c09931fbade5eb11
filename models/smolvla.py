"""SmolVLA: SigLIP base -> first layers of SmolLM2 -> action expert that attends by itself and to the prefix in turn.

Sources of every constant: the public lerobot implementation (0.6.1). The dtype policy is its own when serving: layers
and patch embedding in bfloat16 (in float32 the latter brings image tokens no closer: 0.0055 off both ways), and in
float32 norm internals, softmax, the state's, the actions' and the time's projections, and x_t.

Rows of the prefix are [state | images | prompt]: the valid ones lie together whatever the prompt's length. The state
still is the last token: nothing before it sees it, and it has the position behind the prompt.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frtc.models.checkpoint import Checkpoint
from frtc.models.flow import EulerStep, embedded_time, iota
from frtc.models.gemma import rope_tables
from frtc.models.llama import KV, CrossLayer, RmsNorm, SelfLayer, Tables
from frtc.models.policies import SMOLVLA
from frtc.models.siglip import Siglip
from frtc.models.smolvla_config import WEIGHTS, SmolVlaConfig, claims, config, tiny
from frtc.models.stages import Model, Repeat, Run, Schedule, Stage
from frtc.models.synthetic_smolvla import SYNTHETIC
from frtc.models.weights import shapes_of


class Vision(nn.Module):
    """Camera frames to image tokens of the prefix's width: each token is a square of patches (pixel shuffle)."""

    def __init__(self, c: SmolVlaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.tower = Siglip(c.vision, dtype, stem=dtype, edge=c.shuffle)
        self.projector = nn.Linear(c.shuffle**2 * c.vision.width, c.prefix.width, bias=False, dtype=dtype)

    def forward(self, images: Tensor) -> Tensor:
        """f32 [V, edge, edge, 3] in [0, 1] -> [V*T, W], scaled as the language model's embeddings are"""
        tokens: Tensor = self.projector(self.tower(images * 2.0 - 1.0).reshape(-1, self.projector.in_features))
        return tokens * math.sqrt(tokens.shape[1])


class Prefix(nn.Module):
    """State, image tokens and prompt through the language model. Only its keys and values are read later."""

    def __init__(self, c: SmolVlaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim, self.dtype = c.prefix.head_dim, dtype
        self.embed = nn.Embedding(c.vocab, c.prefix.width, dtype=dtype)
        self.state_in = nn.Linear(c.state_width, c.prefix.width)
        self.layers = nn.ModuleList(SelfLayer(c.prefix, dtype) for _ in range(c.prefix.layers))

    def forward(self, image_tokens: Tensor, tokens: Tensor, n: Tensor, state: Tensor) -> list[KV]:
        """[P_img, W], tokens i32 [L], n i32 [] valid tokens, state f32 [S] -> keys and values of 1 + P_img + L rows"""
        prompt = self.embed(tokens)
        x = torch.cat([self.embed_state(state), image_tokens, prompt * math.sqrt(prompt.shape[1])])
        row, seen = iota(x.shape[0], n), image_tokens.shape[0] + n  # `seen`: images and valid tokens
        tables = rope_tables(torch.where(row == 0, seen, row - 1), self.head_dim)
        visible = self.visible(row, seen)
        kv = []
        for layer in self.layers:
            x, layer_kv = layer(x, tables, visible)
            kv.append(layer_kv)
        return kv

    def embed_state(self, state: Tensor) -> Tensor:
        return self.state_in(state)[None].to(self.dtype)  # type: ignore[no-any-return]

    def visible(self, row: Tensor, seen: Tensor) -> Tensor:
        """Keys of images and valid tokens; the state's key for the state alone. bool [rows, rows]"""
        return (row < 1 + seen)[None, :] & ((row > 0)[None, :] | (row == 0)[:, None])


class Denoise(EulerStep):
    """Velocity of the noisy chunk at time t, given the prefix."""

    def __init__(self, c: SmolVlaConfig, dtype: torch.dtype) -> None:
        super().__init__(c.steps)
        width = c.expert.width
        self.config, self.dtype = c, dtype
        self.action_in = nn.Linear(c.action_width, width)
        self.mlp_in = nn.Linear(2 * width, width)
        self.mlp_out = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            CrossLayer(c.expert, dtype, c.prefix.kv_width) if cross else SelfLayer(c.expert, dtype) for cross in c.cross
        )
        self.norm = RmsNorm(width)
        self.action_out = nn.Linear(width, c.action_width)

    def velocity(self, x_t: Tensor, t: Tensor, n: Tensor, kv: list[KV]) -> Tensor:
        """x_t f32 [H, A], t f32 [], n i32 [] -> f32 [H, A]"""
        c, row = self.config, iota(x_t.shape[0], n)
        length = 1 + c.image_tokens + n  # valid prefix rows
        behind, restarted = self.tables(length, row)
        seen, prefix_seen = self.visible(length, row), (iota(c.rows, n) < length)[None, :]
        x = self.embed(x_t, t).to(self.dtype)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            if isinstance(layer, CrossLayer):
                x = layer(x, restarted, prefix_seen, layer_kv)
            else:
                x, _ = layer(x, behind, seen, layer_kv)
        v_t: Tensor = self.action_out(self.norm(x).to(torch.float32))
        return v_t

    def tables(self, length: Tensor, row: Tensor) -> tuple[Tables, Tables]:
        """Positions go on behind the prefix where the actions see each other; where they see it alone, from 0."""
        head_dim = self.config.expert.head_dim
        return rope_tables(length + row, head_dim), rope_tables(row, head_dim)

    def visible(self, length: Tensor, row: Tensor) -> Tensor:
        """Valid prefix rows, and of the actions those up to the query's own. bool [H, rows + H]"""
        prefix = self.config.rows
        key = iota(prefix + row.shape[0], length)
        return ((key < length) | (key >= prefix))[None, :] & (key[None, :] <= row[:, None] + prefix)

    def embed(self, x_t: Tensor, t: Tensor) -> Tensor:
        """out(silu(in([action; time]))): f32 [H, W]"""
        actions, c = self.action_in(x_t), self.config
        time = embedded_time(t, c.expert.width, c.min_period, c.max_period)
        both = torch.cat([actions, time.expand_as(actions)], dim=-1)
        out: Tensor = self.mlp_out(F.silu(self.mlp_in(both)))
        return out


class SmolVla(nn.Module):
    """The whole model: one module per stage."""

    def __init__(self, c: SmolVlaConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = c
        self.vision = Vision(c, dtype)
        self.prefix = Prefix(c, dtype)
        self.denoise = Denoise(c, dtype)


def weights(checkpoint: Checkpoint, c: SmolVlaConfig) -> dict[str, str]:
    """Parameter of SmolVla -> tensor of the checkpoint."""
    with torch.device("meta"):
        return WEIGHTS.resolve(checkpoint, shapes_of(SmolVla(c)), "smolvla")


def stages(c: SmolVlaConfig, dtype: torch.dtype = torch.bfloat16, velocity: bool = False) -> dict[str, Stage]:
    """vision, prefix and denoise on the meta device, ready for torch.export."""
    with torch.device("meta"):
        model = SmolVla(c, dtype).eval()
        images = torch.empty(c.views, c.vision.image, c.vision.image, 3)
        image_tokens = torch.empty(c.image_tokens, c.prefix.width, dtype=dtype)
        tokens, n = torch.empty(c.prompt, dtype=torch.int32), torch.empty((), dtype=torch.int32)
        state, x_t, t = torch.empty(c.state_width), torch.empty(c.horizon, c.action_width), torch.empty(())
        shape = (c.prefix.kv_heads, c.rows, c.prefix.head_dim)
        kv = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(c.prefix.layers)]
    model.denoise.returns_velocity = velocity
    names = tuple(f"{kind}.{i}" for i in range(c.prefix.layers) for kind in ("k", "v"))
    seen, out = ("image_tokens", "tokens", "n", "state"), ("x_t", "v_t") if velocity else ("x_t",)
    all_stages = (
        Stage("vision", model.vision, "vision", (images,), ("images",), ("image_tokens",)),
        Stage("prefix", model.prefix, "prefix", (image_tokens, tokens, n, state), seen, names),
        Stage("denoise", model.denoise, "denoise", (x_t, t, n, kv), ("x_t", "t", "n", *names), out),
    )
    return {s.name: s for s in all_stages}


def schedule(c: SmolVlaConfig) -> Schedule:
    """Vision and prefix once, then the Euler steps on the noise."""
    loop = Repeat("denoise", len(c.times), carry={"x_t": "noise"}, tables={"t": c.times})
    inputs = ("images", "state", "tokens", "n", "noise")
    return Schedule(inputs, (Run("vision"), Run("prefix"), loop), {"actions": "x_t"})


FAMILY = SMOLVLA
MODEL = Model(
    "smolvla", "SmolVLA", claims, config, tiny, SmolVla, stages, schedule, weights, SYNTHETIC, WEIGHTS.canonical
)
