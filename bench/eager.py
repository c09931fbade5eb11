"""A model's own modules in PyTorch, composed as its schedule says: the reference (float32) and the serving precision.

    eager = Eager(load_models()["pi05"], config, torch.float32, open_checkpoint(folder), "cuda")
    actions = eager.run(inputs)                  # inputs by name, as the Plan takes them

Knows no model: stages, their order and what a loop carries come from the model's records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from frtc.models.checkpoint import Checkpoint
from frtc.models.stages import Model, Repeat, Run, Stage
from frtc.models.weights import load

Array = np.ndarray[Any, Any]
Values = Mapping[str, Tensor]


class Eager:
    """One loop that carries one value: the flow-matching policies' shape.

    carried    the value that the loop carries, and `start` the input it begins as
    output     name outside of the carried value
    """

    def __init__(self, model: Model, config: Any, dtype: torch.dtype, checkpoint: Checkpoint, device: str) -> None:
        self.device = torch.device(device)
        self.stages = model.stages(config, dtype, False)
        weights = model.weights(checkpoint, config)
        for stage in self.stages.values():
            assert not list(stage.module.buffers()), f"stage {stage.name} has buffers, which no checkpoint fills"
            stage.module.to_empty(device=self.device).eval()
            prefix = f"{stage.scope}." if stage.scope else ""
            names = {name: weights[prefix + name] for name, _ in stage.module.named_parameters()}
            load(stage.module, checkpoint, names)
        steps = model.schedule(config).steps
        assert isinstance(steps[-1], Repeat), "the loop comes last"
        self.before = [step for step in steps[:-1] if isinstance(step, Run)]
        self.loop = steps[-1]
        assert len(self.before) == len(steps) - 1, "one loop"
        ((self.carried, self.start),) = self.loop.carry.items()
        ((self.output, _),) = model.schedule(config).outputs.items()
        tables = self.loop.tables.items()
        self.tables = {name: torch.tensor(values, device=self.device) for name, values in tables}

    def on_device(self, inputs: Mapping[str, Array | Tensor]) -> dict[str, Tensor]:
        return {name: torch.as_tensor(value).to(self.device) for name, value in inputs.items()}

    @torch.no_grad()
    def prepare(self, inputs: Mapping[str, Array | Tensor]) -> dict[str, Tensor]:
        """Everything that the stages before the loop compute, beside the inputs."""
        values = self.on_device(inputs)
        for step in self.before:
            values |= self.call(self.stages[step.stage], values)
        return values

    @torch.no_grad()
    def step(self, prepared: Values, x: Tensor, k: int) -> Tensor:
        """Round k of the loop, from x."""
        row = {name: table[k] for name, table in self.tables.items()}
        return self.call(self.stages[self.loop.stage], {**prepared, **row, self.carried: x})[self.carried]

    def trajectory(self, inputs: Mapping[str, Array | Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """What `prepare` gives, and the carried value before the first round and after each."""
        prepared = self.prepare(inputs)
        xs = [prepared[self.start]]
        for k in range(self.loop.count):
            xs.append(self.step(prepared, xs[-1], k))
        return prepared, xs

    def run(self, inputs: Mapping[str, Array | Tensor]) -> Tensor:
        return self.trajectory(inputs)[1][-1]

    def compile_layers(self, backend: str = "inductor") -> None:
        """Every element of a list of layers through torch.compile: equal layers share one compilation."""
        lists = (m for stage in self.stages.values() for m in stage.module.modules() if isinstance(m, nn.ModuleList))
        for layer in {layer: None for layers in lists for layer in layers}:
            layer.compile(dynamic=False, backend=backend)

    def call(self, stage: Stage, values: Values) -> dict[str, Tensor]:
        """A stage on named values: its outputs by name."""
        _, spec = pytree.tree_flatten(stage.args)
        outputs = stage.module(*pytree.tree_unflatten([values[name] for name in stage.inputs], spec))
        return dict(zip(stage.outputs, pytree.tree_leaves(outputs), strict=True))
