"""Models with foreign answers, as IR: traced, optimised, and run step by step from where the reference stood.

    subject = golden("pi05", "f32")                   # or fixture(..): raw module, inputs, the reference's answers
    answer = ask(subject, optimised(subject.module))  # velocity of each step, actions, everything in the environment

`ask` takes a runner, so that the same comparison serves the interpreter and whatever else can run a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from frtc.codegen.fusible import implements
from frtc.compiler import TRACED, CompileOptions, Opened, import_module, open_model, sizes_of
from frtc.kernels.targets import load_targets
from frtc.lowering.interpret import evaluate_weights, run, run_module
from frtc.lowering.ir import Module, Node, Repeat
from frtc.models.gemma import KV
from frtc.models.pi import Prefix
from frtc.models.stages import Run, Schedule, Stage
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.standard import pipeline
from frtc.policy_options import PolicyOptions
from frtc.runtime.policy_steps import PolicySteps
from frtc.trace import trace
from tests.models import truth

Array = np.ndarray[Any, Any]
Lookup = Callable[[str], Array]
VERIFY = Options(check=1)


@dataclass(frozen=True, slots=True)
class Subject:
    """A traced model, one observation for it and the reference's answers.

    module     raw; its denoise program returns the velocity v_t beside x_t
    tensors    value of a parameter
    inputs     what an inference needs, by name
    x, velocity   per step: where the reference stood and what it answered, f32 [steps, H, A]
    """

    module: Module
    tensors: Lookup
    inputs: Mapping[str, Array]
    x: Array
    velocity: Array

    @property
    def actions(self) -> Array:
        """Where the reference's last step leads."""
        end: Array = self.x[-1] - self.velocity[-1] / np.float32(len(self.x))
        return end


@dataclass(frozen=True, slots=True)
class Answer:
    """velocity: f32 [steps, H, A], each from the reference's x; env: everything the schedule leaves, by name."""

    velocity: Array
    env: Mapping[str, Array]

    @property
    def actions(self) -> Array:
        return self.env["actions"]


class Running(Protocol):
    """A module ready to run on one observation."""

    def inference(self) -> Mapping[str, Array]: ...
    def velocity(self, step: int, x: Array) -> Array: ...


Runner = Callable[[Module, Lookup, Mapping[str, Array], str], Running]  # module, tensors, inputs, mode


class Interpreted:
    """The interpreter as a runner. `velocity` runs the loop's program alone; the inference has made its inputs."""

    def __init__(self, module: Module, tensors: Lookup, inputs: Mapping[str, Array], mode: str) -> None:
        self.module, self.inputs, self.mode = module, inputs, mode
        self.weights = evaluate_weights(module, tensors, mode)
        self.env: dict[str, Array] = {}

    def inference(self) -> Mapping[str, Array]:
        self.env = run_module(self.module, self.inputs, self.weights.__getitem__, self.mode)
        return self.env

    def velocity(self, step: int, x: Array) -> Array:
        loop = loop_of(self.module)
        graph = self.module.graph(loop.body[-1].program)  # type: ignore[union-attr]
        env = {**self.env, loop.index: np.array(step, np.int32), "x_t": x}
        return run(graph, env, self.weights.__getitem__, self.mode)["v_t"]


def loop_of(module: Module) -> Repeat:
    return next(step for step in module.schedule if isinstance(step, Repeat))


def ask(subject: Subject, module: Module, mode: str = "typed", runner: Runner = Interpreted) -> Answer:
    """Run `module`, which is the subject's after some passes: one inference, and each step from the reference's x."""
    running = runner(module, subject.tensors, subject.inputs, mode)
    env = running.inference()
    steps = range(min(loop_of(module).count, len(subject.x)))
    return Answer(np.stack([running.velocity(k, subject.x[k]) for k in steps]), env)


def optimised(module: Module, target: str = "", options: Options = VERIFY) -> Module:
    """The module after all passes, for a target, or for a GPU whose kernels could run everything."""
    accepts = implements(load_targets()[target], load_targets()[target].families()) if target else everything
    return run_passes(module, pipeline(accepts), options)[0]


def everything(node: Node) -> bool:
    return True


