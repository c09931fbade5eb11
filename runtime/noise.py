"""Noise: z[k] = probit((word[k] + 1/2) / 2**32), word[k] from Philox4x32-10. The same bits on CPU, GPU and in C.

Words    Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11).
         key = (seed low, seed high); block i has the counter (i, 0, draw low, draw high) and yields words 4i .. 4i+3,
         each a 32-bit half. Element k of the noise in row-major order takes word k, so a draw of any shape is a prefix.
Normal   p = (word + 0.5) * 2**-32, exact in float64; probit by algorithm AS 241, PPND16 (Wichura, Applied Statistics
         37, 1988), its logarithm by the series below; then one rounding to float32. The smallest p is 2**-33, so |z|
         stays below 6.34 and AS 241's third region (r > 5) never occurs.

Every float operation is an IEEE 754 binary64 + - * / or sqrt, rounded to nearest even, in the order written here
(Horner, highest power first). No libm, no fused multiply-add: a C or CUDA port compiles with contraction off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
# ln(m) = 2 * atanh(s), s = (m - 1) / (m + 1): 2/21, 2/19, ..., 2/3, 2; |s| <= 0.172 leaves 2e-18 behind the last term
LOG_SERIES = tuple(2.0 / n for n in range(21, 0, -2))

# AS 241, PPND16: centre (|p - 1/2| <= 0.425, in 0.180625 - q*q), then tail (in sqrt(-ln p) - 1.6); highest power first
CENTRE_NUM = (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
              13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608)  # fmt: skip
CENTRE_DEN = (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
              5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0)  # fmt: skip
TAIL_NUM = (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
            3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734)  # fmt: skip
TAIL_DEN = (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
            0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0)  # fmt: skip


def philox4x32(counter: Sequence[Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over four words held in uint64 arrays [n], each < 2**32; key two 32-bit numbers."""
    x0, x1, x2, x3 = counter
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(ROUNDS):
        left, right = MULTIPLIERS[0] * x0, MULTIPLIERS[1] * x2  # 32 x 32 -> 64 bits: no overflow
        x0, x1, x2, x3 = (right >> HALF) ^ x1 ^ k0, right & LOW, (left >> HALF) ^ x3 ^ k1, left & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return x0, x1, x2, x3


def horner(coefficients: Sequence[float], x: Floats) -> Floats:
    """((c0*x + c1)*x + ...) + cn."""
    y = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y *= x
        y += c
    return y


def exact_log(p: Floats) -> Floats:
    """ln(p) for normal p > 0: p = m * 2**e exactly with m in [sqrt(1/2), sqrt(2)), then e*ln2 + s*series(s*s)."""
    m, e = np.frexp(p)
    small = m < SQRT_HALF
    m = np.where(small, m * 2.0, m)
    e = np.where(small, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    return e * LN2 + s * horner(LOG_SERIES, s * s)


def probit(p: Floats) -> Floats:
    """The standard normal quantile of p in [2**-33, 1 - 2**-33]; odd about 1/2 to the bit."""
    q = p - 0.5
    inner = 0.180625 - q * q
    centre = q * horner(CENTRE_NUM, inner) / horner(CENTRE_DEN, inner)
    r = np.sqrt(-exact_log(np.minimum(p, 1.0 - p))) - 1.6
    tail = horner(TAIL_NUM, r) / horner(TAIL_DEN, r)
    return np.where(np.abs(q) <= 0.425, centre, np.where(q < 0.0, -tail, tail))


def normal(seed: int, draw: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """N(0, 1) as f32 of `shape` for a 64-bit seed and the 64-bit number of the draw."""
    n = int(np.prod(shape))
    block = np.arange((n + 3) // 4, dtype=np.uint64)
    zero = np.zeros_like(block)
    low, high = int(LOW), 32
    counter = (block, zero, zero + np.uint64(draw & low), zero + np.uint64(draw >> high & low))
    words = np.stack(philox4x32(counter, (seed & low, seed >> high & low)), axis=1).reshape(-1)[:n]
    return probit((words.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32).reshape(shape)
