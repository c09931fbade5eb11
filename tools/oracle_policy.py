"""lerobot's own Pi0.5 policy, made small: sizes, seeded weights, statistics, saving and loading.

lerobot 0.6.1 reads the Gemma sizes from `get_gemma_config` and hard-codes those of the vision tower and of the
vocabulary in constructors; `small_sizes` replaces them while policies are built. All else of lerobot runs unmodified.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import lerobot.policies.pi05.modeling_pi05 as modeling
import lerobot.processor.tokenizer_processor as tokenizing
import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from lerobot.processor import PolicyProcessorPipeline
from transformers import PretrainedConfig
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

SEED = 20252
VISION = {
    "hidden_size": 144,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "patch_size": 14,
}
GEMMA = {  # variant: width, depth, mlp_dim, num_heads, num_kv_heads, head_dim
    "gemma_2b": modeling.GemmaConfig(64, 3, 96, 4, 1, 16),
    "gemma_300m": modeling.GemmaConfig(48, 3, 80, 4, 1, 16),
}
IMAGE_SIZE = 112
CAMERAS = {"observation.images.top": (120, 160), "observation.images.left_wrist": (96, 60)}  # height, width in pixels
STATE_DIM, ACTION_DIM = 8, 7
ACTION_NAMES = [f"joint_{n}.pos" for n in range(6)] + ["gripper.pos"]
TOKENIZER_NAME = "google/paligemma-3b-pt-224"  # lerobot asks for it by this name; a local file answers

Statistics = dict[str, dict[str, torch.Tensor]]
Pipelines = tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]


def config(**changes: object) -> PI05Config:
    """The policy's configuration; `changes` override single fields."""
    inputs = {name: PolicyFeature(FeatureType.VISUAL, (3, *size)) for name, size in CAMERAS.items()}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE_DIM,))
    fields: dict[str, object] = {
        "input_features": inputs,
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        "chunk_size": 10,
        "n_action_steps": 10,
        "image_resolution": (IMAGE_SIZE, IMAGE_SIZE),
        "tokenizer_max_length": 72,
        "device": "cpu",
    }
    return PI05Config(**(fields | changes))


@contextlib.contextmanager
def small_sizes(vocabulary: int) -> Iterator[None]:
    """Within this context lerobot builds the small model."""
    paligemma, expert = modeling.PaliGemmaForConditionalGenerationWithPiGemma, modeling.PiGemmaForCausalLM

    def small_paligemma(config: PretrainedConfig) -> torch.nn.Module:
        config._vocab_size = config.image_token_index = config.text_config.vocab_size = vocabulary
        for name, value in (VISION | {"projection_dim": config.text_config.hidden_size}).items():
            setattr(config.vision_config, name, value)
        return paligemma(config)

    def small_expert(config: PretrainedConfig) -> torch.nn.Module:
        config.vocab_size = vocabulary
        return expert(config)

    with (
        mock.patch.object(modeling, "get_gemma_config", GEMMA.__getitem__),
        mock.patch.object(modeling, "PaliGemmaForConditionalGenerationWithPiGemma", small_paligemma),
        mock.patch.object(modeling, "PiGemmaForCausalLM", small_expert),
    ):
        yield


