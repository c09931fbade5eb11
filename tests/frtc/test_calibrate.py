"""`frtc calibrate`: from recorded observations to scales, in a file or a Plan; and updates of Plans that need them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from torch.utils._pytree import tree_leaves

from frtc import compiler, observation
from frtc.calibrate import Wishes, _require_finite, calibrate
from frtc.codegen import build
from frtc.codegen.fusible import implements
from frtc.codegen.plan_evidence import change_evidence
from frtc.codegen.recipe import recipe_of
from frtc.compiler import CompileOptions, compile, import_module, open_model, sizes_of
from frtc.dataset import Wanted, open_data
from frtc.errors import FrtcError
from frtc.histogram import OCTAVE, Histogram
from frtc.kernels.targets import load_targets
from frtc.lowering.interpret import evaluate_weights, run_module
from frtc.lowering.ir import Module
from frtc.lowering.text import parse_module, show_module
from frtc.models.checkpoint import SINGLE
from frtc.models.synthetic import write_checkpoint
from frtc.passes.check import relative_error
from frtc.passes.limit_rows import limit_rows
from frtc.passes.name_weights import name_weights
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.precision import Precision
from frtc.passes.sites import sites_of, unnormed
from frtc.passes.standard import FRONT, pipeline
from frtc.policy_options import PolicyOptions
from frtc.precision import parameters
from frtc.recalibrate import replace_scales
from frtc.runtime.plan_file import open_plan
from frtc.runtime.policy_steps import PolicySteps
from frtc.scales import Scales
from frtc.scales_file import read_scales, write_scales
from frtc.torch_run import TorchRun
from frtc.torch_tensors import to_array
from frtc.trace import trace
from frtc.update import Chosen, has_scales, update
from tests.cli.face import call

Array = np.ndarray[Any, Any]
STATIC = CompileOptions(precision="fp8", self_test=False)
BEHIND_NORMS = 16  # of the 30 sites
SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint, recorded observations for it, its scales as a file, and its static Plan."""

    checkpoint: Path
    data: Path
    scales: Path
    plan: Path


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """A model is traced once for each configuration: weights do not change what is traced. Kept as text, so that each
    reader has nodes of its own."""
    known: dict[str, str] = {}

    def trace_once(name: str, stages: Any, schedule: Any, progress: Any) -> Module:
        what = repr([schedule, [[(a.shape, a.dtype) for a in tree_leaves(stage.args)] for stage in stages.values()]])
        if what not in known:
            known[what] = show_module(trace(name, stages, schedule, progress))
        return parse_module(known[what])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "trace", trace_once)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("calibrated")
    found = Made(folder / "pi05", folder / "robot.npz", folder / "f.scales", folder / "static.plan")
    write_checkpoint(found.checkpoint, "openpi", "tiny", seed=0)
    record(found.checkpoint, found.data)
    scales = calibrate(found.checkpoint, found.data, None, Wishes(samples=SAMPLES))
    write_scales(found.scales, scales)
    compile(found.checkpoint, "hopper", found.plan, STATIC, scales=scales)
    return found


def record(checkpoint: Path, path: Path, count: int = SAMPLES) -> None:
    """Seeded observations as an .npz file."""
    opened = open_model(checkpoint, CompileOptions())
    module = import_module(opened)
    steps = PolicySteps(opened.policy(sizes_of(module)), opened.files.tokenizer)
    seen = [observation.seeded(steps, seed) for seed in range(count)]
    arrays = {f"images.{camera}": np.stack([o[camera] for o in seen]) for camera in steps.cameras}
    arrays["state"] = np.stack([o["state"] for o in seen])
    np.savez(path, **arrays, prompt=np.array([o["prompt"] for o in seen]))  # type: ignore[arg-type]


def refused(code: str, call: Any, *args: Any, **more: Any) -> FrtcError:
    with pytest.raises(FrtcError) as found:
        call(*args, **more)
    assert found.value.code == code, found.value
    return found.value


