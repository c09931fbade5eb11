"""SmolVLA against lerobot's own answers, from raw camera frames; its names, sizes and stages."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree

from frtc.compiler import CompileOptions, open_model
from frtc.errors import FrtcError
from frtc.models import detect, smolvla
from frtc.models.checkpoint import Checkpoint, TensorInfo
from frtc.models.siglip import squares
from frtc.models.smolvla_config import CONNECTOR, EXPERT, LM_HEAD, PREFIX, VISION, full
from frtc.models.synthetic import tensors, write_checkpoint
from tests.models import smolvla_truth
from tests.models.mutants_smolvla import MUTANTS
from tests.models.smolvla_truth import CASES, FOLDER, Case, end_to_end_error, step_errors
from tests.models.truth import arrays, relative_error

STEP_BAR, LOOP_BAR = 1e-5, 1e-4  # relative, float32 (docs/design.md, section 9)
HERE = Path(__file__).parent


@cache
def case(name: str = "pick") -> Case:
    return smolvla_truth.lerobot(name)


@pytest.mark.parametrize("name", CASES)
def test_velocity_of_every_step(name: str) -> None:
    errors = step_errors(case(name))
    assert len(errors) == 10
    assert max(errors) <= STEP_BAR


@pytest.mark.parametrize("name", CASES)
def test_whole_loop(name: str) -> None:
    assert end_to_end_error(case(name)) <= LOOP_BAR


def test_prefix_stage() -> None:
    """What enters the language model, keys and values of every layer; valid rows. lerobot's last row is our first."""
    pick, expected = case(), arrays(FOLDER / "expected.safetensors")
    keys, values = (torch.from_numpy(expected[f"pick.{name}"].copy()) for name in ("keys", "values"))
    entered = torch.from_numpy(expected["pick.prefix"].copy())
    model, valid = pick.model, pick.model.config.image_tokens + int(pick.n)
    with torch.no_grad():
        images, state = model.vision(pick.frames), model.prefix.embed_state(pick.state)
        kv = pick.kv()
    assert relative_error(images, entered[: len(images)]) <= STEP_BAR
    assert relative_error(state, entered[-1:]) <= STEP_BAR
    assert len(kv) == len(keys) == 4
    for (k, v), right_k, right_v in zip(kv, keys, values, strict=True):
        assert relative_error(k[:, 1 : 1 + valid], right_k[:, :-1]) <= STEP_BAR
        assert relative_error(v[:, 1 : 1 + valid], right_v[:, :-1]) <= STEP_BAR
        assert relative_error(k[:, 0], right_k[:, -1]) <= STEP_BAR
        assert relative_error(v[:, 0], right_v[:, -1]) <= STEP_BAR


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant: str) -> None:
    """The bars above see each of the classic mistakes."""
    with MUTANTS[mutant]():
        assert max(step_errors(case())) > 2 * STEP_BAR or end_to_end_error(case()) > 2 * LOOP_BAR
    assert max(step_errors(case())) <= STEP_BAR, "the mutant outlived its context"


@pytest.mark.parametrize("name", CASES)
def test_serving_precision(name: str) -> None:
    """bfloat16 with float32 islands: within 2e-2, and no worse than 1.5 times lerobot's own bfloat16 policy."""
    wide = case(name)
    served = smolvla.SmolVla(wide.model.config, torch.bfloat16).eval()
    served.load_state_dict(wide.model.state_dict())
    errors = step_errors(wide, served)
    assert max(errors) <= 2e-2
    assert max(errors) <= 1.5 * max(CASES[name]["bf16_error"])
    assert min(errors) > 1e-4, "this ran in float32"


def test_lerobots_clock() -> None:
    expected = arrays(FOLDER / "expected.safetensors")["pick.time"]
    assert case().model.config.times == tuple(float(t) for t in expected)


def test_an_empty_camera_is_no_view() -> None:
    """lerobot fills a camera that sends nothing with -1 and masks it: the velocities are those without it."""
    expected = arrays(FOLDER / "expected.safetensors")["empty_camera.velocity"]
    assert max(step_errors(replace(case(), velocity=torch.from_numpy(expected.copy())))) <= STEP_BAR


def test_padding_changes_nothing() -> None:
    """A larger prompt budget moves no valid key and no velocity, whatever stands in it."""
    pick = case()
    config = replace(pick.model.config, prompt=pick.model.config.prompt + 40)
    longer = smolvla.SmolVla(config, torch.float32).eval()
    longer.load_state_dict(pick.model.state_dict())
    assert max(step_errors(replace(pick, tokens=F.pad(pick.tokens, (0, 40), value=9)), longer)) <= STEP_BAR


