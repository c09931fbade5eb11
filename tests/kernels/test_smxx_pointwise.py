"""Generated elementwise kernels: their text, types and groups; on a GPU every op, type and view."""

from __future__ import annotations

from collections import Counter

import pytest

from frtc.codegen.nvrtc import Job, compile_one
from frtc.codegen.render import source_of
from frtc.kernels import smxx_pointwise
from frtc.kernels.cubin import operations_of
from frtc.kernels.smxx_pointwise import (
    COMPARE,
    FLOAT,
    KERNELS,
    LOGIC,
    SAME,
    VALUES,
    configs,
    describe,
    refuse,
    stages,
    steps_of,
)
from frtc.kernels.spec import Operand, Site
from frtc.lowering.ops import POINTWISE
from tests.kernels.device import Gpu
from tests.kernels.harness import TARGET, Case, bits, check, check_fails, chosen, every_config, once, sabotaged, swept
from tests.kernels.sites_pointwise import (
    angles,
    awkward_sites,
    copy,
    euler,
    inputs,
    packed,
    patches,
    program,
    real_sites,
)

FORM = 0x1FF  # of an operation of machine code, what is left without the kinds of its operands
ARITHMETIC = {0x20, 0x21, 0x23, 0x28, 0x29, 0x2B}  # FMUL, FADD, FFMA, DMUL, DADD, DFMA

EULER = """\
// y0 = add(x0, mul(x1, -0.5))
#include "smxx_pointwise.cuh"

namespace frtc {

// One thread per group of 8 neighbours along the last of the axes 320.
__global__ void __launch_bounds__(256) pointwise(const float* in0, const __nv_bfloat16* in1, float* out0) {
    grid_wait(), grid_release();
    int rest = blockIdx.x * 256 + threadIdx.x;
    if (rest >= 40) return;
    const int i0 = rest % 40 * 8;
    rest /= 40;
    float x0[8];
    fetch<1>(x0, in0 + i0);
    float x1[8];
    fetch<1>(x1, in1 + i0);
    float y0[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float t0 = -0.5f;
        const float t1 = op::mul(x1[j], t0);
        const float t2 = op::add(x0[j], t1);
        y0[j] = t2;
    }
    put<1>(out0 + i0, y0);
}

}  // namespace frtc
"""


def test_text() -> None:
    x = packed("f32", 10, 32)
    site = program([x, packed("bf16", 10, 32)], [x], (("const", -0.5), ("mul", 1, 2), ("add", 0, 3)))
    (stage,) = stages(site, {"VEC": 8}, TARGET)
    assert source_of(stage) == EULER
    assert (stage.entry, stage.grid, stage.block) == ("frtc::pointwise", (1, 1, 1), 256)


def test_every_pointwise_op_has_a_device_function() -> None:
    assert {"where", "cast"} | COMPARE | FLOAT | LOGIC | SAME == POINTWISE - {"pointwise"}


def test_arguments_meet_in_a_common_type() -> None:
    texts = [
        (v.register, v.text)
        for v in steps_of((("add", 0, 1), ("div", 0, 1), ("lt", 0, 2)), ["int", "long long", "float"])
    ]
    assert texts == [
        ("long long", "op::add(static_cast<long long>(x0[j]), x1[j])"),
        ("float", "op::div(static_cast<float>(x0[j]), static_cast<float>(x1[j]))"),
        ("bool", "op::lt(static_cast<float>(x0[j]), x2[j])"),
    ]


def test_literals() -> None:
    texts = [steps_of((("const", value),), [])[0].text for value in (True, 7, 2**40, 0.1, float("inf"))]
    assert texts == ["true", "7", "1099511627776ll", "0.10000000149011612f", "__uint_as_float(0x7f800000u)"]


def test_groups_divide_the_last_axis() -> None:
    assert [config["VEC"] for config in configs(euler(10), TARGET)] == [4, 2, 1]
    assert [config["VEC"] for config in configs(patches(1), TARGET)] == [2, 1]
    assert [config["VEC"] for config in configs(copy((5, 1001), (1008, 1), (1016, 1)), TARGET)] == [1]


def test_images_become_patches_in_five_axes() -> None:
    assert smxx_pointwise.layout_of(patches(3)).shape == (48, 16, 3, 14, 14)


