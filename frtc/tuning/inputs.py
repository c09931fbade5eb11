"""What operands hold while a kernel is measured: ordinary numbers, and counts and positions that are valid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from frtc.kernels.dtypes import DTYPES, is_float, round_to
from frtc.kernels.spec import Operand, Site
from frtc.lowering.ops import OPS

DRAWN = 1 << 20  # elements; of more, these are repeated
COUNTS = ("length", "rows")  # operands that say how much of another one is valid: all of it


@dataclass(frozen=True, slots=True)
class Fill:
    """`copies` times the same numbers, the first at byte `offset` of a space, each `pitch` bytes after the one before.

    count   elements of one copy
    below   integers and booleans lie in [low, below); 0: floats, N(0, 1)
    """

    space: str
    offset: int
    dtype: str
    count: int
    low: int = 0
    below: int = 0
    copies: int = 1
    pitch: int = 0


def values(fill: Fill) -> np.ndarray[Any, Any]:
    """One copy, 1-D; the same on every call."""
    generator, drawn = np.random.default_rng(fill.count), min(fill.count, DRAWN)
    if is_float(fill.dtype):
        return np.resize(round_to(generator.standard_normal(drawn, np.float32), fill.dtype), fill.count)
    numbers = generator.integers(fill.low, fill.below, drawn).astype(DTYPES[fill.dtype].numpy)
    return np.resize(numbers, fill.count)


def elements(operand: Operand) -> int:
    """From the first element of a strided view to behind its last."""
    if math.prod(operand.shape) == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(operand.shape, operand.strides, strict=True))


def limits(site: Site, place: int) -> tuple[int, int]:
    """(least, one more than the most) that operand `place` may hold; (0, 0) for floats."""
    operand = site.operands[place]
    assert operand is not None
    if is_float(operand.dtype):
        return 0, 0
    row = OPS.get(site.op)
    names = row.operands if row and not row.variadic else ()
    name = names[place] if place < len(names) else ""
    if name in COUNTS:
        whole = _whole(site, name)
        return whole, whole + 1
    table = site.operands[0]
    if site.op in ("embedding", "index") and place == 1 and table is not None:
        return 0, table.shape[0]
    if site.op == "attention":  # a mask: all keys are seen
        return 1, 2
    if operand.dtype == "bool" or operand.dtype == "u8":
        return 0, 2 if operand.dtype == "bool" else 256
    return 0, 1  # a position to write at, and what nobody knows the meaning of: 0 is always there


def all_valid(inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of an inference, with `n`, how many tokens are valid, saying that all are."""
    full = {"n": np.full_like(inputs["n"], inputs["tokens"].shape[-1])} if {"n", "tokens"} <= inputs.keys() else {}
    return {**inputs, **full}


def _whole(site: Site, name: str) -> int:
    """Keys of an attention, rows of a product."""
    counted = site.operands[1 if name == "length" else 0]
    assert counted is not None
    return counted.shape[-2]
