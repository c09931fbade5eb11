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
    from frtc.models.weights import Shape, WeightMap


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
class Synthetic:
    """What checkpoints with random weights of this kind look like; models/synthetic.py writes them.

    sizes      name -> configuration, "tiny" and "full" at least
    layouts    which of "openpi", "lerobot" and "jax" real files of this kind come in
    weights    the map that names the file's tensors
    unread     (configuration, layout) -> what a real file holds and nothing reads: canonical name -> shape
    config     (configuration, layout, "bfloat16" or "float32") -> config.json; of lerobot's only the model's own part
    pipeline   lerobot's preprocessor: registered names of its steps, in order
    norm       lerobot's normalization_mapping
    scales     rows before the common ones: (part of the parameter's name, divide the deviation by sqrt(fan-in)?,
               deviation, mean); numbers in names are `#`
    writers    endings of parameters that write to a residual stream, beside the common ones
    tables     embedding tables, by parameter: their channels are columns
    tokenizer  contents of tokenizer.json, None: the common one
    """

    sizes: Mapping[str, Callable[[], Any]]
    layouts: tuple[str, ...]
    weights: WeightMap
    unread: Callable[[Any, str], Mapping[str, Shape]]
    config: Callable[[Any, str, str], dict[str, Any]]
    pipeline: tuple[str, ...]
    norm: Mapping[str, str]
    scales: tuple[tuple[str, bool, float, float], ...] = ()
    writers: tuple[str, ...] = ()
    tables: tuple[str, ...] = ("prefix.embed.weight",)
    tokenizer: Callable[[], dict[str, Any]] | None = None


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
    synthetic  how to write a checkpoint of this kind with random weights, None: nobody can
    canonical  a tensor's name as some writer spells it -> as the weight map does
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
    synthetic: Synthetic | None = None
    canonical: Callable[[str], str] = str
