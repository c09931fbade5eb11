"""The parts of `frtc diff`: distances of weights, launches of hand-made programs, names of kernels, what a side is."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from frtc.compiler import CompileOptions, import_module, open_model
from frtc.diff import Options, diff
from frtc.diff_plans import Changed, compare_launches, compare_memory, gist
from frtc.diff_sides import Weight, flat_policy, is_plan, open_side
from frtc.diff_weights import PIECE, compare_weights, distance, rows_of
from frtc.errors import FrtcError
from frtc.kernels.dtypes import DTYPES
from frtc.models.checkpoint import open_checkpoint
from frtc.models.synthetic import write_checkpoint
from frtc.policy_options import PolicyOptions
from frtc.report import flat
from frtc.runtime.plan import Launch, Overlap, Program, Stage
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.policy import Norm, Policy, Slice, State
from tests.runtime import small_plan

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)


def weight(array: Array, digest: str = "") -> Weight:
    dtype = next(name for name, d in DTYPES.items() if d.numpy == array.dtype)
    return Weight(dtype, array.shape, lambda: array, digest)


def silent(what: str, share: float) -> None:
    """Nobody watches."""


def test_distance_of_known_arrays() -> None:
    a = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    b = a.copy()
    assert distance(a, rows_of(b)) == (True, 0.0, 0.0)
    b[1, 1] = 4.5
    assert distance(a, rows_of(b)) == (False, 0.1, 0.5)
    assert distance(np.zeros(2, np.float32), rows_of(np.ones(2, np.float32))) == (False, None, 1.0)
    assert distance(np.float32(2), rows_of(np.float32(1))) == (False, 0.5, 1.0)
    b[0, 0] = np.nan
    assert distance(a, rows_of(b)) == (False, None, None)
    assert distance(np.zeros((0, 3)), rows_of(np.zeros((0, 3)))) == (True, 0.0, 0.0)


def test_minus_zero_is_another_bit_pattern() -> None:
    assert distance(np.zeros(3, BF16), rows_of(-np.zeros(3, BF16))) == (False, 0.0, 0.0)


def test_types_are_compared_by_value() -> None:
    """Equal values in another type: a difference of the type, of size 0; its rounding otherwise."""
    exact = np.arange(8, dtype=np.float32)
    found = compare_weights({"w": weight(exact)}, {"w": weight(exact.astype(BF16))}, silent)
    (moved,) = found.moved
    assert (moved.a, moved.b, moved.relative, moved.largest) == ("f32[8]", "bf16[8]", 0.0, 0.0)
    rough = exact + np.float32(0.001)
    (moved,) = compare_weights({"w": weight(rough)}, {"w": weight(rough.astype(BF16))}, silent).moved
    assert moved.relative is not None and 0 < moved.relative < 2**-8


def test_rows_in_pieces_give_what_the_whole_gives() -> None:
    """Several pieces, strided rows, a difference in the last piece only."""
    stored = np.random.default_rng(0).standard_normal((5, PIECE // 2 + 8)).astype(np.float32)
    a, b = stored[:, :-5], stored[:, :-5].copy()
    assert len(list(rows_of(b))) == 5
    b[4, -1] += 2
    equal, relative, largest = distance(a, rows_of(b))
    delta = (b.astype(np.float64) - a).ravel()
    assert not equal and largest == pytest.approx(2, rel=1e-6)
    assert relative == pytest.approx(math.sqrt(delta @ delta) / np.linalg.norm(a.astype(np.float64)), rel=1e-12)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Two files of 96 MiB that differ in one element: a few pieces of float64 at a time."""
    maps = [np.memmap(tmp_path / name, np.float32, "w+", shape=(24, PIECE)) for name in "ab"]
    maps[1][20, 7] = 3
    tracemalloc.start()
    try:
        assert distance(maps[0], rows_of(maps[1])) == (False, None, 3.0)
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


def test_weights_by_name() -> None:
    ones, twos = np.ones((2, 2), np.float32), np.full((2, 2), 2, np.float32)
    a = {"same": weight(ones), "a": weight(ones), "far": weight(ones), "near": weight(ones), "shape": weight(ones)}
    b = {
        "near": weight(ones + np.float32(0.5)),
        "b": weight(twos),
        "far": weight(twos),
        "same": weight(ones),
        "shape": weight(np.ones((2, 3), np.float32)),
    }
    found = compare_weights(a, b, silent)
    assert (found.both, found.equal) == (4, 1)
    assert found.only_a == (("a", "f32[2,2]"),) and found.only_b == (("b", "f32[2,2]"),)
    assert [(m.name, m.relative) for m in found.moved] == [("shape", None), ("far", 1.0), ("near", 0.5)]


