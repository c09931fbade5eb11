"""What SmolVLA's checkpoints hold, as lerobot writes them: names, sizes, and which choices of config.json we follow."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from frtc.errors import FrtcError
from frtc.models.checkpoint import Checkpoint
from frtc.models.evidence import Evidence, Fact
from frtc.models.flow import times
from frtc.models.llama import LlamaConfig, llama_names
from frtc.models.siglip import SiglipConfig, siglip_names
from frtc.models.weights import Shapes, WeightMap

VLM = "vlm_with_expert.vlm.model"
VISION, PREFIX, EXPERT = f"{VLM}.vision_model", f"{VLM}.text_model", "vlm_with_expert.lm_expert"
CONNECTOR = f"{VLM}.connector.modality_projection.proj.weight"
LM_HEAD = "vlm_with_expert.vlm.lm_head.weight"
HEAD_DIM = 64  # of SigLIP base, and of SmolLM2 in every size; neither tensors nor config.json tell
OLD_STATISTICS = "statistics among its weights (lerobot before 0.4; its migrate_policy_normalization moves them)"

WEIGHTS = WeightMap(
    names=(
        *siglip_names(VISION, "vision.tower"),
        (CONNECTOR, "vision.projector.weight"),
        (f"{PREFIX}.embed_tokens.weight", "prefix.embed.weight"),
        *llama_names(PREFIX, "prefix"),
        ("state_proj.*", "prefix.state_in.*"),
        ("action_in_proj.*", "denoise.action_in.*"),
        ("action_time_mlp_in.*", "denoise.mlp_in.*"),
        ("action_time_mlp_out.*", "denoise.mlp_out.*"),
        *llama_names(EXPERT, "denoise"),
        (f"{EXPERT}.norm.weight", "denoise.norm.weight"),
        ("action_out_proj.*", "denoise.action_out.*"),
    ),
    prefixes=("model.", "_orig_mod."),  # of the policy; of a compiled model
    tied={"prefix.embed.weight": LM_HEAD},
    unused={
        LM_HEAD: "no text is emitted",
        f"{PREFIX}.norm.weight": "only the keys and values of the prefix are read, its last hidden state is not",
        **{name: "the expert reads the first layers only" for name, _ in llama_names(PREFIX, "prefix")},
    },
    refused=dict.fromkeys(
        [
            *(f"normalize_inputs.buffer_observation_state.{stat}" for stat in ("mean", "std")),
            *(
                f"{name}.buffer_action.{s}"
                for name in ("normalize_targets", "unnormalize_outputs")
                for s in ("mean", "std")
            ),
        ],
        OLD_STATISTICS,
    ),
)


@dataclass(frozen=True, slots=True)
class SmolVlaConfig:
    """Sizes follow from the checkpoint's tensors; views, prompt, horizon and steps from its side files or the user.

    shuffle    patches along each edge of a square that become one image token
    cross      per layer of the expert: does it attend to the prefix only, by keys and values made anew?
    prompt     token budget L: prompts are padded to it, `n` says how many are valid
    horizon    actions of one chunk H; state_width and action_width are padded widths
    """

    vision: SiglipConfig
    shuffle: int
    prefix: LlamaConfig
    expert: LlamaConfig
    cross: tuple[bool, ...]
    vocab: int
    state_width: int
    action_width: int
    views: int
    prompt: int
    horizon: int
    steps: int
    min_period: float = 4e-3
    max_period: float = 4.0

    @property
    def image_tokens(self) -> int:
        return self.views * (self.vision.side // self.shuffle) ** 2

    @property
    def rows(self) -> int:
        """Of the prefix: state, images, prompt."""
        return 1 + self.image_tokens + self.prompt

    @property
    def times(self) -> tuple[float, ...]:
        """Time of each step, from 1 (noise) towards 0 (data)."""
        return times(self.steps)


def alternating(layers: int, every: int) -> tuple[bool, ...]:
    """Self-attention in each `every`-th layer from the first on, in none where it is not positive."""
    return tuple(every <= 0 or i % every != 0 for i in range(layers))


def tiny() -> SmolVlaConfig:
    """The same structure at sizes that a CPU runs at once."""
    return SmolVlaConfig(
        vision=SiglipConfig(width=128, layers=2, mlp=272, image=128, patch=16, head_dim=HEAD_DIM),
        shuffle=4,
        prefix=LlamaConfig(width=192, layers=4, heads=6, kv_heads=2, head_dim=HEAD_DIM, mlp=320),
        expert=LlamaConfig(width=144, layers=4, heads=6, kv_heads=2, head_dim=HEAD_DIM, mlp=256),
        cross=alternating(4, 2),
        vocab=1024,
        state_width=32,
        action_width=32,
        views=2,
        prompt=48,
        horizon=10,
        steps=10,
    )


def full() -> SmolVlaConfig:
    """The published sizes: 450 million parameters."""
    return SmolVlaConfig(
        vision=SiglipConfig(width=768, layers=12, mlp=3072, image=512, patch=16, head_dim=HEAD_DIM),
        shuffle=4,
        prefix=LlamaConfig(width=960, layers=16, heads=15, kv_heads=5, head_dim=HEAD_DIM, mlp=2560),
        expert=LlamaConfig(width=720, layers=16, heads=15, kv_heads=5, head_dim=HEAD_DIM, mlp=2048),
        cross=alternating(16, 2),
        vocab=49_280,
        state_width=32,
        action_width=32,
        views=3,
        prompt=48,
        horizon=50,
        steps=10,
    )


def claims(names: Collection[str]) -> bool:
    return any(name.startswith(f"{EXPERT}.") for name in map(WEIGHTS.canonical, names))


def config(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> tuple[SmolVlaConfig, tuple[Fact, ...]]:
    """Sizes from tensors, the rest from config.json or choices: views, prompt, horizon, steps."""
    shapes, known = Shapes(WEIGHTS, checkpoint), Evidence(checkpoint, choices)
    known.agree("type", "smolvla", "tensor names")
    prefix, expert = (LlamaConfig.of(shapes, file, HEAD_DIM) for file in (PREFIX, EXPERT))
    layers = _layers(known, prefix.layers, expert.layers)
    vision = SiglipConfig.of(shapes, VISION, HEAD_DIM)
    table = f"{PREFIX}.embed_tokens.weight"
    built = SmolVlaConfig(
        vision=vision,
        shuffle=_shuffle(shapes, vision),
        prefix=replace(prefix, layers=layers),
        expert=replace(expert, layers=layers, heads=prefix.heads, kv_heads=prefix.kv_heads),
        cross=_cross(known, layers),
        vocab=shapes.ranked(table if table in shapes else LM_HEAD, 2)[0],
        state_width=shapes.ranked("state_proj.weight", 2)[1],
        action_width=shapes.ranked("action_in_proj.weight", 2)[1],
        views=known.views(3),
        prompt=known.count("prompt", "tokenizer_max_length", 48, assumed=False),
        horizon=known.count("horizon", "chunk_size", 50, assumed=True),
        steps=known.count("steps", "num_steps", 10, assumed=True),
        min_period=known.number("min_period", "min_period", 4e-3),
        max_period=known.number("max_period", "max_period", 4.0),
    )
    _agree(known, built, shapes)
    return built, tuple(known.facts)


def _layers(known: Evidence, prefix: int, expert: int) -> int:
    """config.json says how many layers of the language model are used; without it, all that the file has."""
    layers = known.checkpoint.config.get("num_vlm_layers", 0)
    if type(layers) is not int or layers > prefix:
        raise known.contradiction("num_vlm_layers", f"at most {prefix} (layers of the language model)")
    layers = layers if layers > 0 else max(prefix, expert)  # where they differ, the weight map names what is missing
    if known.checkpoint.config.get("num_expert_layers", 0) not in (-1, 0, layers):
        raise known.contradiction("num_expert_layers", f"{layers} (one for each layer of the language model) or -1")
    return layers


def _cross(known: Evidence, layers: int) -> tuple[bool, ...]:
    mode = known.checkpoint.config.get("attention_mode", "cross_attn")
    every = known.checkpoint.config.get("self_attn_every_n_layers", 2)
    if mode not in ("cross_attn", "self_attn"):
        raise known.contradiction("attention_mode", "'cross_attn' or 'self_attn'")
    if type(every) is not int:
        raise known.contradiction("self_attn_every_n_layers", "an integer")
    return alternating(layers, every) if mode == "cross_attn" else (False,) * layers


def _shuffle(shapes: Shapes, vision: SiglipConfig) -> int:
    """From the connector, which reads the patches of a square side by side."""
    columns = shapes.ranked(CONNECTOR, 2)[1]
    edge = math.isqrt(columns // vision.width)
    if edge * edge * vision.width != columns or vision.side % max(edge, 1):
        what = f"{CONNECTOR} has {columns} columns, which are no square of patches of width {vision.width}"
        raise FrtcError("weights.shape", what, [("checkpoint", str(shapes.checkpoint))])
    if vision.side & (vision.side - 1):  # the published code finds a patch's row by dividing in floats
        what = f"{vision.side} patches along an edge are no power of two: their positions would differ from training"
        raise FrtcError("weights.shape", what, [("checkpoint", str(shapes.checkpoint))])
    return edge


def _agree(known: Evidence, c: SmolVlaConfig, shapes: Shapes) -> None:
    """What config.json says of sizes is what the tensors have; what it asks for is what we do."""
    edge = c.vision.image
    known.agree("max_state_dim", c.state_width, "columns of state_proj")
    known.agree("max_action_dim", c.action_width, "columns of action_in_proj")
    known.agree("resize_imgs_with_padding", [edge, edge], "positions of the vision tower")
    known.agree("n_obs_steps", 1, "SmolVLA sees one observation")
    known.agree("add_image_special_tokens", False, "frtc writes no special tokens around images")
    scale = known.checkpoint.config.get("expert_width_multiplier", c.expert.width / c.prefix.width)
    if type(scale) not in (int, float) or int(c.prefix.width * scale) != c.expert.width:
        wanted = f"{c.expert.width / c.prefix.width:g} (widths {c.expert.width} and {c.prefix.width})"
        raise known.contradiction("expert_width_multiplier", wanted)
    for i, cross in enumerate(c.cross):
        name, columns = f"{EXPERT}.layers.{i}.self_attn.k_proj.weight", c.prefix.kv_width if cross else c.expert.width
        if name in shapes and shapes[name][1:] != (columns,):
            kind = "cross" if cross else "self"
            rows = [("tensor", f"{name} is {list(shapes[name])}"), ("wants", f"{columns} columns")]
            what = f"layer {i} of the expert is no {kind}-attention, as attention_mode and self_attn_every_n_layers say"
            raise FrtcError("checkpoint.config", what, rows)
