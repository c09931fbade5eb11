"""Pi0 against foreign data: the golden tensors, which enter below the vision tower; its names, sizes and stages."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree

from frtc.errors import FrtcError
from frtc.models import detect, pi, pi0
from frtc.models.checkpoint import Checkpoint, TensorInfo
from frtc.models.synthetic import LAYOUTS, tensors
from tests.models import truth
from tests.models.mutants import MUTANTS
from tests.models.truth import Case, end_to_end_error, relative_error, step_errors

STEP_BAR, LOOP_BAR = 1e-5, 1e-4  # relative, float32 (docs/design.md, section 9)
HERE = Path(__file__).parent


@cache
def case() -> Case:
    return truth.golden("pi0")


def test_velocity_of_every_step() -> None:
    errors = step_errors(case())
    assert len(errors) == 10
    assert max(errors) <= STEP_BAR


def test_whole_loop() -> None:
    assert end_to_end_error(case()) <= LOOP_BAR


@pytest.mark.parametrize("mutant", MUTANTS["pi0"])
def test_mutant_fails(mutant: str) -> None:
    """The bars above see each of the classic mistakes."""
    with MUTANTS["pi0"][mutant]():
        assert max(step_errors(case())) > 2 * STEP_BAR or end_to_end_error(case()) > 2 * LOOP_BAR
    assert max(step_errors(case())) <= STEP_BAR, "the mutant outlived its context"


def test_serving_precision() -> None:
    """bfloat16 with float32 islands: within 2e-2."""
    wide = case()
    served = pi0.Pi0(wide.model.config, torch.bfloat16).eval()
    served.load_state_dict(wide.model.state_dict())
    with torch.no_grad():
        kv = served.prefix.from_embeddings(wide.image_tokens.bfloat16(), wide.prompt.bfloat16(), wide.n)
        steps = zip(wide.model.config.times, wide.x, wide.velocity, strict=True)
        errors = [
            relative_error(served.denoise.velocity(x, torch.tensor(t), *wide.context(kv)), v) for t, x, v in steps
        ]
    assert max(errors) <= 2e-2
    assert min(errors) > 1e-4, "this ran in float32"


def test_state_token_ignores_noise_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values are the same whatever x_t and t are."""
    wide, passes, right = case(), [], pi0.Denoise.expert

    def spied(self: pi0.Denoise, *args: object) -> object:
        passes.append(right(self, *args))
        return passes[-1]

    monkeypatch.setattr(pi0.Denoise, "expert", spied)
    with torch.no_grad():
        kv = wide.model.prefix.from_embeddings(wide.image_tokens, wide.prompt, wide.n)
        for x, t in zip(wide.x[:2], (1.0, 0.5), strict=True):
            wide.model.denoise.velocity(x, torch.tensor(t), *wide.context(kv))
    (_, first), _, (_, second), _ = passes
    for (k, v), (k2, v2) in zip(first, second, strict=True):
        assert torch.equal(k, k2) and torch.equal(v, v2)


def test_padding_changes_nothing() -> None:
    """A larger prompt budget moves no valid key and no velocity."""
    longer = torch.cat([case().prompt, torch.full((40, case().prompt.shape[1]), 7.0)])
    assert max(step_errors(replace(case(), prompt=longer))) <= STEP_BAR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", ["vision", "prefix", "denoise"])
def test_stage_exports(name: str, dtype: torch.dtype) -> None:
    """On the meta device, alone, with the large ops whole and every input and output named."""
    config = pi0.tiny()
    stage = pi0.stages(config, dtype, True)[name]
    program = torch.export.export(stage.module, stage.args, strict=False)
    assert len(_pytree.tree_leaves(stage.args)) == len(stage.inputs) == len(set(stage.inputs))
    assert len(program.graph_signature.user_outputs) == len(stage.outputs)
    ops = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    passes = {"vision": config.vision.layers, "prefix": config.prefix.layers, "denoise": 2 * config.expert.layers}[name]
    linears = {"vision": 6 * passes + 1, "prefix": 7 * passes, "denoise": 7 * passes + 5}[name]
    assert ops.count("aten.scaled_dot_product_attention.default") == passes
    assert ops.count("aten.linear.default") == linears


def test_stage_parameters_are_the_models() -> None:
    config = pi0.tiny()
    whole = {name: p.shape for name, p in pi0.Pi0(config).named_parameters()}
    stages = pi0.stages(config).values()
    parts = {f"{s.scope}.{name}": p.shape for s in stages for name, p in s.module.named_parameters()}
    assert parts == whole
    assert pi.schedule(config).inputs == ("images", "state", "tokens", "n", "noise")


# --- files --------------------------------------------------------------------------------------------------------


def headers(layout: str = "openpi") -> dict[str, TensorInfo]:
    """The tensors of a tiny checkpoint, without bytes."""
    drawn = tensors(pi0.tiny(), layout, "bf16", "pi0")
    return {t.name: TensorInfo(t.name, t.dtype, t.shape, Path("model.safetensors"), 0, 0) for t in drawn}


def resolve(infos: dict[str, TensorInfo], **side: object) -> dict[str, str]:
    checkpoint = Checkpoint(HERE, (), {name: replace(info, name=name) for name, info in infos.items()})
    checkpoint.config = side
    model = detect(checkpoint)
    assert model.name == "pi0"
    config, _ = model.config(checkpoint, {})
    assert config.state_width == 32
    return model.weights(checkpoint, config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_size_is_the_real_layout(layout: str) -> None:
    """Names and shapes of the generated full-size file are those read from the reference classes (*.keys.json)."""
    real: dict[str, tuple[int, ...]] = {}
    for entry in json.loads((HERE / f"pi0.{layout}.keys.json").read_text())["keys"]:
        if entry.get("in_file", True):
            for i in range(entry.get("n", 1)):
                real[entry["key"].replace("{i}", str(i))] = tuple(entry["shape"])
    ours = {t.name: t.shape for t in tensors(pi0.full(), layout, "bf16", "pi0")}
    assert ours == real
    assert len(ours) == {"openpi": 777, "lerobot": 778}[layout]


def test_both_layouts_fill_the_same_parameters() -> None:
    assert list(resolve(headers("openpi"))) == list(resolve(headers("lerobot")))


def test_the_time_mlp_by_its_other_name() -> None:
    old = {n.replace("action_time_mlp_", "time_mlp_"): info for n, info in headers().items()}
    assert resolve(old)["denoise.mlp_in.weight"] == "time_mlp_in.weight"


@pytest.mark.parametrize(
    "side", [{"type": "pi05"}, {"pi05": True}, {"type": "pi0", "max_state_dim": 14}, {"action_dim": 7}], ids=str
)
def test_config_that_contradicts_the_tensors(side: dict[str, object]) -> None:
    with pytest.raises(FrtcError) as e:
        resolve(headers(), **side)
    assert e.value.code == "checkpoint.config"


@pytest.mark.parametrize("name", ["state_proj.bias", "action_time_mlp_out.weight", f"{pi.EXPERT}.norm.weight"])
def test_missing_tensor(name: str) -> None:
    with pytest.raises(FrtcError) as e:
        resolve({n: info for n, info in headers().items() if n != name})
    assert e.value.code == "weights.missing" and name in e.value.rows[0][0]


def test_an_adaptive_norm_is_no_pi0() -> None:
    """One tensor of the other kind: the file is read as that kind, and refused for what it lacks."""
    infos = headers()
    name = f"{pi.EXPERT}.layers.0.input_layernorm.dense.weight"
    assert not pi0.claims([*infos, name])
