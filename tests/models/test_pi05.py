"""Pi0.5 against foreign data: the golden tensors (they enter below the vision tower) and lerobot's own outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils import _pytree

from frtc.models import pi, pi05
from frtc.models.stages import Repeat, Schedule, Stage
from tests.models import truth
from tests.models.mutants import MUTANTS
from tests.models.truth import CASES, FIXTURE, Case, arrays, end_to_end_error, relative_error, step_errors

STEP_BAR, LOOP_BAR = 1e-5, 1e-4  # relative, float32 (docs/design.md, section 9)
NAMES = ("golden", *CASES)


@cache
def case(name: str) -> Case:
    return truth.golden("pi05") if name == "golden" else truth.lerobot(name)


@pytest.mark.parametrize("name", NAMES)
def test_velocity_of_every_step(name: str) -> None:
    errors = step_errors(case(name))
    assert len(errors) == 10
    assert max(errors) <= STEP_BAR


@pytest.mark.parametrize("name", NAMES)
def test_whole_loop(name: str) -> None:
    assert end_to_end_error(case(name)) <= LOOP_BAR


def test_prefix_stage() -> None:
    """Image tokens, keys and values of every layer, as lerobot computes them; valid positions only."""
    pick, expected = case("pick"), arrays(FIXTURE / "expected.safetensors")
    valid = pick.image_tokens.shape[0] + int(pick.n)
    reference = {name: torch.from_numpy(expected[f"pick.{name}"].copy()) for name in ("prefix", "keys", "values")}
    assert relative_error(pick.image_tokens, reference["prefix"][: pick.image_tokens.shape[0]]) <= STEP_BAR
    with torch.no_grad():
        kv = pick.model.prefix.from_embeddings(pick.image_tokens, pick.prompt, pick.n)
    for layer, (k, v) in enumerate(kv):
        assert relative_error(k[0, :valid], reference["keys"][layer]) <= STEP_BAR
        assert relative_error(v[0, :valid], reference["values"][layer]) <= STEP_BAR


@pytest.mark.parametrize("mutant", MUTANTS["pi05"])
def test_mutant_fails(mutant: str) -> None:
    """The bars above see each of the classic mistakes, on the golden data and on the fixture."""
    for name in ("golden", "pick"):
        with MUTANTS["pi05"][mutant]():
            assert max(step_errors(case(name))) > 2 * STEP_BAR or end_to_end_error(case(name)) > 2 * LOOP_BAR, name
        assert max(step_errors(case(name))) <= STEP_BAR, "the mutant outlived its context"


@pytest.mark.parametrize("name", CASES)
def test_serving_precision(name: str) -> None:
    """bfloat16 with float32 islands: within 2e-2, and no worse than 1.5 times lerobot's own bfloat16 policy."""
    lerobots = json.loads((FIXTURE / "fixture.json").read_text())["cases"][name]["bf16_error"]
    wide, config = case(name), case(name).model.config
    served = pi05.Pi05(config, torch.bfloat16).eval()
    served.load_state_dict(wide.model.state_dict())
    with torch.no_grad():
        kv = served.prefix(served.vision(wide.frames), wide.ids, wide.n)
        steps = zip(config.times, wide.x, strict=True)
        velocities = [served.denoise.velocity(x, torch.tensor(t), wide.n, kv) for t, x in steps]
    errors = [relative_error(v, reference) for v, reference in zip(velocities, wide.velocity, strict=True)]
    assert max(errors) <= 2e-2
    assert max(errors) <= 1.5 * max(lerobots)
    assert min(errors) > 1e-4, "this ran in float32"


def test_lerobots_clock() -> None:
    expected = arrays(FIXTURE / "expected.safetensors")["pick.time"]
    assert case("pick").model.config.times == tuple(float(t) for t in expected)


def test_openpis_clock_accumulates_in_float32() -> None:
    t, times = torch.tensor(1.0), []
    while t >= 0.5 / 10:
        times.append(float(t))
        t = t + torch.tensor(-1.0 / 10)
    config = pi05.tiny()
    assert config.times == tuple(times)
    assert config.times != replace(config, origin="lerobot").times


