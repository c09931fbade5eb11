"""Tensor maps: what the driver is asked to encode, what is encoded again, and what a reader refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from frtc.codegen.nvrtc import Job, compile_all
from frtc.codegen.plan_writer import write_manifest
from frtc.errors import EnvironmentFault, FrtcError
from frtc.kernels.cubin import parameters_of, waits
from frtc.kernels.targets import load_targets
from frtc.runtime.driver import Driver
from frtc.runtime.emulator import Emulator
from frtc.runtime.manifest import File, Manifest
from frtc.runtime.plan import Launch, Program, Ref, Slot, TensorMap
from frtc.runtime.plan_file import open_plan
from frtc.runtime.session import Session
from frtc.runtime.validate import check_cubins, check_manifest
from tests.runtime import map_plan, small_plan
from tests.runtime.map_plan import M, N
from tests.runtime.null_driver import NullApi
from tests.runtime.test_session import OnGpu

INTERLEAVE, FILL = cu.CUtensorMapInterleave(0), cu.CUtensorMapFloatOOBfill(0)
FILES = (File("cubin.000", 1),)
TYPE, SWIZZLE, WIDTH = cu.CUtensorMapDataType, cu.CUtensorMapSwizzle, cu.CUtensorMapL2promotion


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "maps.plan"
    map_plan.write(path)
    return path


@pytest.fixture
def api() -> NullApi:
    return map_plan.null_api()


@pytest.fixture
def session(path: Path, api: NullApi) -> Session:
    return Session(open_plan(path), driver=Driver(api=api))


def encodings(api: NullApi) -> list[tuple[Any, ...]]:
    """Arguments of every encoding, numbers as numbers."""
    return [tuple([int(n) for n in a] if isinstance(a, list) else a for a in found) for found in api.maps]


def test_what_is_encoded(session: Session, api: NullApi) -> None:
    """Both maps of each round, from the addresses at hand; the kernel gets each one's 128 bytes by value."""
    session.warm()
    x, table = session.addresses["slotx"], session.addresses["weights"]
    rest = (INTERLEAVE, SWIZZLE(0), WIDTH.CU_TENSOR_MAP_L2_PROMOTION_L2_128B, FILL)
    f32 = TYPE.CU_TENSOR_MAP_DATA_TYPE_FLOAT32
    of_x = (f32, 2, x, [12, 3], [48], [16, 4], [1, 1], *rest)
    of_rows = [(f32, 1, table + 48 * k, [12], [16], [16], [1], *rest) for k in range(3)]
    assert encodings(api) == [of_x, of_rows[0], of_x, of_rows[1], of_x, of_rows[2]]
    nodes = session.graphs[""].executable.nodes
    assert [kernel.arguments[:2] for *_, kernel in nodes] == [[0, 1], [2, 3], [4, 5]]


def test_maps_follow_slots_and_rounds(session: Session, api: NullApi) -> None:
    session.warm()
    session.bind("x", OnGpu(0xABC000, (3, 12)))
    assert [found[2] for found in api.maps[6::2]] == [0xABC000] * 3
    session.run_stage("step", 0)
    before = len(api.maps)
    session.run_stage("step", 2)
    assert [found[2] for found in api.maps[before:]] == [0xABC000, session.addresses["weights"] + 96]
    (node,) = session.graphs["step"].executable.nodes
    assert api.kernels[node[0]].arguments[:2] == [before, before + 1]


