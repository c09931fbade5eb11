"""What lies beside a synthetic checkpoint's weights, as each origin writes it: configuration, statistics, tokenizer.

The robot has two arms with 14 joint values in and out, and three cameras.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import numpy as np

from frtc.models.stages import Synthetic
from frtc.models.streaming import header

Array = np.ndarray[Any, np.dtype[Any]]

JOINTS = 14
CAMERAS = ("top", "left_wrist", "right_wrist")
FRAME = (3, 480, 640)  # channels, height, width
SPREAD = {"min": -3.0, "q01": -2.25, "q10": -1.25, "q50": 0.125, "q90": 1.375, "q99": 2.5, "max": 3.25}  # in deviations
NORMALIZER, TO_RELATIVE = "normalizer_processor", "relative_actions_processor"
POSTPROCESSOR_STATS = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


def side_files(kind: str, spec: Synthetic, c: Any, layout: str, dtype: str, seed: int) -> dict[str, bytes]:
    """Path in the folder -> contents. dtype: "bfloat16" or "float32"."""
    files = {"tokenizer.json": _json((spec.tokenizer or tokenizer)())}
    config = spec.config(c, layout, dtype)
    if layout != "lerobot":
        wanted = ("mean", "std", "q01", "q99")
        stats = {
            key: {stat: values.tolist() for stat, values in statistics(seed, key).items() if stat in wanted}
            for key in ("state", "actions")
        }
        files |= {"assets/synthetic/norm_stats.json": _json({"norm_stats": stats})}
        return files | ({"config.json": _json(config)} if config else {})
    named = (("action", "actions"), ("observation.state", "state"))
    stats_file = _safetensors(
        {f"{name}.{stat}": values for name, key in named for stat, values in statistics(seed, key).items()}
    )
    return files | {
        "config.json": _json(lerobot_config(kind, config, spec)),
        "policy_preprocessor.json": _json(preprocessor(config, spec)),
        "policy_postprocessor.json": _json(postprocessor(spec)),
        preprocessor_stats(spec): stats_file,
        POSTPROCESSOR_STATS: stats_file,
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _safetensors(arrays: dict[str, Array]) -> bytes:
    head, _, _ = header({name: ("f32", a.shape) for name, a in arrays.items()}, {})
    return head + b"".join(arrays[name].tobytes() for name in sorted(arrays))


def statistics(seed: int, key: str) -> dict[str, Array]:
    """f32 [14] each: mean, deviation and order statistics of the state or the actions."""
    digest = hashlib.sha256(f"{seed}:statistics:{key}".encode()).digest()
    raw = np.frombuffer(digest[: 2 * JOINTS], np.uint8).astype(np.float32) / np.float32(256)
    mean, std = raw[:JOINTS] / 4 - np.float32(0.125), raw[JOINTS:] / 2 + np.float32(0.4)
    return {"mean": mean, "std": std} | {stat: mean + np.float32(times) * std for stat, times in SPREAD.items()}


def features() -> dict[str, Any]:
    cameras = {f"observation.images.{name}": {"type": "VISUAL", "shape": list(FRAME)} for name in CAMERAS}
    return cameras | {"observation.state": {"type": "STATE", "shape": [JOINTS]}}


ACTION = {"action": {"type": "ACTION", "shape": [JOINTS]}}
RELATIVE = {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}


def lerobot_config(kind: str, own: dict[str, Any], spec: Synthetic) -> dict[str, Any]:
    """The fields of lerobot 0.6's config.json that bear on inference: those of every policy around the model's own."""
    first = {
        "type": kind,
        "n_obs_steps": 1,
        "input_features": features(),
        "output_features": ACTION,
        "device": "cpu",
    }
    return first | own | {"normalization_mapping": dict(spec.norm)}


def preprocessor(own: dict[str, Any], spec: Synthetic) -> dict[str, Any]:
    """The steps that the model names; what is configured nowhere has an empty configuration."""
    configs: dict[str, dict[str, Any]] = {
        "rename_observations_processor": {"rename_map": {}},
        TO_RELATIVE: RELATIVE,
        NORMALIZER: {"eps": 1e-08, "features": features() | ACTION, "norm_map": dict(spec.norm)},
        "tokenizer_processor": {
            "max_length": own["tokenizer_max_length"],
            "task_key": "task",
            "padding_side": "right",
            "padding": own.get("pad_language_to", "max_length"),
            "truncation": True,
            "tokenizer_name": own.get("vlm_model_name", "google/paligemma-3b-pt-224"),
        },
        "device_processor": {"device": "cpu", "float_dtype": None},
    }
    steps: list[dict[str, Any]] = [{"registry_name": name, "config": configs.get(name, {})} for name in spec.pipeline]
    steps[spec.pipeline.index(NORMALIZER)]["state_file"] = preprocessor_stats(spec)
    return {"name": "policy_preprocessor", "steps": steps}


def preprocessor_stats(spec: Synthetic) -> str:
    """lerobot numbers the file by its step."""
    return f"policy_preprocessor_step_{spec.pipeline.index(NORMALIZER)}_{NORMALIZER}.safetensors"


def postprocessor(spec: Synthetic) -> dict[str, Any]:
    """Robot units, absolute actions where the preprocessor can make relative ones, then off the device."""
    unnormalizer = {"eps": 1e-08, "features": ACTION, "norm_map": dict(spec.norm)}
    absolute = {"registry_name": "absolute_actions_processor", "config": {"enabled": False}}
    steps = [
        {"registry_name": "unnormalizer_processor", "config": unnormalizer, "state_file": POSTPROCESSOR_STATS},
        *([absolute] if TO_RELATIVE in spec.pipeline else []),
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    return {"name": "policy_postprocessor", "steps": steps}


SPACE = "\u2581"  # what a space becomes, as in SentencePiece
SENTENCES = """
Task: State: Action: pick up the red, blue, green cup, block, bowl and place it in, into, on, to; open the top drawer,
close it; fold the towel; pour the water; put left, right arm; move the gripper; hand over; transfer the cube; push the
button; table; plate; then; inside
"""
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")  # ids 0 to 3
BOS, TEXT = {"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
AROUND = {  # one BOS, no EOS
    "type": "TemplateProcessing",
    "single": [BOS, TEXT],
    "pair": [BOS, TEXT, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
}
BACK = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]


def tokenizer() -> dict[str, Any]:
    """tokenizer.json of a small byte-fallback BPE with Gemma's habits.

    Spaces become U+2581; digits and marks are pieces of their own; characters without a piece fall back to bytes. A
    word is built from its beginning, with and without a space before it.
    """
    letters = ["\n", SPACE, *map(chr, range(33, 127))]
    merges = [(SPACE, SPACE), (SPACE * 2, SPACE)]
    for word in re.findall(r"\w+", SENTENCES):
        for spelled in (SPACE + word, word):
            merges += [(spelled[:i], spelled[i]) for i in range(1, len(spelled))]
    merges = list(dict.fromkeys(merges))
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *("".join(m) for m in merges)]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
        "merges": [list(m) for m in merges],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": piece, **plain, "special": True} for i, piece in enumerate(SPECIAL)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": AROUND,
        "decoder": {"type": "Sequence", "decoders": BACK},
        "model": model,
    }
