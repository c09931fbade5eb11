"""`frtc update`: what a fresh compile would write, byte for byte, without tracing or compiling; or a reason why not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import frtc
from frtc import compiler
from frtc.codegen import build
from frtc.codegen.plan_evidence import change_evidence
from frtc.codegen.plan_writer import PlanWriter
from frtc.codegen.recipe import RECIPE
from frtc.compiler import CompileOptions, compile, silent
from frtc.errors import FrtcError
from frtc.models.checkpoint import SINGLE, open_checkpoint
from frtc.models.lora import TENSORS
from frtc.models.lora_config import CONFIG
from frtc.models.synthetic import write_checkpoint
from frtc.policy_options import PolicyOptions
from frtc.runtime.plan_file import Plan, open_plan
from frtc.update import Chosen, update
from frtc.verify import reference_of
from tests.cli.face import call
from tests.conftest import Demo

TARGETS = r"(.*\.gemma_expert\..*\.self_attn\.(q|v)_proj|model\.(action_in_proj|action_out_proj))"
RANK, ALPHA = 4, 6
UNTESTED = CompileOptions(self_test=False)


@dataclass(frozen=True, slots=True)
class Old:
    """A checkpoint of seed 0 and its Plan."""

    layout: str
    checkpoint: Path
    plan: Path


@pytest.fixture(scope="module")
def openpi(demo: Demo) -> Old:
    """Its Plan holds a self-test."""
    return Old("openpi", demo.checkpoint, demo.plan)


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Old:
    folder = tmp_path_factory.mktemp("lerobot")
    write_checkpoint(folder / "old", "lerobot", "tiny", seed=0)
    compile(folder / "old", "thor", folder / "old.plan", UNTESTED)
    return Old("lerobot", folder / "old", folder / "old.plan")


def fresh(checkpoint: Path, options: CompileOptions = UNTESTED) -> bytes:
    out = checkpoint.parent / "fresh.plan"
    compile(checkpoint, "thor", out, options)
    return out.read_bytes()


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("openpi", "bf16"),
        ("lerobot", "f32"),
        pytest.param("openpi", "f32", marks=FULL),
        pytest.param("lerobot", "bf16", marks=FULL),
    ],
)
def test_equal_to_a_fresh_compile(
    layout: str, dtype: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights, other statistics; nothing is traced and no kernel compiled."""
    old: Old = request.getfixturevalue(layout)
    write_checkpoint(tmp_path / "new", old.layout, "tiny", seed=1, dtype=dtype)
    move_statistics(tmp_path / "new")
    expected = fresh(tmp_path / "new")
    before, out = old.plan.read_bytes(), tmp_path / "out.plan"
    monkeypatch.setattr(compiler, "trace", never)
    monkeypatch.setattr(build, "compile_all", never)
    found = update(old.plan, tmp_path / "new", out)
    assert out.read_bytes() == expected and found.changed
    assert old.plan.read_bytes() == before
    ours, theirs = open_plan(out), open_plan(old.plan)
    assert ours.program.policy != theirs.program.policy
    assert replace(ours.program, policy={}) == replace(theirs.program, policy={})


@pytest.mark.parametrize(("kind", "layout"), [("pi0", "jax"), pytest.param("smolvla", "lerobot", marks=FULL)])
def test_other_models_and_layouts(kind: str, layout: str, tmp_path: Path) -> None:
    for seed, name, dtype in ((0, "old", "bf16"), (1, "new", "f32")):
        write_checkpoint(tmp_path / name, layout, "tiny", seed=seed, dtype=dtype, kind=kind)
    compile(tmp_path / "old", "thor", tmp_path / "old.plan", UNTESTED)
    update(tmp_path / "old.plan", tmp_path / "new", tmp_path / "out.plan")
    assert (tmp_path / "out.plan").read_bytes() == fresh(tmp_path / "new")


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("an update neither traces nor compiles")


