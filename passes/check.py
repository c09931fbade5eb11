"""Compare a module before and after a pass by running both on the same seeded inputs (FRTC_CHECK=2 and the tests)."""

from __future__ import annotations

from typing import Any

import numpy as np

from frtc.kernels.dtypes import DTYPES
from frtc.lowering.interpret import evaluate_weights, run_module
from frtc.lowering.ir import Module, Type, walk
from frtc.lowering.verify import Invalid

Array = np.ndarray[Any, Any]

# Relative error ||y - y*|| / ||y*|| allowed between before and after. Widened: only the order of fp32 additions differs.
# As typed: a pass may drop or move roundings of intermediates.
WIDE = 1e-5
TYPED = {"f64": 1e-5, "f32": 1e-5, "f16": 3e-3, "bf16": 2e-2, "e4m3": 1e-1, "e5m2": 2e-1}


def relative_error(y: Array, reference: Array) -> float:
    """||y - reference|| / ||reference|| over the whole tensor; NaN anywhere gives infinity."""
    a, b = y.astype(np.float64), reference.astype(np.float64)
    distance = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)
    return distance if np.isfinite(distance) else float("inf")


def random_tensor(name: str, type: Type, seed: int = 0) -> Array:
    """Seeded by name: N(0, 1/fan-in) for matrices, N(0, 1) otherwise; small non-negative integers; all-true bools."""
    rng = np.random.default_rng([seed, *name.encode()])
    if not type.is_float:
        high = 2 if type.dtype == "bool" else 5
        return rng.integers(1 if type.rank == 0 else 0, high, type.shape).astype(DTYPES[type.dtype].numpy)
    values = rng.standard_normal(type.shape)
    return values / np.sqrt(type.shape[-1]) if type.rank >= 2 else values


def compare(before: Module, after: Module, name: str) -> None:
    """Raise Invalid if any named result differs by more than the table allows."""
    limits = {k: n.t.dtype for g in before.graphs for k, n in g.outputs}
    inputs = {n["name"]: random_tensor(n["name"], n.t) for g in before.graphs for n in g.inputs}
    types = {n["key"]: n.t for m in (before, after) for n in walk(m.weights.roots) if n.op == "tensor"}

    def tensors(key: str) -> Array:
        return random_tensor(key, types[key])

    for mode in ("wide", "typed"):
        old, new = (run_module(m, inputs, evaluate_weights(m, tensors, mode).__getitem__, mode) for m in (before, after))
        for key, dtype in limits.items():
            if key not in old or key not in new:
                continue
            error = relative_error(new[key], old[key])
            limit = WIDE if mode == "wide" else TYPED.get(dtype, 0.0)
            if error > limit:
                raise Invalid(f"pass {name} changes {key} by {error:.2e} ({mode}, allowed {limit:.0e})")
