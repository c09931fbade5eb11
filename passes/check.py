"""Compare a module before and after a pass by running both on the same seeded inputs (FRTC_CHECK=2 and the tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from frtc.kernels.dtypes import DTYPES
from frtc.lowering.interpret import evaluate_weights, run_module
from frtc.lowering.ir import Module, Type, walk
from frtc.lowering.verify import Invalid
from frtc.passes.sites import UNNORMED

Array = np.ndarray[Any, Any]

# Relative error ||y - y*|| / ||y*|| allowed between before and after. Widened: only the order of fp32 additions
# differs. As typed: a pass may drop or move roundings of intermediates, so the coarsest float type anywhere decides.
WIDE = 1e-5
TYPED = {"f64": 1e-5, "f32": 1e-5, "f16": 3e-3, "bf16": 2e-2, "e4m3": 2e-1, "e5m2": 3e-1}


def relative_error(y: Array, reference: Array) -> float:
    """||y - reference|| / ||reference|| over the whole tensor; NaN anywhere gives infinity."""
    a, b = y.astype(np.float64), reference.astype(np.float64)
    distance = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)
    return distance if np.isfinite(distance) else float("inf")


def random_tensor(name: str, type: Type, seed: int = 0) -> Array:
    """Seeded by name: N(0, 1/fan-in) for matrices, else N(0, 1); integers 0 to 4 and bools (scalars: 1 to 4, true)."""
    rng = np.random.default_rng([seed, *name.encode()])
    if not type.is_float:
        high = 2 if type.dtype == "bool" else 5
        return rng.integers(1 if type.rank == 0 else 0, high, type.shape).astype(DTYPES[type.dtype].numpy)
    if name.startswith("scale:"):  # of activations: positive, for values up to about 30, or 450 before a norm
        return np.full(type.shape, 1.0 if name.endswith(UNNORMED) else 2.0**-4)
    values = rng.standard_normal(type.shape)
    return values / np.sqrt(type.shape[-1]) if type.rank >= 2 else values


def compare(before: Module, after: Module, name: str, seed: int = 0) -> None:
    """Raise Invalid if any named result or written state differs by more than the table allows, in any variant."""
    for variant in sorted({g.variant for g in before.graphs}):
        old, new = (_of_variant(m, variant) for m in (before, after))
        if {g.name for g in old.graphs} == {g.name for g in before.graphs}:
            _compare(old, new, name, variant, seed)


def _of_variant(module: Module, variant: str) -> Module:
    """Each program in that variant, or in its only one."""
    exact = {g.name for g in module.graphs if g.variant == variant}
    chosen = (g for g in module.graphs if g.variant == (variant if g.name in exact else ""))
    return replace(module, graphs=tuple(chosen))


def _compare(before: Module, after: Module, name: str, variant: str, seed: int) -> None:
    results = {k: n.t for g in before.graphs for k, n in g.outputs + g.writes}
    coarsest = max((TYPED.get(t.dtype, 0.0) for m in (before, after) for t in _types(m)), default=0.0)
    inputs = {name: random_tensor(name, type, seed) for name, type in before.inputs.items()}
    types = {n["key"]: n.t for m in (before, after) for n in walk(m.weights.roots) if n.op == "tensor"}

    def tensors(key: str) -> Array:
        return random_tensor(key, types[key], seed)

    for mode in ("wide", "typed"):
        weights = [evaluate_weights(m, tensors, mode) for m in (before, after)]
        both = zip((before, after), weights, strict=True)
        old, new = (run_module(m, inputs, w.__getitem__, mode, variant) for m, w in both)
        for key in (k for k in results if k in old):
            if key not in new:
                raise Invalid(f"pass {name} loses {key}")
            # What programs hand to each other may have rows that nothing reads; if something does, the outputs show it.
            inner = bool(before.outputs) and key not in {source for _, source in before.outputs}
            unspecified = np.isnan(new[key]) & inner if results[key].is_float else np.False_
            error = relative_error(np.where(unspecified, 0, new[key]), np.where(unspecified, 0, old[key]))
            limit = 0.0 if not results[key].is_float else WIDE if mode == "wide" else coarsest
            if error > limit:
                raise Invalid(f"pass {name} changes {key} by {error:.2e} ({mode}, allowed {limit:.0e})")


def _types(module: Module) -> Iterator[Type]:
    """Of every value in the programs."""
    for node in (n for g in module.graphs for n in g.nodes):
        yield from node.type if isinstance(node.type, tuple) else (node.type,)
