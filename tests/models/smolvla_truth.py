"""SmolVLA's foreign reference data, lerobot's own small policy, and how we compare with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from frtc.models import smolvla
from frtc.models.checkpoint import open_checkpoint
from frtc.models.llama import KV
from frtc.models.weights import load
from tests.models.truth import arrays, cases, fixture_folder, normalised, relative_error

FOLDER = fixture_folder("smolvla")
CASES: dict[str, dict[str, Any]] = cases("smolvla")


@dataclass(frozen=True, slots=True)
class Case:
    """One observation with lerobot's answers.

    model        our module with the reference's weights, float32
    frames       f32 [V, edge, edge, 3]; tokens i32 [L], n of them valid; state f32 [S]
    x, velocity  per step: where the reference stood and what it answered, [steps, H, A]
    """

    model: smolvla.SmolVla
    frames: Tensor
    tokens: Tensor
    n: Tensor
    state: Tensor
    x: Tensor
    velocity: Tensor

    @property
    def actions(self) -> Tensor:
        """Where the reference's last step leads."""
        return self.x[-1] - self.velocity[-1] / len(self.x)

    def kv(self, model: smolvla.SmolVla | None = None) -> list[KV]:
        model = model or self.model
        kv: list[KV] = model.prefix(model.vision(self.frames), self.tokens, self.n, self.state)
        return kv


def lerobot(name: str) -> Case:
    """One case of the fixture, from raw camera frames; the prompt's ids are the reference's."""
    raw, expected = arrays(FOLDER / "observations.safetensors"), arrays(FOLDER / "expected.safetensors")
    cameras = CASES[name]["cameras"]
    checkpoint = open_checkpoint(FOLDER / "checkpoint")
    config, _ = smolvla.config(checkpoint, {"views": len(cameras)})
    model = smolvla.SmolVla(config, torch.float32).eval()
    load(model, checkpoint, smolvla.weights(checkpoint, config))
    tokens = torch.from_numpy(expected[f"{name}.tokens"].copy())
    x, velocity = (torch.from_numpy(expected[f"{name}.{key}"].copy()) for key in ("x", "velocity"))
    return Case(
        model=model,
        frames=torch.stack([resized(raw[f"{name}.{camera}"], config.vision.image) for camera in cameras]),
        tokens=F.pad(tokens, (0, config.prompt - len(tokens))),
        n=torch.tensor(len(tokens), dtype=torch.int32),
        state=normalised(FOLDER, raw[f"{name}.observation.state"], config.state_width),
        x=x,
        velocity=velocity,
    )


def resized(frame: np.ndarray, edge: int) -> Tensor:
    """Bilinear in floats, aspect kept, black above or on the left; f32 [edge, edge, 3] in [0, 1]."""
    image = torch.from_numpy(frame.copy()).permute(2, 0, 1)[None] / 255.0
    ratio = max(image.shape[2] / edge, image.shape[3] / edge)
    height, width = int(image.shape[2] / ratio), int(image.shape[3] / ratio)
    image = F.interpolate(image, (height, width), mode="bilinear", align_corners=False)
    return F.pad(image, (edge - width, 0, edge - height, 0))[0].permute(1, 2, 0)


def step_errors(case: Case, model: smolvla.SmolVla | None = None) -> list[float]:
    """Error of the velocity of each step, from the reference's own x_t."""
    model = model or case.model
    with torch.no_grad():
        kv = case.kv(model)
        steps = zip(model.config.times, case.x, case.velocity, strict=False)
        return [relative_error(model.denoise.velocity(x, torch.tensor(t), case.n, kv), v) for t, x, v in steps]


def end_to_end_error(case: Case) -> float:
    """Error of `actions - noise` over the whole Euler loop."""
    with torch.no_grad():
        kv, x = case.kv(), case.x[0]
        for t in case.model.config.times:
            x, _ = case.model.denoise(x, torch.tensor(t), case.n, kv)
        return relative_error(x - case.x[0], case.actions - case.x[0])