def test_equal_digests_are_not_read() -> None:
    def read() -> Array:
        raise AssertionError("read")

    a = {"w": Weight("f32", (4,), read, "digest")}
    assert not compare_weights(a, dict(a), silent).differ
    with pytest.raises(AssertionError):
        compare_weights(a, {"w": Weight("f32", (4,), read, "another")}, silent)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("plan") / "small.plan"
    small_plan.write(path)
    return open_plan(path)


def other(small: Plan, program: Program) -> Plan:
    return replace(small, program=program, plan_id="0" * 64)


def test_launches_that_are_equal(small: Plan) -> None:
    found = compare_launches(small, other(small, small.program))
    assert not found.differ and found.whole == Changed("one inference", 10, 10)
    assert {s.name: s.launches.a for s in found.stages} == {"in": 4, "step": 2}


def test_a_call_that_vanishes_and_one_with_another_grid(small: Plan) -> None:
    program = small.program
    first, step = program.stages
    call = step.calls[1]
    moved = replace(call, launches=(replace(call.launches[0], grid=(2, 1, 1)),))
    stages = (Stage("in", first.calls[:2]), Stage("step", (step.calls[0], moved)), Stage("new", ()))
    found = compare_launches(small, other(small, replace(program, stages=stages)))
    one, two, new = found.stages
    assert found.whole == Changed("one inference", 10, 9) and not new.differs
    assert one.ops == (Changed("add", 1, 0),) and one.kernels == (Changed("small_add", 1, 0),) and not one.retiled
    (retiled,) = two.retiled
    assert (retiled.op, retiled.calls, retiled.first) == ("linear", 1, "step.1") and not two.ops
    assert retiled.a == "small_linear, grid 1x1x1 of 64" and retiled.b == "small_linear, grid 2x1x1 of 64"


def test_stages_that_overlap_in_one_of_them(small: Plan) -> None:
    overlap = Overlap(("in", "step"), ((), (), (0, 1), (2,), (3,)))
    found = compare_launches(small, other(small, replace(small.program, overlap=overlap)))
    assert found.differ and found.overlap == Changed("stages that overlap", 0, 2)


def test_an_op_that_appears(small: Plan) -> None:
    first, step = small.program.stages
    call = replace(first.calls[2], op="mul", launches=(*first.calls[2].launches, Launch(2, (1, 1, 1), 64, 0, ())))
    stages = (Stage("in", (*first.calls[:2], call)), step)
    found = compare_launches(small, other(small, replace(small.program, stages=stages)))
    assert found.stages[0].ops == (Changed("add", 1, 0), Changed("mul", 0, 1))
    assert found.stages[0].launches == Changed("in", 4, 5)


def test_memory_by_part(small: Plan) -> None:
    more = replace(small.program, arena_nbytes=small.program.arena_nbytes + 100)
    rows = {c.name: c.b - c.a for c in compare_memory(small.program, more)}
    assert rows == {"weights": 0, "scratch": 100, "states": 0, "together": 100}


@pytest.mark.parametrize(
    ("symbol", "shown"),
    [
        ("_ZN4frtc9pointwiseEPKhPf", "pointwise"),
        (
            "_ZN4frtc9smxx_gemmI13__nv_bfloat16NS_4TileILi16ELi64ELi64ELi16ELi16ELi8EEENS_8EpilogueIS1_NS_4NoneES5_S5_"
            "LNS_3ActE0ELb0EEELb0ELb0EEEvPKT_SA_PKNT1_8BiasTypeE",
            "smxx_gemm 16 64 64 16 16 8",
        ),
        ("_ZN4frtc11gather_rowsILi8ELi128E13__nv_bfloat16iS1_EEvPKT1_PKT2_PT3_iiiif", "gather_rows 8 128"),
        ("small_linear", "small_linear"),
    ],
)
def test_the_gist_of_a_symbol(symbol: str, shown: str) -> None:
    assert gist(symbol) == shown


