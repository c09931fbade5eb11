"""Random architectures of the SmolVLA family: as the eager model, at the same launches per layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frtc.models import smolvla
from frtc.models.llama import LlamaConfig
from frtc.models.siglip import SiglipConfig
from frtc.models.smolvla_config import SmolVlaConfig, alternating
from frtc.passes.check import relative_error
from frtc.trace import trace
from tests.truth.architectures import SEED
from tests.truth.emulated import Emulated
from tests.truth.test_architectures import PLAN_BAR, STAGE_BAR, launches
from tests.truth.test_smolvla import expected_calls
from tests.truth.traced import Array, Subject, ask, optimised

FEW, MANY = range(4), range(4, 40)
BY_LAYER = ("linear", "gated_linear", "rms_norm", "layer_norm", "attention", "rope_qkv", "rope")


def draw(number: int) -> SmolVlaConfig:
    """Architecture `number` of the sequence. Even numbers have widths that are multiples of 8, odd ones mostly not."""
    rng = np.random.default_rng([SEED, number, 2])

    def some(low: int, high: int, step: int = 1) -> int:
        return step * int(rng.integers(low, high + 1))

    grain = 8 if number % 2 == 0 else 2  # rotation and the time embedding pair elements: no odd widths there
    layers, kv_heads, group, head_dim = some(2, 4), some(1, 3), some(1, 3), some(1, 5, 8)
    patch, side = (8, 16)[some(0, 1)], 2 ** some(1, 2)

    def stack() -> LlamaConfig:
        mlp = some(2, 12, 8) if grain == 8 else some(9, 99)
        width = some(24 // grain, 96 // grain, grain)
        return LlamaConfig(width, layers, kv_heads * group, kv_heads, head_dim, mlp)

    return SmolVlaConfig(
        vision=SiglipConfig(24 * some(1, 3), some(1, 2), some(20, 120), patch * side, patch, head_dim=24),
        shuffle=2 ** some(0, 1),
        prefix=stack(),
        expert=stack(),
        cross=alternating(layers, some(-1, 3)),
        vocab=some(20, 90),
        state_width=some(1, 5, 8) if grain == 8 else some(3, 40),
        action_width=some(1, 5, 8) if grain == 8 else some(3, 40),
        views=some(1, 3),
        prompt=some(4, 40),
        horizon=some(1, 12),
        steps=some(1, 6),
    )


def subject_of(number: int, dtype: torch.dtype = torch.float32) -> tuple[Subject, dict[str, Array]]:
    """The traced architecture with random weights and inputs, and every named result as the eager model has it."""
    c, rng = draw(number), np.random.default_rng([SEED, number, 3])
    torch.manual_seed(number)
    model = smolvla.SmolVla(c, torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2 if parameter.dim() < 2 else parameter[0].numel() ** -0.5)
    inputs = {
        "images": rng.uniform(-1, 1, (c.views, c.vision.image, c.vision.image, 3)).astype(np.float32),
        "state": rng.standard_normal(c.state_width).astype(np.float32),
        "tokens": rng.integers(0, c.vocab, c.prompt).astype(np.int32),
        "n": np.array(rng.integers(1, c.prompt + 1), np.int32),
        "noise": rng.standard_normal((c.horizon, c.action_width)).astype(np.float32),
    }
    images, state, tokens, n, x = (torch.from_numpy(value) for value in inputs.values())
    with torch.no_grad():
        image_tokens = model.vision(images)
        kv = model.prefix(image_tokens, tokens, n, state)
        xs, velocities = [x], []
        for time in c.times:
            x, v = model.denoise(xs[-1], torch.tensor(time), n, kv)
            xs, velocities = [*xs, x], [*velocities, v]
    results = {"image_tokens": image_tokens, "actions": xs[-1]}
    results |= {f"{kind}.{i}": part for i, pair in enumerate(kv) for kind, part in zip("kv", pair, strict=True)}
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    module = trace("smolvla", smolvla.stages(c, dtype, True), smolvla.schedule(c))
    subject = Subject(
        module, weights.__getitem__, inputs, torch.stack(xs[:-1]).numpy(), torch.stack(velocities).numpy()
    )
    return subject, {name: value.numpy() for name, value in results.items()}


def check(number: int) -> None:
    """Every stage within the bar, and what each layer costs."""
    one, expected = subject_of(number)
    module = optimised(one.module, "hopper")
    found = ask(one, module, "wide")
    valid = 1 + len(expected["image_tokens"]) + int(one.inputs["n"])  # no query reads what stands behind it
    for name, value in expected.items():
        rows = np.s_[:, :valid] if name.startswith(("k.", "v.")) else np.s_[:]
        assert relative_error(found.env[name][rows], value[rows]) <= STAGE_BAR, name
    for k, (v, w) in enumerate(zip(found.velocity, one.velocity, strict=True)):
        assert relative_error(v, w) <= STAGE_BAR, f"velocity of step {k}"
    counted, expected_ops = launches(module), expected_calls(draw(number), fused=False)
    for stage in ("vision", "prefix", "denoise.once", "denoise"):
        for op in BY_LAYER:
            assert counted[stage][op] == expected_ops[stage][op], f"{op} in {stage}"


def check_plan(number: int) -> None:
    """The same module in bf16, as typed, through codegen: nothing but the order of additions may differ."""
    one, _ = subject_of(number, torch.bfloat16)
    module = optimised(one.module, "hopper")
    typed, found = ask(one, module), ask(one, module, "typed", Emulated)
    assert relative_error(found.actions, typed.actions) <= PLAN_BAR
    for k, (v, w) in enumerate(zip(found.velocity, typed.velocity, strict=True)):
        assert relative_error(v, w) <= PLAN_BAR, f"velocity of step {k}"


@pytest.mark.parametrize("number", FEW)
def test_architecture(number: int) -> None:
    check(number)


@pytest.mark.parametrize("number", FEW[:2])
def test_emulated_plan(number: int) -> None:
    check_plan(number)


@pytest.mark.full
@pytest.mark.parametrize("number", MANY)
def test_many_architectures(number: int) -> None:
    check(number)
    check_plan(number)
