"""Noise: published known answers for the words, the exact quantile for the normals, and bits that may never change."""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest

from frtc.runtime import noise
from frtc.runtime.noise import exact_log, normal, philox4x32, probit

ONES = 0xFFFFFFFF
KNOWN = [  # Random123 1.14, tests/kat_vectors, philox4x32 10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    words = philox4x32([np.array([c], np.uint64) for c in counter], key)
    assert tuple(int(w[0]) for w in words) == want


def test_probit_is_the_normal_quantile() -> None:
    edges = [2.0**-33, 2.0**-32 * 1.5, 0.075, 0.0749999, 0.5, 0.925, 1 - 2.0**-33]
    p = np.concatenate([edges, np.random.default_rng(0).random(5000), np.geomspace(2.0**-33, 0.1, 500)])
    exact = np.array([NormalDist().inv_cdf(x) for x in p])
    np.testing.assert_allclose(probit(p), exact, rtol=2e-15, atol=1e-16)
    assert np.array_equal(probit(1 - edges_down(p)), -probit(edges_down(p))), "odd about 1/2 to the bit"


def edges_down(p: np.ndarray) -> np.ndarray:
    """p rounded to odd multiples of 2**-33, what words give: 1 - p is exact."""
    return (np.floor(p * 2.0**32) + 0.5) * 2.0**-32


def test_log_needs_no_libm() -> None:
    p = np.concatenate([np.geomspace(2.0**-33, 1.0, 3001), [math.sqrt(0.5), 0.5, 0.25, 0.7071067811865475]])
    np.testing.assert_allclose(exact_log(p), np.log(p), rtol=1e-15, atol=1e-17)


def test_moments_and_tails() -> None:
    z = normal(7, 0, (1_000_000,)).astype(np.float64)
    assert abs(z.mean()) < 3e-3 and abs(z.var() - 1) < 5e-3  # three standard errors are 3e-3 and 4.2e-3
    assert abs((z**3).mean()) < 1.2e-2 and abs((z**4).mean() - 3) < 5e-2
    for limit in (1.0, 2.0, 3.0, 4.0):
        share, want = (np.abs(z) > limit).mean(), math.erfc(limit / math.sqrt(2))
        assert abs(share - want) < 4 * math.sqrt(want / len(z)), limit
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 4e-3


def test_bits_never_change() -> None:
    """This digest is part of the Plan format: other ports reproduce it."""
    z = normal(0x0123456789ABCDEF, (5 << 32) + 9, (50, 32))
    assert z.dtype == np.float32 and z.shape == (50, 32)
    assert (
        hashlib.sha256(z.astype("<f4").tobytes()).hexdigest()
        == "2209cb951c8ee3ab00838dad3bb6111e311f8ddffd42ddad3e0ced39a831f6ce"
    )


def test_draws_and_seeds_differ_and_shapes_are_prefixes() -> None:
    first = normal(1, 0, (10, 32))
    assert np.array_equal(normal(1, 0, (3, 5)).ravel(), first.ravel()[:15])
    others = [
        normal(1, 1, (10, 32)),
        normal(2, 0, (10, 32)),
        normal(1 << 32, 0, (10, 32)),
        normal(1, 1 << 32, (10, 32)),
    ]
    assert all(not np.intersect1d(first, other).size > 2 for other in others)


def scalar_normal(seed: int, draw: int, k: int) -> np.float32:
    """Element k by the text of noise.py in Python's own integers and doubles: what a C port would do."""
    mask = ONES
    x, key = [k // 4, 0, draw & mask, draw >> 32], [seed & mask, seed >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [right >> 32 ^ x[1] ^ key[0], right & mask, left >> 32 ^ x[3] ^ key[1], left & mask]
        key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
    p = (x[k % 4] + 0.5) * 2.0**-32
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return np.float32(q * poly(noise.CENTRE_NUM, r) / poly(noise.CENTRE_DEN, r))
    m, e = math.frexp(min(p, 1.0 - p))
    m, e = (m * 2.0, e - 1) if m < noise.SQRT_HALF else (m, e)
    s = (m - 1.0) / (m + 1.0)
    r = math.sqrt(-(e * noise.LN2 + s * poly(noise.LOG_SERIES, s * s))) - 1.6
    z = poly(noise.TAIL_NUM, r) / poly(noise.TAIL_DEN, r)
    return np.float32(-z if q < 0 else z)


def poly(coefficients: tuple[float, ...], x: float) -> float:
    y = coefficients[0]
    for c in coefficients[1:]:
        y = y * x + c
    return y


def test_a_scalar_port_gives_the_same_bits() -> None:
    z = normal(2**63 + 5, 2**40 + 3, (3, 700)).ravel()
    again = np.array([scalar_normal(2**63 + 5, 2**40 + 3, k) for k in range(z.size)])
    assert z.tobytes() == again.tobytes()