def test_padding_changes_nothing() -> None:
    """A larger prompt budget moves no valid key and no velocity."""
    pick = case("pick")
    longer = torch.cat([pick.prompt, torch.full((40, pick.prompt.shape[1]), 7.0)])
    assert max(step_errors(replace(pick, prompt=longer))) <= STEP_BAR


def test_integer_frames_equal_float_frames() -> None:
    model = case("pick").model
    frames = torch.arange(256, dtype=torch.uint8).repeat(3 * 112 * 112 // 256).view(1, 112, 112, 3)
    with torch.no_grad():
        assert torch.equal(model.vision(frames), model.vision(frames.to(torch.float32) / 255.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", ["vision", "prefix", "denoise"])
def test_stage_exports(name: str, dtype: torch.dtype) -> None:
    """On the meta device, alone, with the large ops whole and every input and output named."""
    config = pi05.tiny()
    stage = pi05.stages(config, dtype, True)[name]
    program = torch.export.export(stage.module, stage.args, strict=False)
    assert len(_pytree.tree_leaves(stage.args)) == len(stage.inputs) == len(set(stage.inputs))
    assert len(program.graph_signature.user_outputs) == len(stage.outputs)
    ops = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    layers = {"vision": config.vision.layers, "prefix": config.prefix.layers, "denoise": config.expert.layers}[name]
    linears = {"vision": 6 * layers + 1, "prefix": 7 * layers, "denoise": 9 * layers + 5}[name]
    assert ops.count("aten.scaled_dot_product_attention.default") == layers
    assert ops.count("aten.linear.default") == linears
    assert ops.count("aten.layer_norm.default") == (2 * layers + 1 if name == "vision" else 0)
    assert not {"aten.mm.default", "aten.bmm.default", "aten._softmax.default"} & set(ops)


def test_stage_parameters_are_the_models() -> None:
    config = pi05.tiny()
    whole = {name: p.shape for name, p in pi05.Pi05(config).named_parameters()}
    parts = {
        f"{stage.scope}.{name}": p.shape
        for stage in pi05.stages(config).values()
        for name, p in stage.module.named_parameters()
    }
    assert parts == whole


def run(
    schedule: Schedule, stages: dict[str, Stage], model: pi05.Pi05, values: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What the records promise: stages read and write values by name, and repeated outputs feed the next round."""
    values = dict(values)
    assert values.keys() == set(schedule.inputs)
    for step in schedule.steps:
        stage = stages[step.stage]
        spec = _pytree.tree_structure(stage.args)
        repeat = isinstance(step, Repeat)
        if repeat:
            values |= {name: values[source] for name, source in step.carry.items()}
        for k in range(step.count if repeat else 1):
            row = {name: torch.tensor(table[k]) for name, table in step.tables.items()} if repeat else {}
            args = _pytree.tree_unflatten([(values | row)[name] for name in stage.inputs], spec)
            results = model.get_submodule(stage.scope)(*args)
            values |= dict(zip(stage.outputs, _pytree.tree_leaves(results), strict=True))
    return {name: values[value] for name, value in schedule.outputs.items()}


@pytest.mark.parametrize("velocity", [False, True])
def test_schedule_is_the_loop(velocity: bool) -> None:
    pick = case("pick")
    stages = pi05.stages(pick.model.config, torch.float32, velocity)
    inputs = {"images": pick.frames, "tokens": pick.ids, "n": pick.n, "noise": pick.x[0]}
    with torch.no_grad():
        pick.model.denoise.returns_velocity = velocity
        out = run(pi.schedule(pick.model.config), stages, pick.model, inputs)
        pick.model.denoise.returns_velocity = True
        kv = pick.model.prefix.from_embeddings(pick.image_tokens, pick.prompt, pick.n)
        actions, _ = pick.model.sample(pick.x[0], pick.n, kv)
    assert out.keys() == {"actions"}
    assert torch.equal(out["actions"], actions)
