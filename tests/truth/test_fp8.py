"""FP8 programs of the policies, with outlier channels in their weights: how far the Plan's velocities are from the
model in float32, beside those of the same program in PyTorch; which products multiply in FP8, and what it costs.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bench import full_model
from bench.full_model import ARCH, ROWS, STATIC, Shape, checkpoint, model_of, observation, options
from bench.gpu_model import FP8_ABSOLUTE, FP8_NODES, FP8_RATIO, FP8_SHARE, Reference, infer, references
from bench.scaled_mm import Rounds
from bench.sites import optimised as full_size
from frtc.calibrate import counted_of
from frtc.codegen.build import Built
from frtc.compiler import Opened, Optimised, import_module, open_model, optimise, sizes_of, target_named
from frtc.errors import FrtcError
from frtc.lowering.ir import Module
from frtc.passes.limit_rows import limit_rows
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.precision import shares_of
from frtc.passes.sites import sites_of
from frtc.passes.standard import FRONT
from frtc.precision import parameters
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan import Slot, unrolled
from frtc.scales import Scales, Site
from frtc.scales_key import key_of
from frtc.torch_run import TorchRun
from tests.codegen.test_moves import only_moves
from tests.truth.emulated import InMemory, built_for, weights_of

KINDS = ("pi05", "pi0", "smolvla")
SAMPLES, VALID, OTHERS = 8, 12, (5, 7, 9)  # observations of a calibration; tokens of those that errors are taken of
ROUNDS = (0, 5, 9)
NODES = {STATIC: FP8_NODES, ROWS: 1600}  # a scale for each row: a launch more where blocks share rows
# SmolVLA's pictures meet their first product as bf16, its projector reads rows of four, the keys of its cross-attention
# are products of what another program left.
CROSS = tuple(f"denoise.layers.{layer}.attn.{name}.weight" for layer in (1, 3) for name in "kv")
SIXTEEN_BITS = {
    ("smolvla", STATIC): {"vision.tower.patch.weight", *CROSS},
    ("smolvla", ROWS): {"vision.tower.patch.weight", "vision.projector.weight", *CROSS},
}
NO_CHECKS = Options(check=0)


@dataclass(frozen=True, slots=True)
class Policy:
    """A tiny policy: its checkpoint, the traced module and the reference's answers."""

    shape: Shape
    opened: Opened
    module: Module
    reference: Reference
    others: tuple[Reference, ...]

    def scales(self) -> Scales:
        """Of a calibration with synthetic observations."""
        front, _ = run_passes(self.module, FRONT, NO_CHECKS)
        slots = [Slot(name, type.dtype, type.shape) for name, type in self.module.inputs.items()]
        inputs = [observation(slots, 1 + i, self.opened.config.vocab, 100 + i) for i in range(SAMPLES)]
        counted = counted_of(TorchRun(limit_rows(front), self.opened.read), inputs, SAMPLES)
        key = key_of(self.opened, front, self.opened.policy(sizes_of(self.module)))
        return Scales.made(key, Site.all_of(sites_of(front)), counted, SAMPLES, {})

    def optimised(
        self, precision: str, scales: Scales | None, strict: bool = False, family: str | None = None
    ) -> Optimised:
        """By the compile driver, but for tracing once more."""
        wanted = options(replace(self.shape, precision=precision))
        wanted = replace(wanted, policy=replace(wanted.policy, strict=strict), family=family or wanted.family)
        with mock.patch("frtc.compiler.import_module", lambda *args, **kwargs: self.module):
            return optimise(self.opened, target_named(ARCH), wanted, NO_CHECKS, scales=scales)


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fp8")
    with mock.patch.object(full_model, "SCRATCH", folder):
        yield folder


@cache
def policy_of(kind: str) -> Policy:
    shape = Shape(kind, prompt=VALID, horizon=10, size="tiny")
    opened = open_model(checkpoint(kind, "tiny"), options(shape))
    reference, *others = references(shape, (VALID, *OTHERS), "cpu")
    return Policy(shape, opened, import_module(opened), reference, tuple(others))


@pytest.fixture(scope="module", params=["pi05", pytest.param("pi0", marks=pytest.mark.full), "smolvla"])
def policy(request: pytest.FixtureRequest, scratch: Path) -> Policy:
    return policy_of(request.param)


@pytest.mark.parametrize("precision", [STATIC, ROWS])
def test_velocities_are_those_of_scaled_mm(policy: Policy, precision: str) -> None:
    scales = policy.scales() if precision == STATIC else None
    made = policy.optimised(precision, scales)
    stays = {note.site for note in made.precision.notes if note.kind != "fp8"}
    assert stays == SIXTEEN_BITS.get((policy.shape.policy, precision), set())
    tensors = parameters(policy.opened.read, scales)
    built = built_for(made.module, ARCH)
    moves = [call for name, calls in built.emitted.items() for call in calls if only_moves(call) and "let." not in name]
    assert not moves
    with Emulator(InMemory(built.program, weights_of(built, tensors)), poison=True) as emulator:  # type: ignore[arg-type]
        found = errors_of(emulator, policy.reference)
    same = Rounds(made.module, tensors, "cpu")
    assert 2 * max(policy.reference.errors) < max(found) <= FP8_RATIO * max(same.errors(policy.reference, ROUNDS))
    worst = worst_step(same, policy)
    assert worst <= FP8_ABSOLUTE
    if defers(made.module):
        normed = policy.optimised(precision, scales, family="baseline").module  # products read what norms have made
        assert not defers(normed)
        assert worst <= FP8_RATIO * worst_step(Rounds(normed, tensors, "cpu"), policy)


