"""The bench's reference, the model's own modules composed by its records, is what the traced model means."""

from __future__ import annotations

import numpy as np
import torch

from bench.full_model import Shape, checkpoint, eager, model_of, observation, options
from frtc.compiler import import_module, open_model
from frtc.lowering.interpret import run_module
from frtc.runtime.plan import Slot
from frtc.selftest import relative_error
from frtc.verify import Reference

SHAPE = {"prompt": 20, "horizon": 10, "size": "tiny"}


def test_stages_in_pytorch_are_the_traced_model(policy: str) -> None:
    shape = Shape(policy, **SHAPE)
    opened = open_model(checkpoint(policy, "tiny"), options(shape))
    module = import_module(opened, "f32")
    slots = [Slot(name, t.dtype, t.shape) for name, t in module.inputs.items()]
    inputs = observation(slots, 9, opened.config.vocab)
    weights = Reference(opened, options(shape), module).weights(module, "wide")
    (outside,) = model_of(policy).schedule(opened.config).outputs
    expected = run_module(module, inputs, weights, "wide")[outside]
    found = eager(shape, torch.float32, "cpu").run(inputs).numpy()
    noise = inputs["noise"]
    assert relative_error(found - noise, expected - noise) <= 2e-5
    assert not np.array_equal(found, noise)


def test_layers_compile_whole(policy: str) -> None:
    """No graph break in any layer; what they compute stays the same."""
    shape = Shape(policy, **SHAPE)
    opened = open_model(checkpoint(policy, "tiny"), options(shape))
    slots = [Slot(name, t.dtype, t.shape) for name, t in import_module(opened, "f32").inputs.items()]
    inputs = observation(slots, 9, opened.config.vocab)
    model = eager(shape, torch.float32, "cpu")
    before = model.run(inputs)
    torch._dynamo.reset()
    model.compile_layers("eager")
    assert torch.equal(model.run(inputs), before)
    assert not torch._dynamo.utils.counters["graph_break"]
