"""Pi0.5: SigLIP So400m/14 -> Gemma 2B prefix -> 300M action expert, flow matching in `steps` Euler steps.

Sources of every constant: the public openpi and lerobot implementations. The dtype policy is theirs when serving:
layers in bfloat16, and in float32 the patch embedding with its positions, norm internals, softmax, the time path with
the adaptive norms' modulation, the action projections and x_t.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frtc.models.checkpoint import Checkpoint
from frtc.models.evidence import Evidence, Fact
from frtc.models.gemma import AdaRmsNorm, ExpertLayer, GemmaConfig, PrefixLayer, gemma_names, rope_tables
from frtc.models.policies import PI05
from frtc.models.siglip import Siglip, SiglipConfig, siglip_names
from frtc.models.stages import Model, Repeat, Run, Schedule, Stage, Synthetic
from frtc.models.weights import Shape, Shapes, WeightMap, shapes_of

VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
PREFIX = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"

WEIGHTS = WeightMap(
    names=(
        *siglip_names(VISION, "vision.tower"),
        ("paligemma_with_expert.paligemma.model.multi_modal_projector.linear.*", "vision.projector.*"),
        (f"{PREFIX}.embed_tokens.weight", "prefix.embed.weight"),
        *gemma_names(PREFIX, "prefix", norm="weight"),
        ("time_mlp_in.*", "denoise.time_in.*"),
        ("time_mlp_out.*", "denoise.time_out.*"),
        ("action_in_proj.*", "denoise.action_in.*"),
        *gemma_names(EXPERT, "denoise", norm="dense.*"),
        (f"{EXPERT}.norm.dense.*", "denoise.norm.dense.*"),
        ("action_out_proj.*", "denoise.action_out.*"),
    ),
    prefixes=("model.",),  # lerobot writes it
    renames=(  # spellings before September 2025, then Pi0's name of the time MLP, which lerobot accepts here too
        ("paligemma_with_expert.paligemma.language_model.lm_head.", "paligemma_with_expert.paligemma.lm_head."),
        ("paligemma_with_expert.paligemma.language_model.model.", f"{PREFIX}."),
        ("paligemma_with_expert.paligemma.vision_tower.", "paligemma_with_expert.paligemma.model.vision_tower."),
        (
            "paligemma_with_expert.paligemma.multi_modal_projector.",
            "paligemma_with_expert.paligemma.model.multi_modal_projector.",
        ),
        ("action_time_mlp_in.", "time_mlp_in."),
        ("action_time_mlp_out.", "time_mlp_out."),
    ),
    tied={"prefix.embed.weight": LM_HEAD},
    unused={
        f"{PREFIX}.norm.weight": "only the keys and values of the prefix are read, its last hidden state is not",
        EXPERT_HEAD: "the expert never emits text",
    },
    refused=dict.fromkeys(
        ("proprio_history_proj", "proprio_history_proj.*"), "the memory variant (a history of states)"
    ),
)

KV = list[tuple[Tensor, Tensor]]  # per layer: keys (rotated) and values, each [kv_heads, P, head_dim]


@dataclass(frozen=True, slots=True)
class Pi05Config:
    """Sizes follow from the checkpoint's tensors; views, prompt, horizon and steps from its side files or the user.

    prompt     token budget L: prompts are padded to it, `n` says how many are valid
    horizon    actions of one chunk H; action_width is the padded width of an action
    origin     "openpi" or "lerobot-…": decides how the clock ticks and what pixels the vision stage takes
    """

    vision: SiglipConfig
    prefix: GemmaConfig
    expert: GemmaConfig
    vocab: int
    action_width: int
    views: int
    prompt: int
    horizon: int
    steps: int
    origin: str
    min_period: float = 4e-3
    max_period: float = 4.0

    @property
    def image_tokens(self) -> int:
        return self.views * self.vision.tokens

    @property
    def pixels(self) -> torch.dtype:
        """uint8 0..255 (openpi resizes integers) or float32 already in [-1, 1] (lerobot resizes floats)."""
        return torch.uint8 if self.origin == "openpi" else torch.float32

    @property
    def times(self) -> tuple[float, ...]:
        """Time of each step as float32, from 1 (noise) towards 0 (data); the two origins differ in rounding."""
        step = -1.0 / self.steps
        if self.origin != "openpi":
            return tuple(float(np.float32(1.0 + k * step)) for k in range(self.steps))
        ticks = np.cumsum([1.0, *[step] * (self.steps - 1)], dtype=np.float32)
        return tuple(float(t) for t in ticks)


def tiny() -> Pi05Config:
    """The same structure at sizes that a CPU runs at once. The vision width stays a multiple of the head dim 72."""
    return Pi05Config(
        vision=SiglipConfig(width=144, layers=2, mlp=272),
        prefix=GemmaConfig(width=128, layers=3, heads=4, kv_heads=1, head_dim=32, mlp=256),
        expert=GemmaConfig(width=64, layers=3, heads=4, kv_heads=1, head_dim=32, mlp=128),
        vocab=1024,
        action_width=32,
        views=2,
        prompt=96,
        horizon=10,
        steps=10,
        origin="openpi",
    )


def full() -> Pi05Config:
    """The published sizes: 3.3 billion parameters in use."""
    return Pi05Config(
        vision=SiglipConfig(width=1152, layers=27, mlp=4304),
        prefix=GemmaConfig(width=2048, layers=18, heads=8, kv_heads=1, head_dim=256, mlp=16384),
        expert=GemmaConfig(width=1024, layers=18, heads=8, kv_heads=1, head_dim=256, mlp=4096),
        vocab=257_152,
        action_width=32,
        views=3,
        prompt=200,
        horizon=50,
        steps=10,
        origin="openpi",
    )


def claims(names: Collection[str]) -> bool:
    """Adaptive norms in the expert; Pi0 has plain ones and a state projection."""
    return any(n.startswith(f"{EXPERT}.") and n.endswith(".dense.weight") for n in map(WEIGHTS.canonical, names))


def config(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> tuple[Pi05Config, tuple[Fact, ...]]:
    """Sizes from tensors, the rest from config.json or choices: origin, views, prompt, horizon, steps."""
    shapes, known = Shapes(WEIGHTS, checkpoint), Evidence(checkpoint, choices)
    prefix, expert = GemmaConfig.of(shapes, PREFIX), GemmaConfig.of(shapes, EXPERT)
    layers = max(prefix.layers, expert.layers)  # where they differ, the weight map names what is missing
    table = f"{PREFIX}.embed_tokens.weight"
    origin = known.origin("pi05")
    lerobot = origin != "openpi"
    built = Pi05Config(
        vision=SiglipConfig.of(shapes, VISION),
        prefix=replace(prefix, layers=layers),
        expert=replace(expert, layers=layers),
        vocab=shapes.ranked(table if table in shapes else LM_HEAD, 2)[0],
        action_width=shapes.ranked("action_in_proj.weight", 2)[1],
        views=known.views(3),
        prompt=known.count("prompt", "tokenizer_max_length", 200, assumed=False),
        horizon=known.count("horizon", "chunk_size" if lerobot else "action_horizon", 50, assumed=True),
        steps=known.count("steps", "num_inference_steps", 10, assumed=True),
        origin=origin,
        min_period=known.number("min_period", "min_period", 4e-3),
        max_period=known.number("max_period", "max_period", 4.0),
    )
    edge = built.vision.image
    known.agree("max_action_dim" if lerobot else "action_dim", built.action_width, "columns of action_in_proj")
    known.agree("image_resolution", [edge, edge], "positions of the vision tower")
    known.agree("n_obs_steps", 1, "Pi0.5 sees one observation")
    known.agree("pi05", True, "time_mlp_in and adaptive norms")
    return built, tuple(known.facts)


def iota(count: int, like: Tensor) -> Tensor:
    """0, 1, … count - 1: i32 on the device of `like`."""
    return torch.arange(count, dtype=torch.int32, device=like.device)


class Vision(nn.Module):
    """Camera frames to image tokens of the prefix's width."""

    def __init__(self, c: Pi05Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.tower = Siglip(c.vision, dtype)
        self.projector = nn.Linear(c.vision.width, c.prefix.width, dtype=dtype)

    def forward(self, images: Tensor) -> Tensor:
        """[V, 224, 224, 3] u8, or f32 in [-1, 1] -> [V*T, W]"""
        if images.dtype == torch.uint8:
            images = images.to(torch.float32) / 255.0 * 2.0 - 1.0
        tokens: Tensor = self.projector(self.tower(images))
        return tokens.flatten(0, 1)


class Prefix(nn.Module):
    """Image tokens and prompt through the language model. Only its keys and values are read later."""

    def __init__(self, c: Pi05Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = c.prefix.head_dim
        self.embed = nn.Embedding(c.vocab, c.prefix.width, dtype=dtype)
        self.layers = nn.ModuleList(PrefixLayer(c.prefix, dtype) for _ in range(c.prefix.layers))

    def forward(self, image_tokens: Tensor, tokens: Tensor, n: Tensor) -> KV:
        """[P_img, W], tokens i32 [L], n i32 [] valid tokens -> keys and values of P = P_img + L positions"""
        return self.from_embeddings(image_tokens, self.embed(tokens), n)

    def from_embeddings(self, image_tokens: Tensor, prompt: Tensor, n: Tensor) -> KV:
        """As forward, from rows of the embedding table [L, W] (not yet scaled)."""
        x = torch.cat([image_tokens, prompt * math.sqrt(prompt.shape[1])])
        positions = iota(x.shape[0], n)
        cos, sin = rope_tables(positions, self.head_dim)
        visible = (positions < image_tokens.shape[0] + n)[None, :]
        kv = []
        for layer in self.layers:
            x, layer_kv = layer(x, cos, sin, visible)
            kv.append(layer_kv)
        return kv


class Denoise(nn.Module):
    """One Euler step: velocity of the noisy chunk at time t, given the prefix."""

    def __init__(self, c: Pi05Config, dtype: torch.dtype) -> None:
        super().__init__()
        width = c.expert.width
        self.config, self.dtype = c, dtype
        self.dt = -1.0 / c.steps
        self.returns_velocity = True
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)
        self.action_in = nn.Linear(c.action_width, width)
        self.layers = nn.ModuleList(ExpertLayer(c.expert, dtype) for _ in range(c.expert.layers))
        self.norm = AdaRmsNorm(width)
        self.action_out = nn.Linear(width, c.action_width)

    def forward(self, x_t: Tensor, t: Tensor, n: Tensor, kv: KV) -> Tensor | tuple[Tensor, Tensor]:
        """x_t f32 [H, A], t f32 [], n i32 [] -> x_t one step later (and the velocity, f32 [H, A])"""
        v_t = self.velocity(x_t, t, n, kv)
        x_next = x_t + self.dt * v_t
        return (x_next, v_t) if self.returns_velocity else x_next

    def velocity(self, x_t: Tensor, t: Tensor, n: Tensor, kv: KV) -> Tensor:
        length = self.config.image_tokens + n  # valid prefix positions
        cos, sin = rope_tables(length + iota(x_t.shape[0], n), self.config.expert.head_dim)
        visible = self.visible(length, kv[0][0].shape[1], x_t.shape[0])
        cond = self.condition(t)
        x = self.action_in(x_t).to(self.dtype)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x = layer(x, cond, cos, sin, layer_kv, visible)
        y, _ = self.norm(x, cond)
        v_t: Tensor = self.action_out(y.to(torch.float32))
        return v_t

    def visible(self, length: Tensor, prefix: int, horizon: int) -> Tensor:
        """Valid prefix positions and the whole suffix; between them lies padding. bool [1, prefix + horizon]"""
        key = iota(prefix + horizon, length)
        return ((key < length) | (key >= prefix))[None, :]

    def condition(self, t: Tensor) -> Tensor:
        """silu(out(silu(in(embedding of t)))): f32 [W]"""
        return F.silu(self.time_out(F.silu(self.time_in(self.embed_time(t)))))

    def embed_time(self, t: Tensor) -> Tensor:
        """[sin(a), cos(a)], a = 2 pi t / period, periods in geometric progression; in float64, rounded to f32 [W]."""
        half, c = self.config.expert.width // 2, self.config
        fraction = torch.arange(half, dtype=torch.float64, device=t.device) / (half - 1)
        period = c.min_period * (c.max_period / c.min_period) ** fraction
        angle = t.to(torch.float64) * (2.0 * math.pi / period)
        return torch.cat([torch.sin(angle), torch.cos(angle)]).to(torch.float32)


class Pi05(nn.Module):
    """The whole model: one module per stage."""

    def __init__(self, c: Pi05Config, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = c
        self.vision = Vision(c, dtype)
        self.prefix = Prefix(c, dtype)
        self.denoise = Denoise(c, dtype)

    def sample(self, x_t: Tensor, n: Tensor, kv: KV) -> tuple[Tensor, list[Tensor]]:
        """The Euler loop: noise f32 [H, A] -> actions, and the velocity of each step."""
        velocities = []
        for time in self.config.times:
            x_t, v_t = self.denoise(x_t, torch.tensor(time), n, kv)
            velocities.append(v_t)
        return x_t, velocities


def weights(checkpoint: Checkpoint, c: Pi05Config) -> dict[str, str]:
    """Parameter of Pi05 -> tensor of the checkpoint."""
    with torch.device("meta"):
        return WEIGHTS.resolve(checkpoint, shapes_of(Pi05(c)), "pi05")


def stages(c: Pi05Config, dtype: torch.dtype = torch.bfloat16, velocity: bool = False) -> dict[str, Stage]:
    """vision, prefix and denoise on the meta device, ready for torch.export."""
    with torch.device("meta"):
        model = Pi05(c, dtype).eval()
        image_tokens = torch.empty(c.image_tokens, c.prefix.width, dtype=dtype)
        images = torch.empty(c.views, c.vision.image, c.vision.image, 3, dtype=c.pixels)
        tokens = torch.empty(c.prompt, dtype=torch.int32)
        n, t = torch.empty((), dtype=torch.int32), torch.empty(())
        kv_shape = (c.prefix.kv_heads, c.image_tokens + c.prompt, c.prefix.head_dim)
        kv = [(torch.empty(kv_shape, dtype=dtype), torch.empty(kv_shape, dtype=dtype)) for _ in range(c.prefix.layers)]
        x_t = torch.empty(c.horizon, c.action_width)
    model.denoise.returns_velocity = velocity
    names = tuple(f"{kind}.{i}" for i in range(c.prefix.layers) for kind in ("k", "v"))
    out = ("x_t", "v_t") if velocity else ("x_t",)
    all_stages = (
        Stage("vision", model.vision, "vision", (images,), ("images",), ("image_tokens",)),
        Stage("prefix", model.prefix, "prefix", (image_tokens, tokens, n), ("image_tokens", "tokens", "n"), names),
        Stage("denoise", model.denoise, "denoise", (x_t, t, n, kv), ("x_t", "t", "n", *names), out),
    )
    return {s.name: s for s in all_stages}


def schedule(c: Pi05Config) -> Schedule:
    """Vision and prefix once, then the Euler steps on the noise."""
    return Schedule(
        inputs=("images", "tokens", "n", "noise"),
        steps=(
            Run("vision"),
            Run("prefix"),
            Repeat("denoise", len(c.times), carry={"x_t": "noise"}, tables={"t": c.times}),
        ),
        outputs={"actions": "x_t"},
    )


def unread(c: Pi05Config, layout: str) -> dict[str, Shape]:
    """Tensors of real files that no output depends on; lerobot keeps both copies of the embedding table."""
    dead: dict[str, Shape] = {f"{PREFIX}.norm.weight": (c.prefix.width,), EXPERT_HEAD: (c.vocab, c.expert.width)}
    return dead | ({LM_HEAD: (c.vocab, c.prefix.width)} if layout == "lerobot" else {})


def side_config(c: Pi05Config, layout: str, dtype: str) -> dict[str, Any]:
    """config.json as openpi writes it beside torch tensors (beside arrays it has none), or our part of lerobot's."""
    if layout == "jax":
        return {}
    variants = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
    if layout == "openpi":
        return {"action_dim": c.action_width, "action_horizon": c.horizon, **variants, "precision": dtype}
    return {
        **variants,
        "dtype": dtype,
        "chunk_size": c.horizon,
        "n_action_steps": c.horizon,
        "max_state_dim": 32,
        "max_action_dim": c.action_width,
        "num_inference_steps": c.steps,
        "min_period": c.min_period,
        "max_period": c.max_period,
        "use_relative_actions": False,
        "relative_exclude_joints": ["gripper"],
        "action_feature_names": None,
        "rtc_config": None,
        "image_resolution": [c.vision.image, c.vision.image],
        "empty_cameras": 0,
        "tokenizer_max_length": c.prompt,
    }


SYNTHETIC = Synthetic(
    sizes={"tiny": tiny, "full": full},
    layouts=("openpi", "lerobot"),
    weights=WEIGHTS,
    unread=unread,
    config=side_config,
    pipeline=(
        "rename_observations_processor",
        "to_batch_processor",
        "relative_actions_processor",
        "normalizer_processor",
        "pi05_prepare_state_tokenizer_processor_step",
        "tokenizer_processor",
        "device_processor",
    ),
    norm={"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    writers=("action_in.weight",),
)
FAMILY = PI05
MODEL = Model("pi05", "Pi0.5", claims, config, tiny, Pi05, stages, schedule, weights, SYNTHETIC)
