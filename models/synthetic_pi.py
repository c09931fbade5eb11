"""How synthetic checkpoints of Pi0 and Pi0.5 look: dead tensors, config.json as openpi and lerobot 0.6 write it."""

from __future__ import annotations

from typing import Any

from frtc.models.pi import EXPERT_HEAD, LM_HEAD, PREFIX, PiConfig
from frtc.models.stages import Synthetic
from frtc.models.weights import Shape, WeightMap


def synthetic(weights: WeightMap, pipeline: tuple[str, ...], norm: str, **own: Any) -> Synthetic:
    """norm: lerobot's kind of statistics for state and actions; own: further fields."""
    return Synthetic(
        layouts=("openpi", "lerobot", "jax"),
        weights=weights,
        unread=unread,
        config=side_config,
        pipeline=pipeline,
        norm={"VISUAL": "IDENTITY", "STATE": norm, "ACTION": norm},
        **own,
    )


def unread(c: PiConfig, layout: str) -> dict[str, Shape]:
    """Tensors of real files that no output depends on; lerobot keeps both copies of the embedding table."""
    dead: dict[str, Shape] = {f"{PREFIX}.norm.weight": (c.prefix.width,), EXPERT_HEAD: (c.vocab, c.expert.width)}
    return dead | ({LM_HEAD: (c.vocab, c.prefix.width)} if layout == "lerobot" else {})


def side_config(c: PiConfig, layout: str, dtype: str) -> dict[str, Any]:
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
        "max_state_dim": c.state_width or 32,
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
