"""The harness itself: what it calls wrong is wrong, also where nothing was written or too much was."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from frtc.kernels.dtypes import round_to
from frtc.kernels.spec import Operand
from tests.kernels.harness import (
    GUARD,
    Case,
    chosen,
    code_faults,
    difference,
    expected,
    faults,
    fresh,
    operands_of,
    place,
    stray_bytes,
    write_rows,
)
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
