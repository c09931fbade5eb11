"""lerobot's own policies, made small: what a family of them needs, seeded weights, statistics, saving and loading."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import PolicyProcessorPipeline

SEED = 20252
TOP, WRIST = "observation.images.top", "observation.images.left_wrist"
STATE_DIM, ACTION_DIM = 8, 7
ACTION_NAMES = [f"joint_{n}.pos" for n in range(6)] + ["gripper.pos"]
RELATIVE = {"use_relative_actions": True, "action_feature_names": ACTION_NAMES}
EMPTY_CAMERA = {"empty_cameras": 1}

Arrays = dict[str, np.ndarray]
Statistics = dict[str, dict[str, torch.Tensor]]
Pipelines = tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]
Scale = tuple[str, bool, float, float]  # part of the parameter's name, deviation over sqrt(fan in)?, deviation, mean


@dataclass(frozen=True, slots=True)
class Case:
    """One raw observation; `state` is given in normalised units."""

    name: str
    task: str
    state: tuple[float, ...]
    cameras: tuple[str, ...] = (TOP, WRIST)


@dataclass(frozen=True, slots=True)
class Family:
    """One policy class of lerobot.

    settings   fields of its configuration, beside the features
    serving    changes to them that give lerobot's own bf16 serving
    sides      other configurations that use the same weights: folder, changes
    cameras    height, width of what each camera sends
    scales     of the seeded weights; the first row that matches counts
    tokenizer  writes tokenizer.json, answers with the number of pieces
    small      given tokenizer.json: the context within which lerobot builds the small model and asks no hub
    dead       parts of the names of tensors that no action depends on
    """

    name: str
    config: type[PreTrainedConfig]
    policy: type[PreTrainedPolicy]
    processors: Callable[[PreTrainedConfig, Statistics], Pipelines]
    settings: Mapping[str, object]
    cameras: Mapping[str, tuple[int, int]]
    cases: tuple[Case, ...]
    scales: tuple[Scale, ...]
    tokenizer: Callable[[Path], int]
    small: Callable[[Path], AbstractContextManager[None]]
    dead: tuple[str, ...]
    serving: Mapping[str, object] = field(default_factory=dict)
    sides: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def configure(self, **changes: object) -> PreTrainedConfig:
        """The policy's configuration; `changes` override single fields."""
        inputs = {name: PolicyFeature(FeatureType.VISUAL, (3, *size)) for name, size in self.cameras.items()}
        inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE_DIM,))
        fields: dict[str, object] = {
            "input_features": inputs,
            "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
            "chunk_size": 10,
            "n_action_steps": 10,
            "device": "cpu",
        }
        return self.config(**(fields | dict(self.settings) | changes))


def normal(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1) from a stream of its own: keyed by the name, so that no other draw moves it."""
    key = int.from_bytes(hashlib.sha256(f"{SEED}:{name}".encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)


def seeded(family: Family, name: str, like: torch.Tensor) -> torch.Tensor:
    shape = tuple(like.shape)
    by_fan, scale, mean = next((by, scale, mean) for part, by, scale, mean in family.scales if part in name)
    deviation = scale / math.sqrt(math.prod(shape[1:])) if by_fan else scale
    return torch.from_numpy(mean + np.float32(deviation) * normal(name, shape)).to(like.dtype)


def statistics(family: Family) -> Statistics:
    """Statistics such as a lerobot data set has them; a policy reads mean and std, or q01 and q99."""
    result = {}
    for name, shape in {
        "observation.state": (STATE_DIM,),
        "action": (ACTION_DIM,),
        **{c: (3, 1, 1) for c in family.cameras},
    }.items():
        mean, deviation = 0.5 * normal(f"{name}.mean", shape), 0.2 + np.abs(normal(f"{name}.std", shape))
        spread = {"min": -3.0, "q01": -2.25, "q10": -1.25, "q50": 0.125, "q90": 1.375, "q99": 2.5, "max": 3.25}
        arrays = {"mean": mean, "std": deviation, **{key: mean + times * deviation for key, times in spread.items()}}
        result[name] = {key: torch.from_numpy(np.asarray(value, np.float32)) for key, value in arrays.items()}
    return result


def picture(name: str, height: int, width: int) -> np.ndarray:
    """uint8 [height, width, 3]: slow waves, hard edges and noise, so that each resize rule gives other pixels."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 9.0 + c) + np.cos(y / (6.0 + c)) for c in range(3)], axis=-1)
    edges = ((x // 7 + y // 11) % 2)[..., None] * np.array([0.9, -0.6, 0.4])
    noise = 0.3 * normal(f"picture.{name}", (height, width, 3))
    return np.clip(np.rint(127.5 + 45 * (waves + edges + noise)), 0, 255).astype(np.uint8)


def observe(family: Family, case: Case) -> Arrays:
    """The raw observation as the robot sends it: pictures, state in robot units, and the noise to start from."""
    stats = {name: tensor.numpy() for name, tensor in statistics(family)["observation.state"].items()}
    state = np.asarray(case.state, np.float32)
    if family.configure().normalization_mapping["STATE"] is NormalizationMode.MEAN_STD:
        state = state * stats["std"] + stats["mean"]
    else:
        state = (state + 1) / 2 * (stats["q99"] - stats["q01"]) + stats["q01"]
    pictures = {name: picture(f"{case.name}.{name}", *family.cameras[name]) for name in case.cameras}
    noise = normal(f"{case.name}.noise", (10, 32))
    return {**pictures, "observation.state": state.astype(np.float32), "noise": noise}


def save_pipelines(family: Family, config: PreTrainedConfig, folder: Path) -> None:
    """Pre- and post-processor by lerobot's own factory and its own saving."""
    for pipeline in family.processors(config, statistics(family)):
        pipeline.save_pretrained(folder)


def save_side(family: Family, folder: Path, **changes: object) -> None:
    """Another configuration of the same policy: its config.json and pipelines, without weights."""
    changed = family.configure(**changes)
    changed.validate_features()
    changed.save_pretrained(folder)
    save_pipelines(family, changed, folder)


def save_policy(family: Family, folder: Path) -> None:
    """A new policy with seeded weights, saved by lerobot, read back and compared: its loading swallows errors."""
    policy = family.policy(family.configure())
    weights = {name: seeded(family, name, value) for name, value in policy.state_dict().items()}
    policy.load_state_dict(weights, strict=True)
    policy.save_pretrained(folder)
    save_pipelines(family, policy.config, folder)
    again = load_policy(family, folder).state_dict()
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name].float()) for name in weights), "not the policy that was saved"


def load_policy(family: Family, folder: Path, **changes: object) -> PreTrainedPolicy:
    """In float32, whatever the file holds."""
    config = family.configure(**changes)
    return family.policy.from_pretrained(folder, config=config, strict=True).float().eval()


def load_serving(family: Family, folder: Path) -> PreTrainedPolicy:
    """In the types that lerobot itself serves in."""
    config = family.configure(**family.serving)
    return family.policy.from_pretrained(folder, config=config, strict=True).eval()


def load_pipelines(family: Family, folder: Path) -> Pipelines:
    """The saved pipelines, tied together by lerobot's own factory."""
    return make_pre_post_processors(family.configure(), str(folder))
