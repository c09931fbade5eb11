"""Random architectures of the Pi family: no size is special, few are multiples of 8."""

from __future__ import annotations

import numpy as np
import torch

from frtc.models.gemma import GemmaConfig
from frtc.models.pi import Pi, PiConfig
from frtc.models.siglip import HEAD_DIM, SiglipConfig
from tests.models.truth import KINDS

SEED = 5
OUTLIERS, LOUD = 0.01, 30.0  # 1 % of the columns of each matrix times 30: what real checkpoints look like


def draw(kind: str, number: int) -> PiConfig:
    """Architecture `number` of the sequence, but for the state the same for all kinds.

    Even numbers have widths that are multiples of 8, odd ones mostly not.
    """
    rng = np.random.default_rng([SEED, number])

    def some(low: int, high: int, step: int = 1) -> int:
        return step * int(rng.integers(low, high + 1))

    grain = 8 if number % 2 == 0 else 2  # rotation and the time embedding pair elements: no odd widths there
    layers, kv_heads, head_dim = some(1, 2), some(1, 2), some(1, 5, 8)  # kernels need head sizes in steps of 8
    patch = (7, 14)[some(0, 1)]

    def stack() -> GemmaConfig:
        mlp = some(2, 12, 8) if grain == 8 else some(9, 99)
        width = some(24 // grain, 96 // grain, grain)
        return GemmaConfig(width, layers, kv_heads * some(1, 3), kv_heads, head_dim, mlp)

    return PiConfig(
        vision=SiglipConfig(HEAD_DIM * some(1, 2), some(1, 2), some(20, 120), patch * some(1, 4), patch),
        prefix=stack(),
        expert=stack(),
        vocab=some(20, 90),
        action_width=some(1, 5, 8) if grain == 8 else some(3, 40),
        views=some(1, 3),
        prompt=some(4, 40),
        horizon=some(1, 12),
        steps=some(1, 6),
        origin=("openpi", "lerobot-0.6")[some(0, 1)],
        state_width=some(3, 40) if kind == "pi0" else 0,
    )


def random_model(kind: str, config: PiConfig, number: int) -> Pi:
    """Fan-in scaled weights with some loud columns, in float32."""
    torch.manual_seed(number)
    model: Pi = KINDS[kind].MODEL.build(config, torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.normal_(0.0, 0.2)
                continue
            parameter.normal_(0.0, parameter[0].numel() ** -0.5)
            loud = torch.rand(parameter.shape[-1]) < OUTLIERS
            parameter[..., loud] *= LOUD
    return model


def random_inputs(config: PiConfig, number: int) -> dict[str, np.ndarray]:
    """One observation as the device gets it."""
    rng = np.random.default_rng([SEED, number, 1])
    frames = (config.views, config.vision.image, config.vision.image, 3)
    pixels = config.pixels is torch.uint8
    return {
        "images": rng.integers(0, 256, frames, np.uint8) if pixels else rng.uniform(-1, 1, frames).astype(np.float32),
        "tokens": rng.integers(0, config.vocab, config.prompt).astype(np.int32),
        "n": np.array(rng.integers(1, config.prompt + 1), np.int32),
        "noise": rng.standard_normal((config.horizon, config.action_width)).astype(np.float32),
        **({"state": rng.standard_normal(config.state_width).astype(np.float32)} if config.state_width else {}),
    }
