"""Foreign reference data and how we compare with it: the golden tensors and the lerobot fixture."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from frtc.models import pi0, pi05
from frtc.models.checkpoint import Checkpoint, open_checkpoint, read_header
from frtc.models.gemma import KV, GemmaConfig
from frtc.models.pi import Pi
from frtc.models.weights import as_torch, load

TESTS = Path(__file__).parents[1]
KINDS = {"pi05": pi05, "pi0": pi0}
FIXTURE = TESTS / "fixtures" / "pi05_lerobot"


@dataclass(frozen=True, slots=True)
class Case:
    """One observation with the reference's answers.

    model        our module with the reference's weights, float32
    image_tokens, prompt   what enters the prefix: [P_img, W], and rows of the embedding table [L, W]
    x, velocity  per step: where the reference stood and what it answered, [steps, H, A]
    frames, ids  what made image_tokens and prompt, where the reference starts there: [V, edge, edge, 3], i32 [L]
    state        f32 [S], where it enters as numbers
    """

    model: Pi
    image_tokens: Tensor
    prompt: Tensor
    n: Tensor
    x: Tensor
    velocity: Tensor
    frames: Tensor | None = None
    ids: Tensor | None = None
    state: Tensor | None = None

    def context(self, kv: KV) -> tuple[object, ...]:
        """What each step sees beside x_t and t."""
        return (self.n, kv) if self.state is None else (self.n, self.state, kv)

    @property
    def actions(self) -> Tensor:
        """Where the reference's last step leads."""
        return self.x[-1] - self.velocity[-1] / len(self.x)


def relative_error(y: Tensor, reference: Tensor) -> float:
    return float(torch.linalg.vector_norm(y - reference) / torch.linalg.vector_norm(reference))


def step_errors(case: Case) -> list[float]:
    """Error of the velocity of each step, from the reference's own x_t."""
    with torch.no_grad():
        seen = case.context(case.model.prefix.from_embeddings(case.image_tokens, case.prompt, case.n))
        steps = zip(case.model.config.times, case.x, case.velocity, strict=False)
        return [relative_error(case.model.denoise.velocity(x, torch.tensor(t), *seen), v) for t, x, v in steps]


def end_to_end_error(case: Case) -> float:
    """Error of `actions - noise` over the whole Euler loop."""
    with torch.no_grad():
        kv = case.model.prefix.from_embeddings(case.image_tokens, case.prompt, case.n)
        actions, _ = case.model.sample(case.x[0], *case.context(kv))
        return relative_error(actions - case.x[0], case.actions - case.x[0])


def golden_file(kind: str) -> Checkpoint:
    """Random weights of openpi's own model, its inputs and answers."""
    path = TESTS / "golden" / f"{kind}_tiny.safetensors"
    return Checkpoint(path, (path,), read_header(path))


def golden(kind: str) -> Case:
    """Enters below the vision tower: two views (the third is masked there), 12 of 32 prompt positions valid."""
    stack = GemmaConfig(width=64, layers=4, heads=8, kv_heads=1, head_dim=16, mlp=128)
    config = replace(KINDS[kind].tiny(), prefix=stack, expert=stack, views=2, prompt=32)
    checkpoint = golden_file(kind)
    data = {name: as_torch(checkpoint.read(name)) for name in checkpoint.tensors}
    model = KINDS[kind].MODEL.build(config, torch.float32).eval()
    mapped = {KINDS[kind].WEIGHTS.parameter(name): value for name, value in data.items()}
    mapped.pop(None)
    assert all(name.startswith(("vision.", "prefix.embed.")) for name in model.state_dict().keys() - mapped.keys())
    model.load_state_dict(mapped, strict=False)
    velocity, x = data["out.velocity_per_step"], [data["in.noise"]]
    for v in velocity[:-1]:
        x.append(x[-1] - v / 10)
    return Case(
        model=model,
        image_tokens=data["in.image_embeddings"][:2].flatten(0, 1),
        prompt=data["in.prompt_embeddings_unscaled"],
        n=data["in.prompt_mask"].sum().to(torch.int32),
        x=torch.stack(x),
        velocity=velocity,
        state=data.get("in.state") if config.state_width else None,
    )


def arrays(path: Path) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint(path, (path,), read_header(path))
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


CASES = {"pick": ("top", "left_wrist"), "edge": ("top", "left_wrist"), "wrist_only": ("left_wrist",)}  # of pi05


def fixture_folder(kind: str) -> Path:
    """Checkpoint, observations and answers of lerobot's own small policy of a kind."""
    return TESTS / "fixtures" / f"{kind}_lerobot"


def cases(kind: str) -> dict[str, dict[str, Any]]:
    """What fixture.json says of each case: task, cameras, what bfloat16 costs lerobot. Empty without a fixture."""
    about = fixture_folder(kind) / "fixture.json"
    found: dict[str, dict[str, Any]] = json.loads(about.read_text())["cases"] if about.is_file() else {}
    return found


def lerobot(name: str, kind: str = "pi05") -> Case:
    """One case of a lerobot fixture, from raw camera frames; the prompt's ids are the reference's."""
    folder = fixture_folder(kind)
    raw, expected = arrays(folder / "observations.safetensors"), arrays(folder / "expected.safetensors")
    cameras = cases(kind)[name]["cameras"]
    checkpoint = open_checkpoint(folder / "checkpoint")
    config, _ = KINDS[kind].config(checkpoint, {"views": len(cameras)})
    model = KINDS[kind].MODEL.build(config, torch.float32).eval()
    load(model, checkpoint, KINDS[kind].weights(checkpoint, config))
    ids = torch.zeros(config.prompt, dtype=torch.int32)
    tokens = torch.from_numpy(expected[f"{name}.tokens"].copy())
    ids[: len(tokens)] = tokens
    frames = torch.stack([resized(raw[f"{name}.{camera}"], config.vision.image) for camera in cameras])
    with torch.no_grad():
        image_tokens, prompt = model.vision(frames), model.prefix.embed(ids)
    x, velocity = (torch.from_numpy(expected[f"{name}.{key}"].copy()) for key in ("x", "velocity"))
    n = torch.tensor(len(tokens), dtype=torch.int32)
    state = normalised(folder, raw[f"{name}.observation.state"], config.state_width) if config.state_width else None
    return Case(model, image_tokens, prompt, n, x, velocity, frames, ids, state)


def normalised(folder: Path, state: np.ndarray, width: int) -> Tensor:
    """(state - mean) / (std + 1e-8), as lerobot's processor does it, and zeros up to the model's width."""
    (stats,) = (folder / "checkpoint").glob("policy_preprocessor_step_*_normalizer_processor.safetensors")
    mean, std = (arrays(stats)[f"observation.state.{key}"] for key in ("mean", "std"))
    return F.pad(torch.from_numpy((state - mean) / (std + np.float32(1e-8))), (0, width - len(state)))


def resized(frame: np.ndarray, edge: int) -> Tensor:
    """lerobot 0.6: bilinear without antialias in floats, aspect kept, black borders; f32 [edge, edge, 3] in [0, 1]."""
    image = torch.from_numpy(frame.copy()).permute(2, 0, 1)[None] / 255.0
    ratio = max(image.shape[2] / edge, image.shape[3] / edge)
    height, width = int(image.shape[2] / ratio), int(image.shape[3] / ratio)
    image = F.interpolate(image, (height, width), mode="bilinear", align_corners=False)
    top, left = (edge - height) // 2, (edge - width) // 2
    image = F.pad(image, (left, edge - width - left, top, edge - height - top))
    return image[0].permute(1, 2, 0)