def defers(module: Module) -> bool:
    return any(node.op == "linear_moments" for graph in module.graphs for node in graph.nodes)


def worst_step(rounds: Rounds, policy: Policy) -> float:
    """Root mean square over some observations: one alone differs by half from the next, whatever runs the program."""
    errors = np.array([rounds.errors(r) for r in (policy.reference, *policy.others)])
    return float(np.sqrt((errors**2).mean(0)).max())


def errors_of(emulator: Emulator, reference: Reference) -> list[float]:
    """Of the velocities of ROUNDS, each from the reference's x, behind a whole inference."""
    infer(emulator, reference.inputs)
    errors = []
    for k in ROUNDS:
        emulator.set(reference.start, reference.xs[k])
        emulator.run_stage(f"let.{reference.carried}")
        emulator.run_stage(reference.stage, k)
        errors.append(reference.error(k, emulator.get(reference.output)))
    return errors


BAD = "vision.tower.layers.1.fc2.weight"


@pytest.fixture(scope="module")
def spoiled(scratch: Path) -> Policy:
    """Pi0.5 with one loud row in fc1, where a tenth of the patches passes the activation, and its column in fc2 quiet.

    The model answers as before; what fc2 reads has few values that are millions of times the others.
    """
    sound = policy_of("pi05")
    path = checkpoint("pi05", "tiny") / "model.safetensors"
    tensors = load_file(path)
    keys = {
        name: sound.opened.keys[BAD.replace("fc2.weight", name)] for name in ("fc1.weight", "fc1.bias", "fc2.weight")
    }
    row = int(tensors[keys["fc1.weight"]].float().norm(dim=1).argmax())
    tensors[keys["fc1.weight"]][row] *= 1e7
    tensors[keys["fc1.bias"]][row] = -2e7
    tensors[keys["fc2.weight"]][:, row] *= 1e-7
    folder = scratch / "spoiled"
    shutil.copytree(path.parent, folder)
    save_file(tensors, folder / path.name, metadata_of(path))
    return replace(sound, opened=open_model(folder, options(sound.shape)))


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def test_one_bad_site_falls_back_and_no_other(spoiled: Policy) -> None:
    scales = spoiled.scales()
    (site,) = scales.fallen()
    assert site == BAD
    made = spoiled.optimised(STATIC, scales).precision
    assert {n.site: n.reason for n in made.notes if n.kind != "fp8"} == {site: scales.fallen()[site]}
    assert f"{site}  SQNR" in str(made) and made.to_json()["sites"][site]["kind"] == "bf16"


def test_strict_refuses_a_site_that_falls_back(spoiled: Policy) -> None:
    with pytest.raises(FrtcError) as refused:
        spoiled.optimised(STATIC, spoiled.scales(), strict=True)
    assert refused.value.code == "precision.fallen" and BAD in str(refused.value)


# --- what full size costs: of few layers, traced without weights --------------------------------------------------

LAYERS = {"pi05": 4, "pi0": 4, "smolvla": 8}  # first, last, and at least two between


@pytest.mark.parametrize("kind", ["pi05", *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:])])
@pytest.mark.parametrize("precision", [STATIC, pytest.param(ROWS, marks=pytest.mark.full)])
def test_full_sizes(kind: str, precision: str) -> None:
    """What belongs to no layer weighs less the more layers there are: a few show less of FP8 than all do."""
    module = full_size(Shape(kind, precision=precision), ARCH, LAYERS[kind])
    flops = Counter[str]()
    for share in shares_of(module):
        flops.update(share.flops)
    assert flops["fp8"] >= FP8_SHARE * flops.total()
    nodes = nodes_of_all_layers(kind, built_for(module, ARCH))
    assert nodes <= NODES[precision], nodes


def nodes_of_all_layers(kind: str, built: Built) -> float:
    """Launches of an inference, layers that are not there like the mean of the second and third."""
    synthetic = model_of(kind).synthetic
    assert synthetic is not None
    config = synthetic.sizes["full"]()
    runs, nodes = Counter(stage for stage, _ in unrolled(built.program.schedule)), 0.0
    for stage in built.program.stages:
        launches = Counter[str]()
        for call in stage.calls:
            found = re.search(r"layers\.(\d+)\b", call.name)
            launches[found[1] if found else ""] += len(call.launches)
        depth = config.vision.layers if stage.name == "vision" else config.expert.layers
        more = (depth - LAYERS[kind]) * (launches["1"] + launches["2"]) / 2
        nodes += runs[stage.name] * (launches.total() + more)
    return nodes
