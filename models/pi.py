"""What Pi0 and Pi0.5 share: image tokens, the prefix with its keys, the files' names and sizes, the Euler loop.

SigLIP So400m/14 -> Gemma 2B prefix -> 300M action expert, flow matching in `steps` Euler steps. The two differ in how
state, time and noisy actions enter the expert. Sources of every constant: the public openpi and lerobot
implementations. The dtype policy is theirs when serving: layers in bfloat16, and in float32 the patch embedding with
its positions, norm internals, softmax, what stands between state, time or actions and the expert, and x_t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frtc.models.checkpoint import Checkpoint
from frtc.models.evidence import Evidence
from frtc.models.flow import EulerStep, embedded_time, iota, times
from frtc.models.gemma import KV, GemmaConfig, Layer, gemma_names, rope_tables
from frtc.models.siglip import Siglip, SiglipConfig, siglip_names
from frtc.models.stages import Repeat, Run, Schedule, Stage
from frtc.models.weights import Names, Shapes, WeightMap

PALIGEMMA = "paligemma_with_expert.paligemma"
VISION = f"{PALIGEMMA}.model.vision_tower.vision_model"
PREFIX = f"{PALIGEMMA}.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
LM_HEAD = f"{PALIGEMMA}.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"


def weight_map(norm: str, linears: Names, renames: Names, refused: Mapping[str, str] | None = None) -> WeightMap:
    """The map of one model.

    norm      what follows the name of one of the expert's norms
    linears   (in the file, in the denoise stage) around the expert
    renames   older spellings of the model's own, beside those of all
    """
    return WeightMap(
        names=(
            *siglip_names(VISION, "vision.tower"),
            (f"{PALIGEMMA}.model.multi_modal_projector.linear.*", "vision.projector.*"),
            (f"{PREFIX}.embed_tokens.weight", "prefix.embed.weight"),
            *gemma_names(PREFIX, "prefix", norm="weight"),
            *((f"{file}.*", f"denoise.{ours}.*") for file, ours in linears),
            *gemma_names(EXPERT, "denoise", norm),
            (f"{EXPERT}.norm.{norm}", f"denoise.norm.{norm}"),
        ),
        prefixes=("model.",),  # lerobot writes it
        renames=(  # spellings before September 2025
            (f"{PALIGEMMA}.language_model.lm_head.", f"{PALIGEMMA}.lm_head."),
            (f"{PALIGEMMA}.language_model.model.", f"{PREFIX}."),
            (f"{PALIGEMMA}.vision_tower.", f"{PALIGEMMA}.model.vision_tower."),
            (f"{PALIGEMMA}.multi_modal_projector.", f"{PALIGEMMA}.model.multi_modal_projector."),
            *renames,
        ),
        tied={"prefix.embed.weight": LM_HEAD},
        unused={
            f"{PREFIX}.norm.weight": "only the keys and values of the prefix are read, its last hidden state is not",
            EXPERT_HEAD: "the expert never emits text",
        },
        refused=refused or {},
    )


def adaptive(names: WeightMap, found: Collection[str]) -> bool:
    """Do the expert's norms take their scale from the time? That is Pi0.5."""
    return any(n.startswith(f"{EXPERT}.") and n.endswith(".dense.weight") for n in map(names.canonical, found))