def normal(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1) from a stream of its own: keyed by the name, so that no other draw moves it."""
    key = int.from_bytes(hashlib.sha256(f"{SEED}:{name}".encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)


# (part of the parameter's name, divide the deviation by sqrt(fan in)?, deviation, mean); the first match counts.
# Residual streams start small (0.05 to 0.2), so that the eps of every norm shows in the result; queries and keys are
# large enough that attention is far from uniform; gates are of the order of one, so that no branch is lost.
SCALES: list[tuple[str, bool, float, float]] = [
    ("position_embedding.weight", False, 0.02, 0.0),
    ("patch_embedding.weight", True, 0.05, 0.0),
    ("patch_embedding.bias", False, 0.02, 0.0),
    ("layer_norm1.weight", False, 0.2, 1.0),
    ("layer_norm2.weight", False, 0.2, 1.0),
    ("post_layernorm.weight", False, 0.2, 1.0),
    ("multi_modal_projector.linear.weight", True, 0.2, 0.0),
    ("multi_modal_projector.linear.bias", False, 0.05, 0.0),
    ("embed_tokens.weight", False, 0.012, 0.0),
    ("lm_head.weight", False, 0.02, 0.0),
    ("dense.weight", True, 0.5, 0.0),
    ("dense.bias", False, 0.3, 0.0),
    ("input_layernorm.weight", False, 0.3, 0.0),
    ("post_attention_layernorm.weight", False, 0.3, 0.0),
    ("language_model.norm.weight", False, 0.3, 0.0),
    ("q_proj.weight", True, 0.9, 0.0),
    ("k_proj.weight", True, 0.9, 0.0),
    ("action_in_proj.weight", True, 0.05, 0.0),
    ("action_in_proj.bias", False, 0.02, 0.0),
    ("time_mlp", True, 1.2, 0.0),
    (".weight", True, 1.0, 0.0),
    (".bias", False, 0.1, 0.0),
]


def seeded(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    fan_in = math.prod(shape[1:])
    by_fan, scale, mean = next((by, scale, mean) for part, by, scale, mean in SCALES if part in name)
    deviation = scale / math.sqrt(fan_in) if by_fan else scale
    return torch.from_numpy(mean + np.float32(deviation) * normal(name, shape))


def statistics() -> Statistics:
    """Statistics such as a lerobot data set has them; Pi0.5 reads q01 and q99 of state and action."""
    result = {}
    for name, shape in {
        "observation.state": (STATE_DIM,),
        "action": (ACTION_DIM,),
        **{c: (3, 1, 1) for c in CAMERAS},
    }.items():
        mean, deviation = 0.5 * normal(f"{name}.mean", shape), 0.2 + np.abs(normal(f"{name}.std", shape))
        spread = {"min": -3.0, "q01": -2.25, "q10": -1.25, "q50": 0.125, "q90": 1.375, "q99": 2.5, "max": 3.25}
        arrays = {"mean": mean, "std": deviation, **{key: mean + times * deviation for key, times in spread.items()}}
        result[name] = {key: torch.from_numpy(np.asarray(value, np.float32)) for key, value in arrays.items()}
    return result


@contextlib.contextmanager
def local_tokenizer(path: Path) -> Iterator[None]:
    """Within this context the hub's name of PaliGemma's tokenizer means the file at `path`."""

    def load(name: str) -> GemmaTokenizer:
        assert name == TOKENIZER_NAME, name
        return GemmaTokenizer.from_pretrained(
            path.parent, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
        )

    with mock.patch.object(tokenizing.AutoTokenizer, "from_pretrained", load):
        yield


def save_pipelines(config: PI05Config, folder: Path) -> None:
    """Pre- and post-processor by lerobot's own factory and its own saving."""
    for pipeline in make_pi05_pre_post_processors(config, statistics()):
        pipeline.save_pretrained(folder)


def save_side(folder: Path, **changes: object) -> None:
    """Another configuration of the same policy: its config.json and pipelines, without weights."""
    changed = config(**changes)
    changed.validate_features()
    changed.save_pretrained(folder)
    save_pipelines(changed, folder)


def save_policy(folder: Path, vocabulary: int) -> None:
    """A new policy with seeded weights, saved by lerobot, read back and compared: its loading swallows errors."""
    policy = modeling.PI05Policy(config())
    weights = {name: seeded(name, tuple(value.shape)) for name, value in policy.state_dict().items()}
    policy.load_state_dict(weights, strict=True)
    policy.save_pretrained(folder)
    save_pipelines(policy.config, folder)
    again = load_policy(folder).state_dict()
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights), "the reloaded policy is not the saved one"


def load_policy(folder: Path, **changes: object) -> modeling.PI05Policy:
    policy = modeling.PI05Policy.from_pretrained(folder, config=config(**changes), strict=True)
    return policy.eval()


def load_pipelines(folder: Path) -> Pipelines:
    """The saved pipelines, tied together by lerobot's own factory."""
    return make_pre_post_processors(config(), str(folder))
