"""How synthetic checkpoints of SmolVLA look: dead tensors, config.json as lerobot 0.6 writes it, tokenizer."""

from __future__ import annotations

from typing import Any

from frtc.models.smolvla_config import LM_HEAD, PREFIX, WEIGHTS, SmolVlaConfig, full, tiny
from frtc.models.stages import Synthetic
from frtc.models.synthetic_files import tokenizer
from frtc.models.weights import Shape

PAD = "<|im_end|>"


def unread(c: SmolVlaConfig, layout: str) -> dict[str, Shape]:
    """Tensors of real files that no output depends on."""
    return {f"{PREFIX}.norm.weight": (c.prefix.width,), LM_HEAD: (c.vocab, c.prefix.width)}


def side_config(c: SmolVlaConfig, layout: str, dtype: str) -> dict[str, Any]:
    return {
        "chunk_size": c.horizon,
        "n_action_steps": c.horizon,
        "max_state_dim": c.state_width,
        "max_action_dim": c.action_width,
        "resize_imgs_with_padding": [c.vision.image, c.vision.image],
        "empty_cameras": 0,
        "adapt_to_pi_aloha": False,
        "use_delta_joint_actions_aloha": False,
        "tokenizer_max_length": c.prompt,
        "num_steps": c.steps,
        "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        "load_vlm_weights": dtype == "bfloat16",  # lerobot then holds the layers in bfloat16
        "add_image_special_tokens": False,
        "attention_mode": "cross_attn",
        "prefix_length": -1,
        "pad_language_to": "longest",
        "num_expert_layers": -1,
        "num_vlm_layers": c.prefix.layers,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": c.expert.width / c.prefix.width,
        "min_period": c.min_period,
        "max_period": c.max_period,
        "rtc_config": None,
    }


def without_bos() -> dict[str, Any]:
    """The common tokenizer, but a text begins with its own first piece, and the padding has the name it has here."""
    common = tokenizer()
    fresh = {"<pad>": PAD}
    vocabulary = {fresh.get(piece, piece): number for piece, number in common["model"]["vocab"].items()}
    added = [entry | {"content": fresh.get(entry["content"], entry["content"])} for entry in common["added_tokens"]]
    model = common["model"] | {"vocab": vocabulary}
    return common | {"added_tokens": added, "post_processor": None, "model": model}


SYNTHETIC = Synthetic(
    sizes={"tiny": tiny, "full": full},
    layouts=("lerobot",),
    weights=WEIGHTS,
    unread=unread,
    config=side_config,
    pipeline=(
        "rename_observations_processor",
        "to_batch_processor",
        "smolvla_new_line_processor",
        "tokenizer_processor",
        "device_processor",
        "normalizer_processor",
    ),
    norm={"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    scales=(
        ("tower.position", False, 0.5, 0.0),
        ("norm1.weight", False, 0.2, 1.0),
        ("norm2.weight", False, 0.2, 1.0),
        ("norm.weight", False, 0.2, 1.0),
        # sharper scores, or louder branches in a residual stream this narrow, and one rounding of bfloat16 flips a row
        ("attn.q.weight", True, 1.0, 0.0),
        ("attn.o.weight", True, 0.3, 0.0),
        ("mlp.down.weight", True, 0.3, 0.0),
    ),
    writers=("mlp_out.weight", "state_in.weight"),
    tokenizer=without_bos,
)