@dataclass(frozen=True, slots=True)
class PiConfig:
    """Sizes follow from the checkpoint's tensors; views, prompt, horizon and steps from its side files or the user.

    prompt       token budget L: prompts are padded to it, `n` says how many are valid
    horizon      actions of one chunk H; action_width is the padded width of an action
    origin       "openpi" or "lerobot-…": decides how the clock ticks and what pixels the vision stage takes
    state_width  padded width of the state; 0: no state enters as numbers
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
    state_width: int = 0

    @property
    def image_tokens(self) -> int:
        return self.views * self.vision.tokens

    @property
    def pixels(self) -> torch.dtype:
        """uint8 0..255 (openpi resizes integers) or float32 in [0, 1] (lerobot resizes floats)."""
        return torch.uint8 if self.origin == "openpi" else torch.float32

    @property
    def times(self) -> tuple[float, ...]:
        """Time of each step as float32, from 1 (noise) towards 0 (data); the two origins differ in rounding."""
        if self.origin != "openpi":
            return times(self.steps)
        ticks = np.cumsum([1.0, *[-1.0 / self.steps] * (self.steps - 1)], dtype=np.float32)
        return tuple(float(t) for t in ticks)


# The same structure at sizes that a CPU runs at once. The vision width stays a multiple of the head dim 72.
TINY = PiConfig(
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
FULL = PiConfig(  # the published sizes: 3.3 billion parameters in use
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


def read_config(names: WeightMap, checkpoint: Checkpoint, known: Evidence, kind: str, prompt: int) -> PiConfig:
    """Sizes from tensors, the rest from config.json or choices: origin, views, prompt, horizon, steps.

    prompt   the published token budget
    """
    shapes = Shapes(names, checkpoint)
    prefix, expert = GemmaConfig.of(shapes, PREFIX), GemmaConfig.of(shapes, EXPERT)
    layers = max(prefix.layers, expert.layers)  # where they differ, the weight map names what is missing
    table = f"{PREFIX}.embed_tokens.weight"
    lerobot = (origin := known.origin(kind)) != "openpi"
    built = PiConfig(
        vision=SiglipConfig.of(shapes, VISION),
        prefix=replace(prefix, layers=layers),
        expert=replace(expert, layers=layers),
        vocab=shapes.ranked(table if table in shapes else LM_HEAD, 2)[0],
        action_width=shapes.ranked("action_in_proj.weight", 2)[1],
        views=known.views(3),
        prompt=known.count("prompt", "tokenizer_max_length", prompt, assumed=False),
        horizon=known.count("horizon", "chunk_size" if lerobot else "action_horizon", 50, assumed=True),
        steps=known.count("steps", "num_inference_steps", 10, assumed=True),
        origin=origin,
        min_period=known.number("min_period", "min_period", 4e-3),
        max_period=known.number("max_period", "max_period", 4.0),
    )
    edge = built.vision.image
    known.agree("max_action_dim" if lerobot else "action_dim", built.action_width, "columns of action_in_proj")
    known.agree("image_resolution", [edge, edge], "positions of the vision tower")
    known.agree("n_obs_steps", 1, "the model sees one observation")
    return built


class Vision(nn.Module):
    """Camera frames to image tokens of the prefix's width."""

    def __init__(self, c: PiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.tower = Siglip(c.vision, dtype)
        self.projector = nn.Linear(c.vision.width, c.prefix.width, dtype=dtype)

    def forward(self, images: Tensor) -> Tensor:
        """[V, 224, 224, 3] u8, or f32 in [0, 1] -> [V*T, W]"""
        if images.dtype == torch.uint8:
            images = images.to(torch.float32) / 255.0
        tokens: Tensor = self.projector(self.tower(images * 2.0 - 1.0))
        return tokens.flatten(0, 1)


class Prefix(nn.Module):
    """Image tokens and prompt through the language model. Only its keys and values are read later."""

    def __init__(self, c: PiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = c.prefix.head_dim
        self.embed = nn.Embedding(c.vocab, c.prefix.width, dtype=dtype)
        self.layers = nn.ModuleList(Layer(c.prefix, dtype) for _ in range(c.prefix.layers))

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


class Denoise(EulerStep):
    """What the action experts share; each says what the velocity of its tokens is."""

    def __init__(self, c: PiConfig, dtype: torch.dtype) -> None:
        super().__init__(c.steps)
        self.config, self.dtype = c, dtype

    def visible(self, length: Tensor, prefix: int, suffix: int) -> Tensor:
        """Valid prefix positions and the whole suffix; between them lies padding. bool [1, prefix + suffix]"""
        key = iota(prefix + suffix, length)
        return ((key < length) | (key >= prefix))[None, :]

    def embed_time(self, t: Tensor) -> Tensor:
        """t f32 [] -> f32 [W of the expert]"""
        c = self.config
        return embedded_time(t, c.expert.width, c.min_period, c.max_period)


class Pi(nn.Module):
    """The whole model: one module per stage."""

    def __init__(self, c: PiConfig, dtype: torch.dtype, denoise: type[Denoise]) -> None:
        super().__init__()
        self.config = c
        self.vision = Vision(c, dtype)
        self.prefix = Prefix(c, dtype)
        self.denoise = denoise(c, dtype)

    def sample(self, x_t: Tensor, *context: Any) -> tuple[Tensor, list[Tensor]]:
        """The Euler loop: noise f32 [H, A] -> actions, and the velocity of each step."""
        velocities = []
        for time in self.config.times:
            x_t, v_t = self.denoise(x_t, torch.tensor(time), *context)
            velocities.append(v_t)
        return x_t, velocities


def stages(
    build: Callable[[PiConfig, torch.dtype], Pi], c: PiConfig, dtype: torch.dtype, velocity: bool
) -> dict[str, Stage]:
    """vision, prefix and denoise on the meta device, ready for torch.export."""
    with torch.device("meta"):
        model = build(c, dtype).eval()
        image_tokens = torch.empty(c.image_tokens, c.prefix.width, dtype=dtype)
        images = torch.empty(c.views, c.vision.image, c.vision.image, 3, dtype=c.pixels)
        tokens = torch.empty(c.prompt, dtype=torch.int32)
        n, t = torch.empty((), dtype=torch.int32), torch.empty(())
        kv_shape = (c.prefix.kv_heads, c.image_tokens + c.prompt, c.prefix.head_dim)
        kv = [(torch.empty(kv_shape, dtype=dtype), torch.empty(kv_shape, dtype=dtype)) for _ in range(c.prefix.layers)]
        x_t, state = torch.empty(c.horizon, c.action_width), torch.empty(c.state_width)
    model.denoise.returns_velocity = velocity
    names = tuple(f"{kind}.{i}" for i in range(c.prefix.layers) for kind in ("k", "v"))
    out = ("x_t", "v_t") if velocity else ("x_t",)
    seen, seen_names = ((n, state, kv), ("n", "state")) if c.state_width else ((n, kv), ("n",))
    all_stages = (
        Stage("vision", model.vision, "vision", (images,), ("images",), ("image_tokens",)),
        Stage("prefix", model.prefix, "prefix", (image_tokens, tokens, n), ("image_tokens", "tokens", "n"), names),
        Stage("denoise", model.denoise, "denoise", (x_t, t, *seen), ("x_t", "t", *seen_names, *names), out),
    )
    return {s.name: s for s in all_stages}


def schedule(c: PiConfig) -> Schedule:
    """Vision and prefix once, then the Euler steps on the noise."""
    return Schedule(
        inputs=("images", *(("state",) if c.state_width else ()), "tokens", "n", "noise"),
        steps=(
            Run("vision"),
            Run("prefix"),
            Repeat("denoise", len(c.times), carry={"x_t": "noise"}, tables={"t": c.times}),
        ),
        outputs={"actions": "x_t"},
    )
