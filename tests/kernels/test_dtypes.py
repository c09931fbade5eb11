"""Element types: float64 is rounded to 16 bits once, whatever lies between."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from frtc.kernels.dtypes import round_to
from frtc.kernels.reference.floats import widen

RNG = np.random.default_rng(0)


def test_bf16_beside_every_middle() -> None:
    """Float64 numbers on, just above and just below the middle of two bf16 numbers go to the right one of the two."""
    below = RNG.integers(0, 0x7F7F, 4096, dtype=np.uint16)  # positive finite numbers, subnormal ones too
    low, high = (b.view(ml_dtypes.bfloat16).astype(np.float64) for b in (below, below + np.uint16(1)))
    middle = (low + high) / 2
    for sign in (1, -1):
        for value, expected in (
            (np.nextafter(middle, 0), low),
            (np.nextafter(middle, np.inf), high),
            (middle, np.where(below % 2 == 0, low, high)),
        ):
            got = round_to(sign * value, "bf16")
            assert got.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(got.astype(np.float64), sign * expected)


def test_bf16_of_what_is_no_number() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1e300, -1e300, 0.0, -0.0, 1e-300])
    got = round_to(values, "bf16").astype(np.float64)
    np.testing.assert_array_equal(got, [np.inf, -np.inf, np.nan, np.inf, -np.inf, 0, 0, 0])
    assert np.signbit(got[[1, 4, 6]]).all()


def test_bf16_keeps_shape() -> None:
    values = RNG.standard_normal((5, 7, 3)).transpose(2, 0, 1)
    np.testing.assert_array_equal(round_to(values, "bf16"), round_to(np.ascontiguousarray(values), "bf16"))
    assert round_to(np.array(1.5), "bf16").shape == ()


def test_e4m3_is_widened_as_by_a_cast() -> None:
    codes = np.concatenate([np.arange(256, dtype=np.uint8), RNG.integers(0, 256, 44, dtype=np.uint8)])
    values = codes.reshape(12, 25).view(ml_dtypes.float8_e4m3fn)
    for view in (values, values.T, values[::2, 1::3], values[:, ::-1], values[0], values[:0], values[0, 0]):
        wide = widen(view)
        assert wide.dtype == np.float32
        np.testing.assert_array_equal(wide, view.astype(np.float32))
