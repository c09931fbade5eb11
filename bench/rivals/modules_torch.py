"""A policy's own modules in the serving precision, each kind of layer through Inductor: a baseline for any policy."""

from __future__ import annotations

import torch

from bench.full_model import Shape, eager, inputs_of, observation


class Modules:
    """`run` is one inference on inputs that stay on the device, to `out`."""

    def __init__(self, shape: Shape, device: str) -> None:
        slots, vocab = inputs_of(shape)
        self.eager = eager(shape, torch.bfloat16, device)
        self.inputs = self.eager.on_device(observation(slots, shape.prompt, vocab))
        self.out = torch.empty_like(self.inputs[self.eager.start])

    def compile(self, backend: str = "inductor") -> None:
        self.eager.compile_layers(backend)

    def run(self) -> None:
        self.out.copy_(self.eager.run(self.inputs))