def test_a_file_of_scales(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what it found, and writes what the Python API gives, byte for byte."""
    out = tmp_path / "c.scales"
    said = call(
        capsys, "calibrate", made.checkpoint, "--data", made.data, "-o", out, "--samples", SAMPLES, "--json"
    ).json()
    assert out.read_bytes() == made.scales.read_bytes()
    scales = read_scales(out)
    assert said["samples"] == SAMPLES and said["synthetic"] == [] and said["fallen"] == {}
    assert list(said["sites"]) == [name for name, site in scales.sites.items() if site.product]
    assert len(said["sites"]) == 30 and len(scales.sites) == 30 + BEHIND_NORMS
    rounds = {site.program: site.rounds for site in scales.sites.values()}
    assert rounds == {"vision": None, "prefix": None, "denoise": 10}
    for name, site in said["sites"].items():
        assert np.array_equal(np.float32(site["scale"]), scales.of(name)) and site["sqnr_db"] > 28
    assert list(said["seconds"]) == ["trace", "data", "key", "weights", "samples", "scales"]


def test_what_is_counted_is_what_the_interpreter_sees(made: Made) -> None:
    """As many values, maxima within some roundings of bf16; the rows of the padding behind the prompt are no part."""
    opened = open_model(made.checkpoint, CompileOptions())
    raw = import_module(opened)
    steps = PolicySteps(opened.policy(sizes_of(raw)), opened.files.tokenizer)
    module, _ = run_passes(raw, (*FRONT, limit_rows, name_weights), Options(check=0))
    shown = [site for site in sites_of(module) if site.rounds is None]
    graphs = tuple(
        replace(g, outputs=(*g.outputs, *((s.name, s.x) for s in shown if s.program == g.name))) for g in module.graphs
    )
    weights = evaluate_weights(module, opened.read)
    scales, found = read_scales(made.scales), dict[str, list[Array]]()
    for number, seen in enumerate(open_data(made.data, Wanted.of(steps.policy)).samples(SAMPLES)):
        prepared = steps.prepare(seen, draw=number).inputs
        inputs = {name: value for name, value in prepared.items() if name in module.inputs}
        env = run_module(replace(module, graphs=graphs), inputs, weights.__getitem__)
        real = env["image_tokens"].shape[0] + int(inputs["n"])
        for site in shown:
            x = env[site.name].astype(np.float32)
            found.setdefault(site.name, []).append(x[:real] if site.program == "prefix" else x)
    assert len(found) == 18
    for name, values in found.items():
        expected, (counted,) = Histogram.of(np.concatenate([x.ravel() for x in values])), scales.histograms[name]
        assert counted.count == expected.count, name
        assert abs(counted.absmax / expected.absmax - 1) < 2e-2, name
        assert abs(counted.percentile(99) / expected.percentile(99) - 1) <= 1.01 / OCTAVE, name


def test_fp8_with_these_scales_is_near_bf16(made: Made) -> None:
    """A whole inference in torch, without the noise; scales a twentieth as large clip, and it shows."""
    opened = open_model(made.checkpoint, CompileOptions())
    raw, scales = import_module(opened), read_scales(made.scales)
    steps = PolicySteps(opened.policy(sizes_of(raw)), opened.files.tokenizer)
    inputs = {k: v.copy() for k, v in steps.prepare(observation.seeded(steps), draw=0).inputs.items()}
    accepts = implements(load_targets()["hopper"])

    def actions(given: Scales | None) -> Array:
        precision = Precision("fp8" if given else "bf16", static=given is not None)
        module, _ = run_passes(raw, pipeline(accepts, precision), Options(check=0))
        assert any(n.dtype == "e4m3" for n in module.weights.roots) == (given is not None)
        return to_array(TorchRun(module, parameters(opened.read, given))(inputs)["actions"]) - inputs["noise"]

    exact, near = actions(None), actions(scales)
    off = actions(replace(scales, values={name: v / 20 for name, v in scales.values.items()}))
    assert 1e-3 < relative_error(near, exact) < 0.12
    assert relative_error(off, exact) > 3 * relative_error(near, exact)


def test_synthetic_observations(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused, or accepted and remembered."""
    with np.load(made.data) as data:
        grey = {k: np.full_like(v, 128) if k.startswith("images.") else v for k, v in data.items()}
    np.savez(tmp_path / "grey.npz", **grey)
    words = ("calibrate", made.checkpoint, "--data", tmp_path / "grey.npz", "--samples", "2", "-o", tmp_path / "o")
    assert call(capsys, *words).error == "calibrate.synthetic" and not (tmp_path / "o").exists()
    said = call(capsys, *words, "--allow-synthetic")
    assert said.code == 0 and "not a robot's observations" in said.out
    found = read_scales(tmp_path / "o")
    assert found.synthetic and found.about()["synthetic"] == list(found.synthetic)


def test_a_site_that_fp8_cannot_hold_stays_in_16_bits(made: Made, tmp_path: Path) -> None:
    """A channel of giants at one site: that site falls back, by its name and number; all others stay as they were."""
    planted = tmp_path / "planted"
    shutil.copytree(made.checkpoint, planted)
    tensors = load_file(planted / SINGLE)
    (up,) = (n for n in tensors if "language_model" in n and n.endswith("layers.1.mlp.up_proj.weight"))
    tensors[up][0] *= 1e6
    tensors[up.replace("up_proj", "down_proj")][:, 0] = 0  # what it makes goes nowhere else
    save_file(tensors, planted / SINGLE)
    scales = calibrate(planted, made.data, None, Wishes(samples=2))
    (site,) = scales.fallen()
    assert site == "prefix.layers.1.mlp.down.weight" and scales.sqnr(site) < 10
    report = compile(planted, "hopper", tmp_path / "o.plan", STATIC, scales=scales)
    notes = {note.site: (note.kind, note.reason) for note in report.precision.notes}
    assert notes.pop(site) == ("bf16", scales.fallen()[site])
    whole = compile(made.checkpoint, "hopper", tmp_path / "p.plan", STATIC, scales=read_scales(made.scales))
    assert notes == {n.site: (n.kind, n.reason) for n in whole.precision.notes if n.site != site}
    assert list(open_plan(tmp_path / "o.plan").evidence["calibration"]["fallen"]) == [site]
    fault = refused("scales.fallen", replace_scales, made.plan, planted, scales=scales)
    assert [label for label, _ in fault.rows] == [site]


def test_explain_takes_the_scales_that_a_compile_takes(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its calls are the Plan's, which without scales they are not; scales of another checkpoint are refused."""
    words = ("explain", made.checkpoint, "--arch", "hopper", "--precision", "fp8")

    def calls(*more: str | Path) -> list[tuple[str, str]]:
        return [(c["call"], c["site"].split("(")[0]) for c in call(capsys, *words, *more, "--json").json()["calls"]]

    stages = [s for s in open_plan(made.plan).program.stages if not s.name.startswith("let.")]  # of no program
    wanted = [(f"{s.name}/{i}", c.op) for s in stages for i, c in enumerate(s.calls)]
    assert calls("--scales", made.scales) == wanted != calls()
    scales = read_scales(made.scales)
    write_scales(tmp_path / "other.scales", replace(scales, key=replace(scales.key, weights="0" * 64)))
    assert call(capsys, *words, "--scales", tmp_path / "other.scales").error == "scales.key"
    (tmp_path / "g.ir").write_text("graph g(x: f32[2]) {\n  %0 = neg(%x) : f32[2]\n  return %0\n}")
    said = call(capsys, "explain", tmp_path / "g.ir", *words[2:], "--scales", made.scales)
    assert (said.code, said.error) == (2, "option.scales")


def test_a_product_that_loses_without_its_norm_keeps_it(made: Made, tmp_path: Path) -> None:
    """It is FP8 all the same, and the report names it; the other norms are made up for as before."""
    scales, site = read_scales(made.scales), "prefix.layers.1.mlp.gate.weight|up.weight"
    noisy = scales.noise[site] * np.array([1, 100.0])
    worse = replace(scales, noise={**scales.noise, site: noisy})
    assert list(worse.fallen()) == [unnormed(site)]
    report = compile(made.checkpoint, "hopper", tmp_path / "o.plan", STATIC, scales=worse)
    kept = open_plan(tmp_path / "o.plan").evidence["calibration"]
    assert site in kept["sites"] and unnormed(site) not in kept["sites"]
    others = open_plan(made.plan).evidence["calibration"]["sites"].keys() - {unnormed(site)}
    assert kept["sites"].keys() == others | {site}
    assert {n.site: n.kind for n in report.precision.notes}[site] == "fp8"
    assert list(report.precision.to_json()["normed"]) == [site]
    assert list(report.precision.normed) == [site] and "behind a norm of its own" in str(report.precision)
    assert not compile(made.checkpoint, "thor", tmp_path / "t.plan", STATIC, scales=worse).precision.normed


def test_two_fine_tunes_that_differ_in_one_weight(made: Made, tmp_path: Path) -> None:
    """Headers are equal, scales are never shared."""
    other = tmp_path / "tuned"
    shutil.copytree(made.checkpoint, other)
    data = bytearray((other / SINGLE).read_bytes())
    data[-2] ^= 1  # the last bit of the last bf16
    (other / SINGLE).write_bytes(data)
    scales = read_scales(made.scales)
    fault = refused("scales.key", compile, other, "hopper", tmp_path / "o.plan", STATIC, scales=scales)
    assert [label for label, _ in fault.rows] == ["differs"] and fault.what.endswith(": weights")
    refused("scales.key", update, made.plan, other, tmp_path / "o.plan", Chosen(scales=scales))
    assert not (tmp_path / "o.plan").exists()


def test_scales_of_other_options(made: Made, tmp_path: Path) -> None:
    scales = read_scales(made.scales)
    options = replace(STATIC, steps=5)
    fault = refused("scales.key", compile, made.checkpoint, "hopper", tmp_path / "o.plan", options, scales=scales)
    assert fault.what.endswith(": ir")
    options = replace(STATIC, policy=PolicyOptions(actions="absolute", robot=None, state_dim=7))
    fault = refused("scales.key", compile, made.checkpoint, "hopper", tmp_path / "o.plan", options, scales=scales)
    assert fault.what.endswith(": options")


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is traced and no kernel compiled")


def test_an_update_wants_the_new_checkpoints_scales(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is then, byte for byte, a fresh compile."""
    new, scales = tmp_path / "new", tmp_path / "new.scales"
    write_checkpoint(new, "openpi", "tiny", seed=1)
    write_scales(scales, calibrate(new, made.data, None, Wishes(samples=2)))
    compile(new, "hopper", tmp_path / "fresh.plan", STATIC, scales=read_scales(scales))
    monkeypatch.setattr(compiler, "trace", never)
    monkeypatch.setattr(build, "compile_all", never)
    words = ("update", made.plan, new, "-o", tmp_path / "o.plan")
    said = call(capsys, *words)
    assert (said.code, said.error) == (2, "update.scales")
    assert call(capsys, *words, "--scales", made.scales).error == "scales.key"
    assert call(capsys, *words, "--scales", scales).code == 0
    assert (tmp_path / "o.plan").read_bytes() == (tmp_path / "fresh.plan").read_bytes()


def test_into_a_plan(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that a scale is part of change, others do not; no kernel is compiled; evidence is that of the new."""
    plan = tmp_path / "p.plan"
    shutil.copy(made.plan, plan)
    fewer = calibrate(made.checkpoint, made.data, None, Wishes(samples=1))
    write_scales(tmp_path / "fewer.scales", fewer)
    monkeypatch.setattr(build, "compile_all", never)
    said = call(capsys, "calibrate", made.checkpoint, "--into", plan, "--data", made.data, "--samples", "1", "--json")
    assert said.code == 0 and said.json()["changed"]
    old, new = open_plan(made.plan), open_plan(plan)
    changed = {w.name for w, a, b in zip(old.program.weights, old.sha256, new.sha256, strict=False) if a != b}
    made_of = {n for n, e in recipe_of(old).items() if has_scales({n: e})}
    assert changed and changed <= made_of and len(made_of) < len(old.program.weights)
    assert new.evidence["calibration"]["key"] == fewer.key.digest and new.evidence["calibration"]["samples"] == 1
    shutil.copy(made.plan, tmp_path / "q.plan")
    words = ("calibrate", made.checkpoint, "--into", tmp_path / "q.plan", "--scales", tmp_path / "fewer.scales")
    assert call(capsys, *words).code == 0
    assert (tmp_path / "q.plan").read_bytes() == plan.read_bytes()


def test_into_a_plan_whose_fine_tune_is_twice_a_weight(made: Made, tmp_path: Path) -> None:
    """In FP8 the codes are the same, and the factor is in alpha, of which the activation scale is a part, too."""
    other, plan = tmp_path / "other", tmp_path / "p.plan"
    shutil.copytree(made.checkpoint, other)
    shutil.copy(made.plan, plan)
    before, tensors = plan.read_bytes(), load_file(other / "model.safetensors")
    name = next(n for n in tensors if n.endswith("gemma_expert.model.layers.1.mlp.down_proj.weight"))
    save_file({**tensors, name: tensors[name] * 2}, other / "model.safetensors")
    # as many as the Plan has: one sample, ten rows a round, says too little of whether a norm may be deferred
    theirs = calibrate(other, made.data, None, Wishes(samples=SAMPLES))
    fault = refused("calibrate.checkpoint", replace_scales, plan, other, scales=theirs)
    assert "denoise.layers.1.mlp.down.weight" in dict(fault.rows)["first"] and plan.read_bytes() == before


def test_into_a_plan_where_a_site_falls_that_has_no_norm(made: Made, tmp_path: Path) -> None:
    """The Plan has the scale of the values before the norm alone; what falls behind it has 16 bits either way."""
    plan, scales, site = tmp_path / "p.plan", read_scales(made.scales), "vision.tower.layers.0.fc1.weight"
    shutil.copy(made.plan, plan)
    assert unnormed(site) in open_plan(plan).evidence["calibration"]["sites"]
    worse = replace(scales, values={**scales.values, site: scales.values[site] * np.float32(2**14)})
    assert list(worse.fallen()) == [site]
    fault = refused("scales.fallen", replace_scales, plan, made.checkpoint, scales=worse)
    assert [label for label, _ in fault.rows] == [site] and plan.read_bytes() == made.plan.read_bytes()


def test_into_a_plan_of_another_checkpoint_or_without_scales(made: Made, tmp_path: Path) -> None:
    """Each is told apart, and leaves the Plan as it was."""
    other, plan = tmp_path / "other", tmp_path / "p.plan"
    write_checkpoint(other, "openpi", "tiny", seed=1)
    shutil.copy(made.plan, plan)
    before, scales = plan.read_bytes(), read_scales(made.scales)
    refused("scales.key", replace_scales, plan, other, scales=scales)
    theirs = calibrate(other, made.data, None, Wishes(samples=1))
    refused("calibrate.checkpoint", replace_scales, plan, other, scales=theirs)
    assert plan.read_bytes() == before and [p.name for p in tmp_path.glob("*p.plan*")] == ["p.plan"]
    forgotten = {k: v for k, v in open_plan(plan).evidence.items() if k != "results"}
    assert change_evidence(plan, open_plan(plan).plan_id, lambda evidence: forgotten) == ""
    refused("verify.no_vectors", replace_scales, plan, made.checkpoint, scales=scales, chosen=Chosen(self_test=True))
    compile(made.checkpoint, "hopper", plan, STATIC)
    fault = refused("calibrate.plan", replace_scales, plan, made.checkpoint, scales=scales)
    assert "each row finds its scale as it runs" in fault.what and "--scales" in fault.hint
    refused("calibrate.plan", update, plan, made.checkpoint, plan, Chosen(scales=scales))
    assert update(plan, made.checkpoint, plan).changed is False
    assert open_plan(plan).evidence["calibration"] == {"scales": "per row"}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), "calibrate.source"),
        (("--data", "d", "--scales", "s"), "calibrate.source"),
        (("--scales", "s"), "calibrate.source"),
        (("--data", "d", "-o", "none/f.scales"), "output.folder"),
        (("--data", "d", "--into", "p", "--steps", "5"), "calibrate.options"),
        (("--data", "d", "--into", "p", "-o", "f"), "calibrate.options"),
        (("--data", "d", "--self-test"), "calibrate.options"),
        (("--data", "d", "--data-camera", "base"), "dataset.cameras"),
        (("--data", "d", "--headroom", "0.5"), "usage.option"),
        (("--data", "d", "--samples", "0"), "usage.option"),
        (("--data", "no such folder"), "dataset.not_found"),
    ],
)
def test_wrong_words(
    made: Made, tmp_path: Path, words: tuple[str, ...], code: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "calibrate", made.checkpoint, *words).error == code
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_finite() -> None:
    good, bad = Histogram.of(np.ones(4)), Histogram.of(np.array([1, np.nan, np.inf]))
    fault = refused("calibrate.nonfinite", _require_finite, {"a": (good,), "b": (good, bad)})
    assert fault.rows == (("b", "2 values are NaN or infinite"),)