# --- subjects -----------------------------------------------------------------------------------------------------


class FromEmbeddings(nn.Module):
    """The prefix stage, entered below the vision tower and the embedding table."""

    def __init__(self, prefix: Prefix) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, image_tokens: Tensor, prompt: Tensor, n: Tensor) -> KV:
        return self.prefix.from_embeddings(image_tokens, prompt, n)


@cache
def subject(name: str, precision: str) -> Subject:
    """By name: "pi05.golden", "pi0.golden", "pi05.pick", ..."""
    kind, case = name.split(".")
    return golden(kind, precision) if case == "golden" else fixture(kind, case, precision)


def golden(kind: str, precision: str) -> Subject:
    """openpi's tiny model: two views, 12 of 32 prompt positions valid."""
    case, model = golden_case(kind), truth.KINDS[kind].MODEL
    config, dtype = case.model.config, TRACED[precision]
    stages = model.stages(config, dtype, True)
    prefix = stages["prefix"]
    image_tokens, prompt, n = (t.to("meta") for t in (case.image_tokens, case.prompt, case.n))
    args = (image_tokens.to(dtype), prompt.to(dtype), n)
    names = ("image_tokens", "prompt", "n")
    entered = Stage("prefix", FromEmbeddings(prefix.module).eval(), "", args, names, prefix.outputs)
    loop = model.schedule(config).steps[-1]
    inputs = {"image_tokens": case.image_tokens, "prompt": case.prompt, "n": case.n, "noise": case.x[0]}
    inputs |= {} if case.state is None else {"state": case.state}
    schedule = Schedule(tuple(inputs), (Run("prefix"), loop), {"actions": "x_t"})
    checkpoint = truth.golden_file(kind)
    keys = {truth.KINDS[kind].WEIGHTS.parameter(key): key for key in checkpoint.tensors}
    module = trace(kind, {"prefix": entered, "denoise": stages["denoise"]}, schedule)
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    return Subject(module, lambda name: checkpoint.read(keys[name]), arrays, case.x.numpy(), case.velocity.numpy())


@cache
def golden_case(kind: str) -> truth.Case:
    return truth.golden(kind)


@cache
def fixture_case(kind: str, name: str) -> truth.Case:
    return truth.lerobot(name, kind)


@cache
def fixture(kind: str, name: str, precision: str) -> Subject:
    """A case of a lerobot fixture, from its raw observation: our policy steps make the inputs."""
    opened, module = imported(kind, tuple(truth.cases(kind)[name]["cameras"]), precision)
    expected = truth.arrays(truth.fixture_folder(kind) / "expected.safetensors")
    prepared = policy_steps(opened, module).prepare(observation(kind, name))
    inputs = {k: np.array(v) for k, v in prepared.inputs.items() if k in module.inputs}
    x, velocity = (expected[f"{name}.{key}"] for key in ("x", "velocity"))
    return Subject(module, opened.read, inputs, x, velocity)


def observation(kind: str, name: str) -> dict[str, Any]:
    """What the robot hands over: camera frames, state, task; and the noise that the reference drew."""
    raw, about = truth.arrays(truth.fixture_folder(kind) / "observations.safetensors"), truth.cases(kind)[name]
    frames = {camera.rpartition(".")[2]: raw[f"{name}.{camera}"] for camera in about["cameras"]}
    state = raw[f"{name}.observation.state"]
    return {**frames, "state": state, "prompt": about["task"], "noise": raw[f"{name}.noise"]}


def policy_steps(opened: Opened, module: Module) -> PolicySteps:
    return PolicySteps(opened.files.policy(sizes_of(module)), opened.files.tokenizer)


@cache
def imported(kind: str, cameras: tuple[str, ...], precision: str) -> tuple[Opened, Module]:
    """A fixture's checkpoint as the compile driver imports it, with the velocity as a further result."""
    chosen = PolicyOptions(camera=tuple((camera.rpartition(".")[2], camera) for camera in cameras))
    opened = open_model(truth.fixture_folder(kind) / "checkpoint", CompileOptions(policy=chosen))
    return opened, import_module(opened, precision, velocity=True)