def test_names_of_a_policy_and_of_records() -> None:
    norm = Norm("lerobot_mean_std", (1.0, 2.0), (3.0, 4.0))
    policy = Policy((State(2, norm),), (Slice(5, 2),))
    named = dict(flat_policy(policy))
    assert named["state.norm.std_or_high[1]"] == 4.0 and named["slice.horizon"] == 5
    assert dict(flat({"a": norm})) == {
        "a.rule": "lerobot_mean_std", "a.mean_or_low": (1.0, 2.0), "a.std_or_high": (3.0, 4.0), "a.eps": 0.0
    }  # fmt: skip


def test_what_a_file_is(small: Plan, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed.safetensors"
    renamed.write_bytes(small.path.read_bytes())
    assert is_plan(renamed) and open_side(renamed, PolicyOptions()).kind == "Plan"
    assert not is_plan(tmp_path) and not is_plan(tmp_path / "none")
    (tmp_path / "text").write_text("a text")
    with pytest.raises(FrtcError, match="not a safetensors file"):
        open_side(tmp_path / "text", PolicyOptions())


def test_plans_without_policy_and_with_damaged_evidence(small: Plan, tmp_path: Path) -> None:
    """Weights are compared, nothing is run; evidence of any form is no fault."""
    for i, evidence in enumerate(
        ({"source": [1]}, {"source": {"facts": [3, {"name": "x", "value": 1}]}, "options": 5})
    ):
        made = replace(small.program, arena_nbytes=small.program.arena_nbytes + 256 * (i + 1))
        small_plan.write(tmp_path / f"{i}.plan", made, evidence)
    found = diff(tmp_path / "0.plan", tmp_path / "1.plan")
    assert found.differing == ("config", "memory", "program") and found.policy is None and found.numbers is None
    assert found.weights is not None and (found.weights.both, found.weights.equal) == (4, 4)
    assert [note for note in found.notes if "policy" in note]


@pytest.mark.parametrize("kind", ["pi05", "pi0", "smolvla"])
def test_the_policy_of_a_checkpoint_is_known_without_tracing(kind: str, tmp_path: Path) -> None:
    """Its sizes are those of the model's stages, device inputs among them."""
    write_checkpoint(tmp_path / "ck", "lerobot", "tiny", kind=kind)
    side = open_side(tmp_path / "ck", PolicyOptions())
    assert side.policy is not None and not side.notes
    module = import_module(open_model(tmp_path / "ck", CompileOptions()))
    wanted = {name: (str(type.dtype), type.shape) for name, type in module.inputs.items()}
    assert side.policy.device_inputs() == wanted and side.model == kind


def test_what_an_adapter_changes(tmp_path: Path) -> None:
    """The weight that it targets, by the size of its product; the rest is equal."""
    write_checkpoint(tmp_path / "base", "openpi", "tiny", dtype="f32")
    a, b = np.full((2, 64), 0.5, np.float32), np.full((192, 2), 0.25, np.float32)
    (name, shape) = ("paligemma_with_expert.gemma_expert.model.norm.dense", (192, 64))
    (tmp_path / "lora").mkdir()
    tensors = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [name]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    found = diff(tmp_path / "base", tmp_path / "base", Options(adapter=tmp_path / "lora"))
    assert found.weights is not None and found.differing == ("config", "weights")
    (moved,) = found.weights.moved
    norm = float(np.linalg.norm(open_checkpoint(tmp_path / "base").read(f"{name}.weight").astype(np.float64)))
    assert (moved.name, moved.a, moved.b) == ("denoise.norm.dense.weight", "f32[192,64]", "f64[192,64]")
    relative = 0.5 * math.sqrt(math.prod(shape)) / norm
    assert moved.largest == pytest.approx(0.5) and moved.relative == pytest.approx(relative)
    assert {c.name for c in found.config[1]} == {"adapter", "adapter_base"}


@pytest.fixture
def changed_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    values = small_plan.weights()
    values["w1"][2, 3] += 1
    monkeypatch.setattr(small_plan, "weights", lambda: values)
    small_plan.write(tmp_path / "changed.plan")
    yield tmp_path / "changed.plan"


def test_a_padded_weight_of_a_plan(small: Plan, changed_weight: Path) -> None:
    """Rows of 10 floats are stored as 12: what is compared is the logical weight."""
    found = diff(small.path, changed_weight)
    assert found.weights is not None and [m.name for m in found.weights.moved] == ["w1"]
    (moved,) = found.weights.moved
    assert moved.a == "f32[4,10]" and moved.largest == pytest.approx(1)
    assert moved.relative == pytest.approx(
        1 / np.linalg.norm(open_side(small.path, PolicyOptions()).weights["w1"].array())
    )