def test_squares_are_a_pixel_shuffle() -> None:
    """The row of a token holds its patches in row-major order, each patch's channels together."""
    x = torch.arange(2 * 16 * 3).view(2, 16, 3)  # two views of 4 x 4 patches
    rows = squares(x, 2).reshape(8, 12)
    assert torch.equal(rows[1], torch.cat([x[0, 2], x[0, 3], x[0, 6], x[0, 7]]))
    assert torch.equal(rows[6], torch.cat([x[1, 8], x[1, 9], x[1, 12], x[1, 13]]))
    assert torch.equal(squares(x, 1).reshape(2, 16, 3), x)
    with pytest.raises(RuntimeError):
        squares(x, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", ["vision", "prefix", "denoise"])
def test_stage_exports(name: str, dtype: torch.dtype) -> None:
    """On the meta device, alone, with the large ops whole and every input and output named."""
    config = smolvla.tiny()
    stage = smolvla.stages(config, dtype, True)[name]
    program = torch.export.export(stage.module, stage.args, strict=False)
    assert len(_pytree.tree_leaves(stage.args)) == len(stage.inputs) == len(set(stage.inputs))
    assert len(program.graph_signature.user_outputs) == len(stage.outputs)
    ops = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    layers = {"vision": config.vision.layers, "prefix": config.prefix.layers, "denoise": config.expert.layers}[name]
    linears = {"vision": 6 * layers + 1, "prefix": 7 * layers + 1, "denoise": 7 * layers + 4}[name]
    assert ops.count("aten.scaled_dot_product_attention.default") == layers
    assert ops.count("aten.linear.default") == linears


def test_stage_parameters_are_the_models() -> None:
    config = smolvla.tiny()
    whole = {name: p.shape for name, p in smolvla.SmolVla(config).named_parameters()}
    stages = smolvla.stages(config).values()
    parts = {f"{s.scope}.{name}": p.shape for s in stages for name, p in s.module.named_parameters()}
    assert parts == whole
    assert smolvla.schedule(config).inputs == ("images", "state", "tokens", "n", "noise")


# --- files --------------------------------------------------------------------------------------------------------


def headers() -> dict[str, TensorInfo]:
    """The tensors of a tiny checkpoint, without bytes."""
    drawn = tensors(smolvla.tiny(), "lerobot", "bf16", "smolvla")
    return {t.name: TensorInfo(t.name, t.dtype, t.shape, Path("model.safetensors"), 0, 0) for t in drawn}


def read(infos: dict[str, TensorInfo], **side: object) -> tuple[smolvla.SmolVlaConfig, dict[str, str]]:
    checkpoint = Checkpoint(HERE, (), {name: replace(info, name=name) for name, info in infos.items()})
    checkpoint.config = side
    model = detect(checkpoint)
    assert model.name == "smolvla"
    config, _ = model.config(checkpoint, {})
    return config, model.weights(checkpoint, config)


def reshaped(name: str, *shape: int) -> dict[str, TensorInfo]:
    infos = headers()
    full_name = next(n for n in infos if n.endswith(name))
    return infos | {full_name: replace(infos[full_name], shape=shape)}


def test_full_size_is_the_real_layout() -> None:
    """Names and shapes of the generated full-size file are those of the rebuilt reference classes (*.keys.json)."""
    real: dict[str, tuple[int, ...]] = {}
    for entry in json.loads((HERE / "smolvla.lerobot.keys.json").read_text())["keys"]:
        for i in entry.get("i_list", range(entry.get("n", 1))):
            real[entry["key"].replace("{i}", str(i))] = tuple(entry["shape"])
    ours = {t.name: t.shape for t in tensors(full(), "lerobot", "bf16", "smolvla")}
    assert ours == real
    assert len(ours) == 500


def test_sizes_come_from_the_tensors() -> None:
    config, _ = read(headers(), tokenizer_max_length=48, chunk_size=10, num_steps=10)
    assert replace(config, views=2) == smolvla.tiny()


def test_a_written_checkpoint_opens(tmp_path: Path) -> None:
    """Weights, config.json, statistics and a tokenizer without BOS: everything that compiling reads."""
    write_checkpoint(tmp_path / "ckpt", "lerobot", "tiny", kind="smolvla")
    opened = open_model(tmp_path / "ckpt", CompileOptions())
    assert opened.model.name == "smolvla" and not opened.assumed
    assert opened.config == replace(smolvla.tiny(), views=3)
    values = next(iter(tensors(smolvla.tiny(), "lerobot", "bf16", "smolvla")))
    assert opened.checkpoint.read(values.name).dtype == {"f32": "float32", "bf16": "bfloat16"}[values.dtype]


def test_names_of_a_compiled_model() -> None:
    compiled = {n.replace("model.", "model._orig_mod.", 1): info for n, info in headers().items()}
    assert read(compiled)[1].keys() == read(headers())[1].keys()


def test_a_shared_table_is_stored_once() -> None:
    """safetensors keeps one name of tensors that share memory: without a table of its own, lm_head is the table."""
    shared = {n: info for n, info in headers().items() if "embed_tokens" not in n}
    assert read(shared)[1]["prefix.embed.weight"] == f"model.{LM_HEAD}"
    assert read(headers())[1]["prefix.embed.weight"].endswith("embed_tokens.weight")


def test_layers_that_lerobot_would_cut_off_are_not_read() -> None:
    """config.json says how many layers of the language model are used; those above are there for nothing."""
    infos = headers()
    upper = {n.replace("layers.3", "layers.4"): info for n, info in infos.items() if f"{PREFIX}.layers.3" in n}
    assert len(upper) == 9
    assert read(infos | upper, num_vlm_layers=4)[0].prefix.layers == 4
    with pytest.raises(FrtcError, match="tensors of smolvla are not in the checkpoint"):
        read(infos | upper)


@pytest.mark.parametrize(
    "every, mode, expected",
    [(2, "cross_attn", "scsc"), (4, "cross_attn", "sccc"), (-1, "cross_attn", "cccc"), (2, "self_attn", "ssss")],
)
def test_kinds_of_layers_are_those_of_config_and_tensors(every: int, mode: str, expected: str) -> None:
    tiny, infos = smolvla.tiny(), headers()
    for i, kind in enumerate(expected):
        for part in "kv":
            name = f"model.{EXPERT}.layers.{i}.self_attn.{part}_proj.weight"
            columns = tiny.prefix.kv_width if kind == "c" else tiny.expert.width
            infos[name] = replace(infos[name], shape=(tiny.prefix.kv_width, columns))
    config, _ = read(infos, attention_mode=mode, self_attn_every_n_layers=every)
    assert "".join("sc"[cross] for cross in config.cross) == expected
    with pytest.raises(FrtcError, match="attention, as attention_mode and self_attn_every_n_layers say"):
        read(infos, attention_mode="cross_attn", self_attn_every_n_layers=3)


SIDES = (
    {"type": "pi0"},
    {"max_state_dim": 14},
    {"max_action_dim": 14},
    {"resize_imgs_with_padding": None},
    {"resize_imgs_with_padding": [512, 384]},
    {"n_obs_steps": 2},
    {"add_image_special_tokens": True},
    {"attention_mode": "full"},
    {"self_attn_every_n_layers": "2"},
    {"num_vlm_layers": 8},
    {"num_expert_layers": 2},
    {"expert_width_multiplier": 0.5},
    {"chunk_size": 0},
    {"min_period": -1},
)


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_config_that_contradicts_the_tensors_or_asks_for_more(side: dict[str, object]) -> None:
    with pytest.raises(FrtcError) as e:
        read(headers(), **side)
    assert e.value.code == "checkpoint.config"
    assert next(iter(side)) in e.value.what


def test_config_that_changes_nothing() -> None:
    """Padding is masked, so that neither its length nor its place in a batch matters."""
    sides = {"prefix_length": 200, "pad_language_to": "max_length", "use_cache": True, "empty_cameras": 2}
    assert read(headers(), **sides) == read(headers())


@pytest.mark.parametrize(
    "name, shape, what",
    [
        (CONNECTOR, (192, 128 * 15), "no square of patches"),
        (CONNECTOR, (192, 128 * 9), "no square of patches"),
        (f"{VISION}.embeddings.position_embedding.weight", (144, 128), "no power of two"),
        (f"{VISION}.embeddings.patch_embedding.weight", (100, 3, 16, 16), "head dimension 64"),
        (f"{PREFIX}.layers.0.self_attn.q_proj.weight", (380, 192), "head dimension 64"),
        (f"{PREFIX}.layers.0.self_attn.k_proj.weight", (256, 192), "6 query heads of 64 over 4 key heads"),
        (f"{EXPERT}.layers.1.self_attn.q_proj.weight", (192, 144), "have the wrong shape"),
        ("state_proj.weight", (192,), "sizes are read from a tensor of 2 axes"),
    ],
)
def test_shapes_that_make_no_model(name: str, shape: tuple[int, ...], what: str) -> None:
    with pytest.raises(FrtcError) as e:
        read(reshaped(name, *shape))
    assert e.value.code == "weights.shape" and what in e.value.what


@pytest.mark.parametrize("name", ["state_proj.bias", "action_time_mlp_out.weight", f"{EXPERT}.norm.weight"])
def test_missing_tensor(name: str) -> None:
    with pytest.raises(FrtcError) as e:
        read({n: info for n, info in headers().items() if n != f"model.{name}"})
    assert e.value.code == "weights.missing" and name in str(e.value)


def test_statistics_among_the_weights_are_refused() -> None:
    old = TensorInfo("normalize_inputs.buffer_observation_state.mean", "f32", (14,), Path("m"), 0, 0)
    with pytest.raises(FrtcError, match="statistics among its weights") as e:
        read(headers() | {old.name: old})
    assert e.value.code == "weights.refused"
