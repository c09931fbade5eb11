"""Pi0.5: the state is part of the prompt, the time modulates every norm of the expert. models/pi.py has the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frtc.models import pi
from frtc.models.checkpoint import Checkpoint
from frtc.models.evidence import Evidence, Fact
from frtc.models.flow import iota
from frtc.models.gemma import KV, AdaLayer, AdaRmsNorm, rope_tables
from frtc.models.pi import Pi, PiConfig
from frtc.models.policies import PI05
from frtc.models.stages import Model, Stage
from frtc.models.synthetic_pi import synthetic
from frtc.models.weights import shapes_of

WEIGHTS = pi.weight_map(
    norm="dense.*",
    linears=(
        ("time_mlp_in", "time_in"),
        ("time_mlp_out", "time_out"),
        ("action_in_proj", "action_in"),
        ("action_out_proj", "action_out"),
    ),
    renames=(  # Pi0's name of the time MLP, which lerobot accepts here too
        ("action_time_mlp_in.", "time_mlp_in."),
        ("action_time_mlp_out.", "time_mlp_out."),
    ),
    refused=dict.fromkeys(
        ("proprio_history_proj", "proprio_history_proj.*"), "the memory variant (a history of states)"
    ),
)


def tiny() -> PiConfig:
    return pi.TINY


def full() -> PiConfig:
    return pi.FULL


def claims(names: Collection[str]) -> bool:
    return pi.adaptive(WEIGHTS, names)


def config(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> tuple[PiConfig, tuple[Fact, ...]]:
    known = Evidence(checkpoint, choices)
    built = pi.read_config(WEIGHTS, checkpoint, known, "pi05", prompt=200)
    known.agree("pi05", True, "time_mlp_in and adaptive norms")
    return built, tuple(known.facts)


class Denoise(pi.Denoise):
    """Action tokens through the expert; the time enters through its norms."""

    def __init__(self, c: PiConfig, dtype: torch.dtype) -> None:
        super().__init__(c, dtype)
        width = c.expert.width
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)
        self.action_in = nn.Linear(c.action_width, width)
        self.layers = nn.ModuleList(AdaLayer(c.expert, dtype) for _ in range(c.expert.layers))
        self.norm = AdaRmsNorm(width)
        self.action_out = nn.Linear(width, c.action_width)

    def velocity(self, x_t: Tensor, t: Tensor, n: Tensor, kv: KV) -> Tensor:
        """x_t f32 [H, A], t f32 [], n i32 [] -> f32 [H, A]"""
        length = self.config.image_tokens + n  # valid prefix positions
        cos, sin = rope_tables(length + iota(x_t.shape[0], n), self.config.expert.head_dim)
        visible = self.visible(length, kv[0][0].shape[1], x_t.shape[0])
        cond = self.condition(t)
        x = self.action_in(x_t).to(self.dtype)
        for layer, past in zip(self.layers, kv, strict=True):
            x = layer(x, cond, cos, sin, past, visible)
        y, _ = self.norm(x, cond)
        v_t: Tensor = self.action_out(y.to(torch.float32))
        return v_t

    def condition(self, t: Tensor) -> Tensor:
        """silu(out(silu(in(embedding of t)))): f32 [W]"""
        return F.silu(self.time_out(F.silu(self.time_in(self.embed_time(t)))))


class Pi05(Pi):
    """The whole model: one module per stage."""

    def __init__(self, c: PiConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(c, dtype, Denoise)


def weights(checkpoint: Checkpoint, c: PiConfig) -> dict[str, str]:
    """Parameter of Pi05 -> tensor of the checkpoint."""
    with torch.device("meta"):
        return WEIGHTS.resolve(checkpoint, shapes_of(Pi05(c)), "pi05")


def stages(c: PiConfig, dtype: torch.dtype = torch.bfloat16, velocity: bool = False) -> dict[str, Stage]:
    return pi.stages(Pi05, c, dtype, velocity)


SYNTHETIC = synthetic(
    WEIGHTS,
    pipeline=(
        "rename_observations_processor",
        "to_batch_processor",
        "relative_actions_processor",
        "normalizer_processor",
        "pi05_prepare_state_tokenizer_processor_step",
        "tokenizer_processor",
        "device_processor",
    ),
    norm="QUANTILES",
    sizes={"tiny": tiny, "full": full},
    writers=("action_in.weight",),
)
FAMILY = PI05
MODEL = Model("pi05", "Pi0.5", claims, config, tiny, Pi05, stages, pi.schedule, weights, SYNTHETIC, WEIGHTS.canonical)