@pytest.mark.parametrize(
    ("dtype", "bytes_of_row", "swizzle", "type", "promotion"),
    [
        ("e4m3", 128, 128, "UINT8", "L2_128B"),
        ("bf16", 2048, 64, "BFLOAT16", "L2_256B"),
        ("f16", 254, 32, "FLOAT16", "L2_128B"),
        ("f32", 256, 0, "FLOAT32", "L2_256B"),
    ],
)
def test_types_swizzles_and_promotion(
    api: NullApi, dtype: str, bytes_of_row: int, swizzle: int, type: str, promotion: str
) -> None:
    size = {"e4m3": 1, "bf16": 2, "f16": 2, "f32": 4}[dtype]
    Driver(api=api).encode(TensorMap(("operand", 0), dtype, (bytes_of_row // size,), (), (16,), swizzle), 0x1000)
    (found,) = api.maps
    assert found[0] is getattr(TYPE, f"CU_TENSOR_MAP_DATA_TYPE_{type}")
    assert found[8].name == f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle}B' if swizzle else 'NONE'}"
    assert found[9].name == f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"


def test_the_emulator_sees_operands(path: Path) -> None:
    emulator = Emulator(open_plan(path))
    emulator.set("x", map_plan.inputs()["x"])
    emulator.run()
    assert np.array_equal(emulator.get("y"), map_plan.inputs()["x"] * map_plan.table()[2])


def test_fields_that_are_not_used_are_not_written() -> None:
    """Plans without maps and early launches have the text and the plan_id that they had."""
    text, _ = write_manifest(Manifest(small_plan.program(), (), ()))
    assert "tensormaps" not in text and "early" not in text
    text, _ = write_manifest(Manifest(map_plan.program(), (), ()))
    assert '"early":true' in text and '"tensormaps":[{"of":["operand",0],"dtype":"f32","extents":[12,3]' in text


# ---- hostile maps ----------------------------------------------------------------------------------------------------


def changed(
    launch: Callable[[Launch], Launch], ref: Callable[[Ref], Ref] = lambda ref: ref, target: str = "hopper"
) -> Program:
    """The program with another launch, and another Ref behind the first map."""
    made = map_plan.program(target)
    (stage,) = made.stages
    (call,) = stage.calls
    operands = tuple(ref(r) if r and i == 0 else r for i, r in enumerate(call.operands))
    call = replace(call, operands=operands, launches=(launch(call.launches[0]),))
    return replace(made, stages=(replace(stage, calls=(call,)),))


def mapped(**fields: Any) -> Callable[[Launch], Launch]:
    return lambda launch: replace(launch, tensormaps=(replace(launch.tensormaps[0], **fields), launch.tensormaps[1]))


def named(value: float) -> Callable[[Launch], Launch]:
    return lambda launch: replace(launch, params=(("tensormap", value), *launch.params[1:]))


RULES: dict[str, tuple[Callable[[Launch], Launch], str]] = {
    "no such kind": (mapped(of=("scratch", 0)), "tensor map 0: of scratch 0, which the call does not have"),
    "no such operand": (mapped(of=("operand", 2)), "of operand 2, which the call does not have"),
    "negative operand": (mapped(of=("operand", -1)), "of operand -1"),
    "no such result": (mapped(of=("result", 1)), "of result 1"),
    "type": (mapped(dtype="i64"), "element type 'i64'"),
    "no axes": (mapped(extents=(), strides=(), box=()), "0 extents"),
    "six axes": (mapped(extents=(4,) * 6, strides=(16,) * 5, box=(4,) * 6), "6 extents, 5 strides, box of 6"),
    "too few strides": (mapped(strides=()), "2 extents, 0 strides"),
    "short box": (mapped(box=(16,)), "box of 1"),
    "empty": (mapped(extents=(12, 0)), "extents [12, 0]"),
    "huge": (mapped(extents=(12, 1 << 33)), "extents [12,"),
    "stride of 40 bytes": (mapped(strides=(40,)), "strides [40]"),
    "stride backwards": (mapped(strides=(-48,)), "strides [-48]"),
    "stride too long": (mapped(strides=(1 << 40,)), "strides [1099511627776]"),
    "empty box": (mapped(box=(16, 0)), "box [16, 0]"),
    "long box": (mapped(box=(16, 257)), "box [16, 257]"),
    "ragged box": (mapped(box=(6, 4)), "box [6, 4]"),
    "swizzle": (mapped(swizzle=16), "rows of 64 bytes in a box, swizzled by 16"),
    "row over swizzle": (mapped(swizzle=32), "rows of 64 bytes in a box, swizzled by 32"),
    "a row too many": (mapped(extents=(12, 4)), "192 bytes, its operand has 144"),
    "an element too many": (mapped(extents=(13, 3)), "148 bytes, its operand has 144"),
    "wide stride": (mapped(strides=(64,)), "176 bytes, its operand has 144"),
    "no such map": (named(2), "tensormap parameter 2"),
    "map by a float": (named(0.0), "tensormap parameter 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    change, what = RULES[rule]
    with pytest.raises(FrtcError) as caught:
        check_manifest(Manifest(changed(change), FILES, ()))
    assert caught.value.code == "plan.invalid" and what in caught.value.what, caught.value


def test_the_sound_program_passes() -> None:
    check_manifest(Manifest(map_plan.program(), FILES, ()))


@pytest.mark.parametrize("field", ["offset", "step"])
def test_maps_start_at_multiples_of_16(field: str) -> None:
    made = changed(mapped(extents=(8, 3), box=(8, 3)), lambda ref: replace(ref, shape=(M, 8), **{field: 8}))
    with pytest.raises(FrtcError, match="no multiples of 16"):
        check_manifest(Manifest(replace(made, inputs=(Slot("x", "f32", (8, 12)),)), FILES, ()))


def test_the_step_keeps_a_map_inside_its_ref() -> None:
    """A map fits one round of its Ref, though the Ref's rounds together are three times as long."""
    rows = replace(
        map_plan.program().stages[0].calls[0].launches[0].tensormaps[1], extents=(N, 3), strides=(48,), box=(N, 3)
    )
    made = changed(lambda launch: replace(launch, tensormaps=(launch.tensormaps[0], rows)))
    with pytest.raises(FrtcError, match="tensor map 1: 144 bytes, its operand has 48"):
        check_manifest(Manifest(made, FILES, ()))


def test_absent_operands_have_no_maps() -> None:
    made = changed(lambda launch: launch)
    (call,) = made.stages[0].calls
    absent = replace(call, op="linear", operands=(*call.operands, None), launches=call.launches)
    launch = replace(call.launches[0], tensormaps=(replace(call.launches[0].tensormaps[0], of=("operand", 2)),) * 2)
    stage = replace(made.stages[0], calls=(replace(absent, launches=(launch,)),))
    with pytest.raises(FrtcError, match="of operand 2, which the call does not have"):
        check_manifest(Manifest(replace(made, stages=(stage,)), FILES, ()))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda launch: replace(launch, early=False), "tensor maps, which sm_89 does not have"),
        (lambda launch: replace(launch, tensormaps=(), params=launch.params[2:]), "an early launch, which sm_89"),
    ],
)
def test_old_gpus_have_neither(change: Callable[[Launch], Launch], what: str) -> None:
    with pytest.raises(FrtcError, match=what):
        check_manifest(Manifest(changed(change, target="rtx4090"), FILES, ()))


# ---- cubins ----------------------------------------------------------------------------------------------------------


def test_maps_are_128_bytes_of_parameters() -> None:
    image = map_plan.cubin()
    assert parameters_of(image, "small_box") == (128, 128, 8, 4, 4)
    check_cubins(map_plan.program(), {"cubin.000": image})
    pointer = changed(lambda launch: replace(launch, params=(("operand", 0), *launch.params[1:])))
    with pytest.raises(FrtcError, match=r"parameters of \(8, 128, 8, 4, 4\) bytes, the kernel takes \(128, 128"):
        check_cubins(pointer, {"cubin.000": image})


@pytest.mark.parametrize("target", [t.name for t in load_targets().values() if "pdl" in t.has])
def test_early_kernels_wait(target: str) -> None:
    """Whether a kernel waits is seen in its code, on every target that has early launches."""
    without = map_plan.SOURCE.replace("griddepcontrol.wait;", "griddepcontrol.launch_dependents;")
    about = load_targets()[target]
    image, careless = (compile_all([Job(s, "small_box", about)])[0].image for s in (map_plan.SOURCE, without))
    assert waits(image, "small_box") and not waits(careless, "small_box")
    made = map_plan.program(target)
    check_cubins(made, {"cubin.000": image})
    with pytest.raises(FrtcError, match="'small_box' does not wait, and a launch of it is early"):
        check_cubins(made, {"cubin.000": careless})
    late = replace(made, stages=changed(lambda launch: replace(launch, early=False), target=target).stages)
    check_cubins(late, {"cubin.000": careless})


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_boxes_on_a_gpu(tmp_path: Path) -> None:
    """Zeros outside of the matrix, rows that step, and slots that move, bit for bit what NumPy multiplies."""
    try:
        driver = Driver()
    except EnvironmentFault as fault:
        pytest.skip(f"no CUDA device: {fault.what}")
    driver.release()
    names = [t.name for t in load_targets().values() if t.sm == driver.device.sm and "tma" in t.has]
    if not names:
        pytest.skip(f"no tensor memory accelerator on sm_{driver.device.sm}")
    map_plan.write(tmp_path / "maps.plan", names[0])
    with Session(open_plan(tmp_path / "maps.plan")) as session:
        for seed in range(3):
            x = map_plan.inputs(seed)["x"]
            session.set("x", x)
            session.run()
            assert np.array_equal(session.get("y"), x * map_plan.table()[2])
            session.run_stage("step", seed)
            assert np.array_equal(session.get("y"), x * map_plan.table()[seed])