def test_description() -> None:
    site = program([packed("i32", 4)], [packed("bf16", 4)], (("cast", 0, "f32"), ("const", 2.0), ("mul", 1, 2)))
    assert describe(site) == "y0 = mul(f32(x0), 2.0)"


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (copy((4,), (1,), dtype="e4m3"), "element type e4m3"),
        (program([packed("f32", 4)], [packed("f32", 4)], (("cosh", 0),)), "no device function for cosh"),
        (program([packed("f32", 4)], [packed("f32", 4)], (("cast", 0, "f64"),)),
         "a cast to an element type that kernels do not store"),
        (program([Operand("f32", (3, 4), (2**30, 1))], [packed("f32", 3, 4)]), "offsets beyond 2^31"),
        (program([packed("f32", 8, 3), packed("f32", 3)], [packed("f32", 8, 3)] * 2, (("mul", 0, 1), ("sin", 0)),
                 (2, 3)),
         "groups of 1, where one of the results alone has groups of 4"),
        (program([packed("bf16", 40)], [packed("bf16", 40)] * VALUES, (), (0,) * VALUES),
         f"{VALUES} results and 1 operands are more than {VALUES} values in registers"),
    ],
)  # fmt: skip
def test_refusals(site: Site, reason: str) -> None:
    assert refuse(site, TARGET) == reason


def many(results: int) -> Site:
    """Each result reads every operand, all of them VALUES values."""
    operands = [packed("bf16", 40, 64)] * (VALUES - results)
    sums = [("add", i, i + 1) for i in range(len(operands) - 1)]
    steps = [("mul", i % len(operands), len(operands) + len(sums) - 1) for i in range(results)]
    values = range(VALUES - results + len(sums), VALUES + len(sums))
    return program(operands, [packed("bf16", 40, 64)] * results, (*sums, *steps), values)


def test_several_results_stay_in_registers() -> None:
    for site in (many(2), many(VALUES // 2), many(VALUES - 2)):
        assert refuse(site, TARGET) == "" and configs(site, TARGET)[0] == {"VEC": 8}
        (stage,) = stages(site, {"VEC": 8}, TARGET)
        assert compile_one(Job.of(stage, TARGET)).resources.local == 0


@pytest.mark.parametrize("vec", [1, 4])
def test_results_beside_each_other_cost_the_arithmetic_of_one(vec: int) -> None:
    """Cosine and sine of the same angle differ in the quadrant alone: the floating-point instructions are the same."""
    together, *alone = (floats(angles(50, *ops), vec) for ops in (("cos", "sin"), ("cos",), ("sin",)))
    assert together.total() > 10 * vec and alone == [together, together]


def floats(site: Site, vec: int) -> Counter[int]:
    """How often the kernel has each instruction of ARITHMETIC."""
    (stage,) = stages(site, {"VEC": vec}, TARGET)
    cubin = compile_one(Job.of(stage, TARGET))
    return Counter(op for op in operations_of(cubin.image, cubin.symbol) if op & FORM in ARITHMETIC)


CHOSEN = [chosen(site, inputs=inputs) for site in (*real_sites(), *awkward_sites())]
OTHERS = [
    case
    for site, best in zip(real_sites(), CHOSEN, strict=False)
    for case in every_config(site, inputs=inputs)
    if case.config != best.config
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", swept([*CHOSEN, *OTHERS], [*CHOSEN, *once(OTHERS)]), ids=str)
def test_pointwise(gpu: Gpu, case: Case) -> None:
    check(gpu, case)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [10, 50])
def test_results_beside_each_other_are_those_of_each_alone(gpu: Gpu, chunk: int) -> None:
    """To the bit, whatever the groups."""
    for config in configs(angles(chunk, "cos"), TARGET):
        together, *alone = (
            bits(gpu, Case(angles(chunk, *ops), KERNELS[0], config, inputs))
            for ops in (("cos", "sin"), ("cos",), ("sin",))
        )
        assert together == {b"".join(one for found in alone for one in found)} and alone[0] != alone[1]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [sabotaged(chosen(euler(10)), "FRTC_SABOTAGE_LAST_ELEMENT")], ids=str)
def test_pointwise_sabotaged(gpu: Gpu, case: Case) -> None:
    check_fails(gpu, case)
