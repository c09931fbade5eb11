"""Pi0: the state is a token in front of the actions, and the time enters with them (models/pi.py has the rest).

The suffix of the published model is [state | actions]. The state token sees the prefix and itself, so nothing in it
depends on time or noise: it is written as a pass of its own over the layers, which leaves its keys and values behind
those of the prefix; the actions then see [prefix | state | actions].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frtc.models import pi
from frtc.models.checkpoint import Checkpoint
from frtc.models.evidence import Evidence, Fact
from frtc.models.flow import iota
from frtc.models.gemma import KV, Layer, RmsNorm, rope_tables
from frtc.models.pi import EXPERT, Pi, PiConfig
from frtc.models.policies import PI0
from frtc.models.stages import Model, Stage
from frtc.models.synthetic_pi import synthetic
from frtc.models.weights import Shapes, shapes_of

WEIGHTS = pi.weight_map(
    norm="weight",
    linears=(
        ("state_proj", "state_in"),
        ("action_in_proj", "action_in"),
        ("action_time_mlp_in", "mlp_in"),
        ("action_time_mlp_out", "mlp_out"),
        ("action_out_proj", "action_out"),
    ),
    renames=(  # Pi0.5's name of the MLP, which lerobot accepts here too
        ("time_mlp_in.", "action_time_mlp_in."),
        ("time_mlp_out.", "action_time_mlp_out."),
    ),
)
PROMPT = 48  # tokens


def tiny() -> PiConfig:
    return replace(pi.TINY, prompt=PROMPT, state_width=32)


def full() -> PiConfig:
    return replace(pi.FULL, prompt=PROMPT, state_width=32)


def claims(names: Collection[str]) -> bool:
    """A state projection, and an expert whose norms have weights of their own."""
    found = set(map(WEIGHTS.canonical, names))
    plain = f"{EXPERT}.layers.0.input_layernorm.weight" in found
    return plain and "state_proj.weight" in found and not pi.adaptive(WEIGHTS, names)


def config(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> tuple[PiConfig, tuple[Fact, ...]]:
    known = Evidence(checkpoint, choices)
    built = pi.read_config(WEIGHTS, checkpoint, known, "pi0", PROMPT)
    width = Shapes(WEIGHTS, checkpoint).ranked("state_proj.weight", 2)[1]
    known.agree("max_state_dim", width, "columns of state_proj")
    known.agree("pi05", False, "state_proj and norms with weights of their own")
    return replace(built, state_width=width), tuple(known.facts)


class Denoise(pi.Denoise):
    """A state token, then action tokens through the expert; the time enters beside each action."""

    def __init__(self, c: PiConfig, dtype: torch.dtype) -> None:
        super().__init__(c, dtype)
        width = c.expert.width
        self.state_in = nn.Linear(c.state_width, width)
        self.action_in = nn.Linear(c.action_width, width)
        self.mlp_in = nn.Linear(2 * width, width)
        self.mlp_out = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(c.expert, dtype) for _ in range(c.expert.layers))
        self.norm = RmsNorm(width)
        self.action_out = nn.Linear(width, c.action_width)

    def velocity(self, x_t: Tensor, t: Tensor, n: Tensor, state: Tensor, kv: KV) -> Tensor:
        """x_t f32 [H, A], t f32 [], n i32 [], state f32 [S] -> f32 [H, A]"""
        length = self.config.image_tokens + n  # valid prefix positions
        prefix, horizon = kv[0][0].shape[1], x_t.shape[0]
        token = self.state_in(state)[None]
        _, seen = self.expert(token, length, self.visible(length, prefix, 1), kv)
        tokens = self.action_tokens(x_t, t)
        x, _ = self.expert(tokens, length + 1, self.visible(length, prefix, 1 + horizon), seen)
        v_t: Tensor = self.action_out(self.norm(x).to(torch.float32))
        return v_t

    def expert(self, tokens: Tensor, position: Tensor, visible: Tensor, kv: KV) -> tuple[Tensor, KV]:
        """Tokens f32 [T, W], first at `position`, through the layers; `kv` with their own keys and values behind."""
        cos, sin = rope_tables(position + iota(len(tokens), position), self.config.expert.head_dim)
        x, seen = tokens.to(self.dtype), []
        for layer, past in zip(self.layers, kv, strict=True):
            x, layer_kv = layer(x, cos, sin, visible, past)
            seen.append(layer_kv)
        return x, seen

    def action_tokens(self, x_t: Tensor, t: Tensor) -> Tensor:
        """out(silu(in([action, embedding of t]))): f32 [H, W]"""
        actions = self.action_in(x_t)
        time = self.embed_time(t).expand_as(actions)
        out: Tensor = self.mlp_out(F.silu(self.mlp_in(torch.cat([actions, time], dim=-1))))
        return out


class Pi0(Pi):
    """The whole model: one module per stage."""

    def __init__(self, c: PiConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(c, dtype, Denoise)


def weights(checkpoint: Checkpoint, c: PiConfig) -> dict[str, str]:
    """Parameter of Pi0 -> tensor of the checkpoint."""
    with torch.device("meta"):
        return WEIGHTS.resolve(checkpoint, shapes_of(Pi0(c)), "pi0")


def stages(c: PiConfig, dtype: torch.dtype = torch.bfloat16, velocity: bool = False) -> dict[str, Stage]:
    return pi.stages(Pi0, c, dtype, velocity)


SYNTHETIC = synthetic(
    WEIGHTS,
    pipeline=(
        "rename_observations_processor",
        "to_batch_processor",
        "pi0_new_line_processor",
        "tokenizer_processor",
        "device_processor",
        "relative_actions_processor",
        "normalizer_processor",
    ),
    norm="MEAN_STD",
    sizes={"tiny": tiny, "full": full},
    # sharper scores, or outliers in all that enters the expert, and one rounding of bfloat16 flips a row here and there
    scales=(
        ("denoise.layers.#.attn.q.weight", True, 0.7, 0.0),
        ("mlp_out.weight", True, 4.0, 0.0),  # behind a silu: action tokens of variance one, as Pi0.5's are
    ),
    writers=("mlp_out.weight", "state_in.weight"),
)
FAMILY = PI0
MODEL = Model("pi0", "Pi0", claims, config, tiny, Pi0, stages, pi.schedule, weights, SYNTHETIC, WEIGHTS.canonical)
