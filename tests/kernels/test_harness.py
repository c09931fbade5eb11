"""The harness itself: what it calls wrong is wrong, also where nothing was written or too much was."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from frtc.kernels.dtypes import round_to
from frtc.kernels.spec import Operand
from tests.kernels import sites_finish
from tests.kernels.harness import (
    GUARD,
    PERIOD,
    Case,
    chosen,
    code_faults,
    difference,
    distinct,
    every_config,
    expected,
    faults,
    fresh,
    in_turn,
    judged_as,
    once,
    operands_of,
    place,
    stray_bytes,
    swept,
    write_rows,
)
from tests.kernels.sites_finish import linear_norm
from tests.kernels.sites_gemm import linear
from tests.kernels.sites_moments import producer
from tests.kernels.sites_pointwise import copy, packed, program
from tests.kernels.sites_rows import rms_norm

STRIDED = Operand("bf16", (3, 5), (8, 1))


def case_of(dtype: str) -> Case:
    return chosen(program([packed("f32", 40, 50)], [packed(dtype, 40, 50)], (("neg", 0),)))


def test_difference() -> None:
    ones = np.ones((4, 4))
    assert difference(ones, ones) == (0.0, 0.0)
    assert difference(1.01 * ones, ones) == pytest.approx((0.01, 0.01))
    one_row = ones.copy()
    one_row[2] = 1.1
    assert difference(one_row, ones) == pytest.approx((0.05, 0.1))
    infinite = np.full((2, 2), -np.inf)
    assert difference(infinite, infinite) == (0.0, 0.0)
    for bad in (np.full((4, 4), np.nan), np.full((4, 4), np.inf)):
        assert min(difference(bad, ones)) > 1e300
    assert min(difference(ones, np.zeros((4, 4)))) > 1e300


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "bool", "i32"])
def test_poisoned_outputs_are_faults(dtype: str) -> None:
    case = case_of(dtype)
    want = expected(case, operands_of(case))
    assert faults(case, want, want) == ([], 0.0)
    poisoned = [np.full(w.shape, 0xFF, np.uint8).repeat(w.itemsize, -1).view(w.dtype).reshape(w.shape) for w in want]
    assert faults(case, poisoned, want)[0]


def test_one_wrong_element_of_a_row_is_a_fault() -> None:
    case = case_of("f32")
    want = expected(case, operands_of(case))
    got = [w.copy() for w in want]
    got[0][7, 3] *= 1.01
    assert faults(case, got, want)[0]


def test_e4m3_is_judged_by_codes() -> None:
    """Neighbours of a few, never far ones, and no shift of all: a factor of 1.05 moves many by one code."""
    values = np.random.default_rng(0).standard_normal(5000, np.float32)
    want = round_to(values, "e4m3")
    off = want.copy()
    assert code_faults(off, want) == ("", 0.0)
    off.view(np.uint8)[:500] ^= 1
    assert code_faults(off, want) == ("", pytest.approx(0.1))
    for far, count in ((2, 6), (4, 1)):
        off = want.copy()
        near = np.abs(values) > 0.1
        off.view(np.uint8)[np.flatnonzero(near)[:count]] += far
        assert code_faults(off, want)[0]
    assert code_faults(round_to(values * 1.05, "e4m3"), want)[0]
    assert code_faults(-want, want)[0]
    assert code_faults(np.full(want.shape, 0xFF, np.uint8).view(want.dtype), want)[0], "poison"
    zeros = np.zeros(3, want.dtype)
    assert code_faults(-zeros, zeros) == ("", 0.0)


def test_norms_of_sums_are_judged_as_the_sums_are_stored() -> None:
    """In f32 behind a 16-bit s by the bar of s; a norm that stands alone by its own."""
    behind, alone = linear_norm(5, 64, 64, "rms", "f16", y="f32"), rms_norm(5, 64, y="f32")
    assert [judged_as(behind, index) for index in (0, 1)] == ["f16", "f16"]
    assert judged_as(linear_norm(5, 64, 64, "rms", y="f16"), 1) == "f16" and judged_as(alone, 0) == "f32"
    assert [judged_as(producer(5, 64, 64, "rms"), index) for index in range(3)] == ["bf16"] * 3
    for site, inputs, passes in ((behind, sites_finish.inputs, True), (alone, None, False)):
        case = chosen(site, inputs=inputs)
        want = expected(case, operands_of(case))
        near, far = ([*want[:-1], want[-1] * np.float32(factor)] for factor in (1 + 1e-4, 1.01))
        assert (not faults(case, near, want)[0]) == passes and faults(case, far, want)[0]


def test_each_config_is_run_once_and_the_rest_is_for_full_runs() -> None:
    cases = [*every_config(linear(130, 200, 1000)), *every_config(linear(50, 200, 1000))]
    each, tiles = once(cases), once(cases, splits=1)
    configs = [tuple(case.config.items()) for case in each]
    assert len(configs) == len(set(configs)) and set(configs) == {tuple(case.config.items()) for case in cases}
    assert {case.site.operands[0].shape[0] for case in each if case.site.operands[0]} == {50, 130}
    assert len(tiles) == len({tuple((k, v) for k, v in config if k != "SPLITS") for config in configs}) < len(each)
    params = swept(cases, tiles)
    left = [p for p in params if not isinstance(p, Case)]
    assert len(params) == len(cases) and len(params) - len(left) == len(tiles)
    assert all([mark.name for mark in p.marks] == ["full"] for p in left)


def test_one_case_of_each_kernel() -> None:
    cases = [chosen(rms_norm(m, n)) for m, n in ((5, 64), (9, 64), (5, 128), (7, 128))]
    assert {id(case) for case in distinct(cases)} == {id(cases[0]), id(cases[2])}
    assert in_turn([1, 2, 3, 4, 5, 6]) == [1, 4, 5]


def test_large_operands_repeat_their_rows() -> None:
    operand = packed("bf16", 3, 700, 2048)
    rows = fresh(operand, np.random.default_rng(0), 0.5).reshape(-1, 2048).astype(np.float32)
    assert np.array_equal(rows[:-PERIOD], rows[PERIOD:]) and len(np.unique(rows[:, 0])) > 200
    quiet = rows.std(0) < 5
    assert (~quiet).sum() == 20 and rows[:, quiet].std() == pytest.approx(0.5, rel=0.01)


def test_stray_bytes() -> None:
    raw = place(STRIDED, fresh(STRIDED, np.random.default_rng(0)))
    assert stray_bytes(raw, STRIDED) == 0
    raw[0] = 0  # guard
    raw[GUARD + 2 * 5] = 0  # gap after the first row
    assert stray_bytes(raw, STRIDED) == 2


def test_channels_stand_out() -> None:
    x = fresh(packed("f32", 200, 300), np.random.default_rng(0))
    assert (x.std(0) > 10).sum() == 3


def test_repeated_axes_hold_one_value() -> None:
    (x,) = operands_of(chosen(copy((8, 6), (0, 1), (16, 1))))
    assert x is not None and (x == x[0]).all()


def test_inputs_are_the_same_each_time_and_differ_between_cases() -> None:
    one, again, other = (operands_of(chosen(rms_norm(m, 64)))[0] for m in (5, 5, 6))
    assert np.array_equal(one, again) and not np.array_equal(one, other[:5])  # type: ignore[arg-type, index]


def test_written_rows_name_device_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("FRTC_COMMIT", "abc")
    written = json.loads(write_rows("some.json", [{"us": 1.5}], pytestconfig, "a GPU").read_text())
    command = shlex.split(written.pop("command"))
    assert written == {"device": "a GPU", "commit": "abc", "rows": [{"us": 1.5}]}
    assert command == ["python3", "-m", "pytest", *pytestconfig.invocation_params.args]
