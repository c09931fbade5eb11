"""What the compiler asks of a model: records that name its stages, how they compose, and what its files prove.

A model is a set of *stages*, each an `nn.Module` that is traced on its own, and a *schedule* that says in which order
they run. Stages talk through named values: a stage reads its inputs by name and writes its outputs by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from frtc.models.checkpoint import Checkpoint
    from frtc.models.evidence import Fact


@dataclass(frozen=True, slots=True)
class Stage:
    """One program to trace.

    module     holds this stage's parameters; on the meta device when made by `Model.stages`
    scope      prefix that turns the module's parameter names into the model's ("denoise": `denoise.` + name)
    args       example inputs of `module.forward`, possibly nested
    inputs     one name per leaf of `args`, in the order of torch.utils._pytree (as torch.export flattens them)
    outputs    one name per leaf of what forward returns
    """

    name: str
    module: nn.Module
    scope: str
    args: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Run a stage once."""

    stage: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """Run a stage once per row of its tables. Outputs that bear an input's name feed the next round.

    carry      carried input -> value it has in the first round
    tables     input -> its value in each round (all tables have `count` rows)
    """

    stage: str
    count: int
    carry: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One inference.

    inputs     values that come from outside (every other value is written by an earlier step)
    steps      in order
    outputs    name outside -> value
    """

    inputs: tuple[str, ...]
    steps: tuple[Run | Repeat, ...]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Model:
    """A row of the model table.

    claims     do these tensor names belong to this kind? Names decide, never paths
    config     (checkpoint, choices) -> configuration and the facts behind it; choices: the user's options by field name
    tiny       a configuration with the same structure that a CPU runs in a second
    build      (config, dtype of the layers) -> the whole model; every stage's module is a part of it
    stages     (config, dtype, velocity) -> the stages on the meta device; with `velocity` the denoise stage also
               returns the velocity that the accuracy rule compares
    schedule   config -> how the stages compose
    weights    (checkpoint, config) -> model parameter name -> name of the tensor in the checkpoint; strict both ways
    """

    name: str
    title: str
    claims: Callable[[Collection[str]], bool]
    config: Callable[[Checkpoint, Mapping[str, Any]], tuple[Any, tuple[Fact, ...]]]
    tiny: Callable[[], Any]
    build: Callable[[Any, torch.dtype], nn.Module]
    stages: Callable[[Any, torch.dtype, bool], dict[str, Stage]]
    schedule: Callable[[Any], Schedule]
    weights: Callable[[Checkpoint, Any], dict[str, str]]
