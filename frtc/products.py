"""What the products of a Plan multiply, and whose scales their activations have: read from its calls, by site.

A robot may ask, so nothing here loads the compiler.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any

from frtc.kernels.reference import REFERENCES
from frtc.kernels.targets import load_targets
from frtc.runtime.plan import WEIGHTS, Program
from frtc.selftest import precision_of

MEANING = {
    "f32": "32-bit weights and activations",
    "bf16": "16-bit weights and activations",
    "w8a16": "FP8 storage of weights, bf16 rate",
    "fp8": "FP8 x FP8",
    "emulated": "FP8 storage, bf16 rate: these kernels have no instructions of this GPU for FP8",
}


@dataclass(frozen=True, slots=True)
class Product:
    """A call that multiplies by weights.

    site     name of the weights
    kind     "fp8" (both in FP8), "w8a16" (weights alone), or the type of x
    scales   of x in FP8: "static" or "per row"; "" where x has more bits
    """

    stage: str
    index: int
    site: str
    kind: str
    scales: str


def meaning(kind: str, native: bool) -> str:
    """What a kind is, in words. native: the kernels multiply FP8 at a rate of its own."""
    return MEANING["emulated" if kind == "fp8" and not native else kind]


def products_of(program: Program) -> list[Product]:
    """In the order of stages and calls."""
    names = {w.offset: w.name for w in program.weights}
    found = []
    for stage in program.stages:
        for i, call in enumerate(stage.calls):
            operands = dict(zip(signature(REFERENCES[call.op]).parameters, call.operands, strict=False))
            x, w = operands.get("x"), operands.get("w") or operands.get("gate")
            if x is None or w is None or w.space != WEIGHTS or len(w.shape) != 2:
                continue
            kind = "fp8" if x.dtype == "e4m3" else "w8a16" if w.dtype == "e4m3" else x.dtype
            moments = call.op != "linear_moments" and call.attrs.get("norm", "none") != "none"  # x_scale has these
            scales = "" if kind != "fp8" else "per row" if operands.get("x_scale") and not moments else "static"
            found.append(Product(stage.name, i, names.get(w.offset, call.name), kind, scales))
    return found


def precision_data(program: Program) -> dict[str, Any]:
    """For --json: {"kind", "meaning", "products"}."""
    return {**_headline(program), "products": [asdict(p) for p in products_of(program)]}


def precision_line(program: Program) -> str:
    said = _headline(program)
    return f"precision: {said['kind']} ({said['meaning']})"


def precision_rows(program: Program) -> list[tuple[str, str]]:
    """How many products of each stage multiply what."""
    kinds: dict[str, Counter[str]] = {}
    for p in products_of(program):
        kinds.setdefault(p.stage, Counter())[f"{p.kind}, {p.scales} scales" if p.scales else p.kind] += 1
    return [(stage, "; ".join(f"{n} {what}" for what, n in kind.items())) for stage, kind in kinds.items()]


def _headline(program: Program) -> dict[str, str]:
    kind, target = precision_of(program), load_targets().get(program.target.name)
    native = target is not None and target.multiplies_fp8(program.target.family.split("+"))
    return {"kind": kind, "meaning": meaning(kind, native)}