def move_statistics(folder: Path) -> None:
    """Every number of the statistics, whichever file holds them."""
    for path in folder.glob("assets/*/norm_stats.json"):
        data = json.loads(path.read_text())
        for stats in data["norm_stats"].values():
            stats.update({name: [v * 1.5 for v in values] for name, values in stats.items() if values})
        path.write_text(json.dumps(data))
    for path in folder.glob("policy_*normalizer_processor.safetensors"):
        save_file({name: value * 1.5 for name, value in load_file(path).items()}, path)


def test_the_same_checkpoint_gives_the_same_program(openpi: Old, tmp_path: Path) -> None:
    found = update(openpi.plan, openpi.checkpoint, tmp_path / "out.plan")
    assert not found.changed and found.plan_id == open_plan(openpi.plan).plan_id
    assert "self_test" in open_plan(openpi.plan).evidence
    assert set(open_plan(tmp_path / "out.plan").evidence) == {"frtc", "source", "options", "config", "results"}


def test_a_new_self_test(openpi: Old, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The vectors that a compile makes; a Plan that does not say where its results lie cannot have them."""
    out = tmp_path / "o.plan"
    said = call(capsys, "update", openpi.plan, openpi.checkpoint, "-o", out, "--self-test", "--json").json()
    assert said["tested"] and not said["changed"]
    ours, theirs = open_plan(out).evidence, dict(open_plan(openpi.plan).evidence)
    theirs.pop("verified")  # what was proved of the old one, although its weights are the same
    assert ours == theirs and open_plan(out).plan_id == open_plan(openpi.plan).plan_id
    untested = tmp_path / "untested.plan"
    plan_id = update(openpi.plan, openpi.checkpoint, untested).plan_id
    update(untested, openpi.checkpoint, out, Chosen(self_test=True))  # an update without one keeps the places
    assert open_plan(out).evidence == ours
    assert change_evidence(untested, plan_id, lambda e: {k: v for k, v in e.items() if k != "results"}) == ""
    with pytest.raises(FrtcError) as refused:
        update(untested, openpi.checkpoint, out, Chosen(self_test=True))
    assert refused.value.code == "verify.no_vectors"


def test_in_place_or_not_at_all(openpi: Old, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that turns out to be broken leaves the Plan as it was."""
    plan, bad = tmp_path / "p.plan", tmp_path / "bad"
    shutil.copy(openpi.plan, plan)
    write_checkpoint(bad, "openpi", "tiny", seed=3)
    data = bytearray((bad / SINGLE).read_bytes())
    data[-2:] = b"\xff\xff"  # a NaN in bf16
    (bad / SINGLE).write_bytes(data)
    before = plan.read_bytes()
    said = call(capsys, "update", plan, bad, "--in-place")
    assert (said.code, said.error) == (4, "checkpoint.nonfinite")
    assert plan.read_bytes() == before and [p.name for p in tmp_path.glob("*p.plan*")] == ["p.plan"]
    write_checkpoint(tmp_path / "good", "openpi", "tiny", seed=3)
    said = call(capsys, "update", plan, tmp_path / "good", "--in-place", "--json")
    assert said.code == 0 and said.json()["plan_id"] == open_plan(plan).plan_id != open_plan(openpi.plan).plan_id
    assert "self_test" not in open_plan(plan).evidence and not open_plan(plan).notes


@pytest.mark.parametrize("words", [(), ("--in-place", "-o", "new.plan"), ("-o", "PLAN")])
def test_where_the_result_goes_is_said_once(
    words: tuple[str, ...], openpi: Old, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(openpi.plan) if word == "PLAN" else word for word in words]
    said = call(capsys, "update", openpi.plan, openpi.checkpoint, *given)
    assert (said.code, said.error) == (2, "update.output")


def test_what_is_no_plan_is_not_replaced(openpi: Old, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before the checkpoint is looked for; in place, it is the Plan that is wrong."""
    precious = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(3, np.float32)}, precious)
    before = precious.read_bytes()
    said = call(capsys, "update", openpi.plan, tmp_path / "nowhere", "-o", precious)
    assert (said.code, said.error) == (2, "output.exists") and precious.read_bytes() == before
    assert call(capsys, "update", precious, tmp_path / "nowhere", "--in-place").error == "plan.invalid"
    assert call(capsys, "update", tmp_path / "no.plan", tmp_path / "nowhere", "-o", precious).error == "plan.missing"


def test_text(openpi: Old, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "update", openpi.plan, openpi.checkpoint, "-o", tmp_path / "o.plan")
    assert "as before: the checkpoint holds the same values" in said.out and "no kernel was compiled" in said.out


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def test_a_chosen_tokenizer_stays(tmp_path: Path) -> None:
    """It was passed by --tokenizer, and with it the piece that pads; the new checkpoint has none, or another."""
    tokens, checkpoint = tmp_path / "tokens", tmp_path / "old"
    write_checkpoint(checkpoint, "openpi", "tiny")
    tokens.mkdir()
    shutil.move(checkpoint / "tokenizer.json", tokens / "mine.json")
    (tokens / "tokenizer_config.json").write_text('{"pad_token": "<bos>"}')
    options = replace(UNTESTED, policy=PolicyOptions(tokenizer=tokens / "mine.json"))
    compile(checkpoint, "thor", tmp_path / "old.plan", options)
    write_checkpoint(tmp_path / "new", "openpi", "tiny", seed=1)
    expected = fresh(tmp_path / "new", options)
    update(tmp_path / "old.plan", tmp_path / "new", tmp_path / "kept.plan")
    assert (tmp_path / "kept.plan").read_bytes() == expected
    update(tmp_path / "old.plan", tmp_path / "new", tmp_path / "o.plan", Chosen(tokenizer=tokens / "mine.json"))
    assert (tmp_path / "o.plan").read_bytes() == expected


def test_a_checkpoint_without_tokenizer_gets_the_plans(openpi: Old, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new", "openpi", "tiny", seed=1)
    update(openpi.plan, tmp_path / "new", tmp_path / "with.plan")
    (tmp_path / "new" / "tokenizer.json").unlink()
    update(openpi.plan, tmp_path / "new", tmp_path / "without.plan")
    assert open_plan(tmp_path / "with.plan").plan_id == open_plan(tmp_path / "without.plan").plan_id


# --- LoRA -------------------------------------------------------------------------------------------------------------


def adapter(checkpoint: Path, folder: Path) -> Path:
    """An adapter as lerobot trains one: peft's prefix before the policy's names, targets by expression."""
    rng, names = np.random.default_rng(0), open_checkpoint(checkpoint).tensors
    targets = [n for n in names if ("gemma_expert" in n and n.endswith(("q_proj.weight", "v_proj.weight")))]
    targets += ["model.action_in_proj.weight"]
    tensors: dict[str, np.ndarray] = {}
    for name in targets:
        out, inner = names[name].shape
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{stem}.lora_A.weight"] = rng.standard_normal((RANK, inner)).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = (rng.standard_normal((out, RANK)) / 8).astype(np.float32)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / TENSORS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def test_an_adapter_by_option_beside_the_base_or_merged_before(tmp_path: Path) -> None:
    """One program four ways: compiled or updated with --adapter, from one folder, from a file that holds the sums."""
    base, out = tmp_path / "base", tmp_path / "out.plan"
    write_checkpoint(base, "lerobot", "tiny", seed=2, dtype="f32")
    compile(base, "thor", tmp_path / "base.plan", UNTESTED)
    lora = adapter(base, tmp_path / "adapter")
    compile(base, "thor", tmp_path / "compiled.plan", replace(UNTESTED, adapter=lora))
    wanted = open_plan(tmp_path / "compiled.plan")
    assert wanted.plan_id != open_plan(tmp_path / "base.plan").plan_id
    found = update(tmp_path / "base.plan", base, out, Chosen(adapter=lora))
    assert out.read_bytes() == (tmp_path / "compiled.plan").read_bytes()
    assert ("adapter", "7 tensors merged, rank 4, 0 replaced", TENSORS) in found.facts
    assert reference_of(wanted, base, silent, lora).opened.facts[0].name == "adapter"
    shown, merged = open_checkpoint(base, lora), tmp_path / "merged"
    shutil.copytree(base, merged)
    save_file({name: np.array(shown.read(name)) for name in shown.tensors}, merged / SINGLE)
    assert update(tmp_path / "base.plan", merged, out).plan_id == wanted.plan_id
    adapter(base, base)
    assert update(tmp_path / "base.plan", base, out).plan_id == wanted.plan_id


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(plan: Path, checkpoint: Path) -> FrtcError:
    with pytest.raises(FrtcError) as refused:
        update(plan, checkpoint, plan.parent / "never.plan")
    assert not (plan.parent / "never.plan").exists()
    return refused.value


def test_another_model(openpi: Old, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", "openpi", "tiny", kind="pi0")
    fault = refusal(openpi.plan, tmp_path / "other")
    assert (fault.code, fault.exit_code) == ("update.model", 2)
    assert fault.what == "the Plan is a pi05, the checkpoint a pi0"


@pytest.mark.parametrize("change", [{"action_horizon": 7}, {"min_period": 1e-3}])
def test_another_configuration(change: dict[str, Any], openpi: Old, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", "openpi", "tiny", seed=1)
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    fault = refusal(openpi.plan, tmp_path / "other")
    field = {"action_horizon": "horizon", "min_period": "min_period"}[next(iter(change))]
    assert (fault.code, fault.exit_code, [name for name, _ in fault.rows]) == ("update.config", 2, [field])


def rewritten(plan: Plan, out: Path, blobs: dict[str, bytes], evidence: dict[str, Any]) -> Path:
    """The Plan with other files or other evidence, and the hashes that belong to them."""
    with PlanWriter(out, plan.program, blobs) as writer:
        for entry in plan.program.weights:
            writer._write(plan.data[entry.offset : entry.offset + entry.nbytes], entry.offset)
            writer.rows[entry.name] = [(0, entry.shape[0] if entry.shape else 1)]
        writer.finish(evidence)
    return out


def test_the_version_that_made_the_program_is_kept(openpi: Old, tmp_path: Path) -> None:
    plan = open_plan(openpi.plan)
    evidence = dict(plan.evidence) | {"frtc": "0.0.9"}
    old = rewritten(plan, tmp_path / "old.plan", {k: bytes(v) for k, v in plan.files().items()}, evidence)
    update(old, openpi.checkpoint, tmp_path / "o.plan")
    found = open_plan(tmp_path / "o.plan").evidence
    assert (found["frtc"], found["updated_by"]) == ("0.0.9", frtc.__version__)


def _without(name: str) -> Callable[[dict[str, bytes], dict[str, Any]], None]:
    def change(blobs: dict[str, bytes], evidence: dict[str, Any]) -> None:
        evidence.pop(name, None)
        blobs.pop(name, None)

    return change


def _other_recipe(blobs: dict[str, bytes], evidence: dict[str, Any]) -> None:
    blobs[RECIPE] = blobs[RECIPE].replace(b"f32[144]", b"f32[145]")


def _no_text(blobs: dict[str, bytes], evidence: dict[str, Any]) -> None:
    blobs[RECIPE] = b"graph weights() {"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_without("options"), "plan.options"),
        (_without("config"), "plan.options"),
        (_without(RECIPE), "plan.recipe"),
        (_no_text, "plan.recipe"),
        (_other_recipe, "plan.recipe"),
    ],
)
def test_a_plan_that_cannot_be_updated(
    change: Callable[[dict[str, bytes], dict[str, Any]], None], code: str, openpi: Old, tmp_path: Path
) -> None:
    plan = open_plan(openpi.plan)
    blobs, evidence = {k: bytes(v) for k, v in plan.files().items()}, dict(plan.evidence)
    change(blobs, evidence)
    fault = refusal(rewritten(plan, tmp_path / "other.plan", blobs, evidence), openpi.checkpoint)
    assert (fault.code, fault.exit_code) == (code, 4)
    assert code != "plan.options" or "compile it again" in fault.hint
