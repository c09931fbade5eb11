"""What a call of a Plan must do at least, and how long the target takes for that: its roofline.

roof_us = max(bytes / memory bandwidth, FLOPs / rate of the operands' type)

Every value counts once, whatever a kernel reads twice; all rows and keys count, also those beyond a valid length that
only the device knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.reference import pointwise
from frtc.kernels.targets import Target
from frtc.lowering.ir import Type
from frtc.lowering.ops import OPS
from frtc.runtime.plan import Call, Ref

KINDS = {
    "GEMM": {"linear", "gated_linear", "linear_norm", "linear_moments", "linear_rope_qkv", "matmul"},
    "attention": {"attention"},
    "norm": {"rms_norm", "ada_rms_norm", "layer_norm", "residual_norm"},
    "pointwise": {*pointwise.OPS, "pointwise"},
}
OTHER = "other"
ON_TENSOR_CORES = KINDS["GEMM"] | KINDS["attention"]
GATHERS = ("embedding", "index")  # of their first operand they read as much as they write


@dataclass(frozen=True, slots=True)
class Work:
    """rate   element type whose tensor-core rate bounds the FLOPs; "" where none does"""

    nbytes: int
    flops: float
    rate: str

    def roof_us(self, target: Target) -> float:
        tflops = target.tflops.get(self.rate)
        return max(self.nbytes / target.dram * 1e6, self.flops / (tflops * 1e6) if tflops else 0.0)


def kind_of(op: str) -> str:
    """The class of kernels that serve an op."""
    return next((kind for kind, ops in KINDS.items() if op in ops), OTHER)


def work_of(call: Call) -> Work:
    types = tuple(None if ref is None else Type(ref.dtype, ref.shape) for ref in call.operands)
    results = tuple(Type(ref.dtype, ref.shape) for ref in call.results)
    row = OPS[call.op]
    flops = row.flops_of(types, results if len(results) > 1 else results[0], call.attrs)
    return Work(sum(_moved(call)), flops, _rate(call))


def _rate(call: Call) -> str:
    """The wider type of the two factors: a product of FP8 and bf16 runs at the rate of bf16."""
    factors = [ref.dtype for ref in call.operands[:2] if ref is not None]
    return max(factors, key=lambda dtype: DTYPES[dtype].itemsize) if call.op in ON_TENSOR_CORES else ""


def _moved(call: Call) -> Iterator[int]:
    """Bytes read, then bytes written."""
    read = list(dict.fromkeys(ref for ref in call.operands if ref is not None))
    if call.op in GATHERS:
        yield sum(map(_nbytes, call.results))
        read = read[1:]
    yield from map(_nbytes, read)
    yield from map(_nbytes, call.results)


def _nbytes(ref: Ref) -> int:
    """Along an axis of stride 0 the same bytes lie again and again."""
    extents = (0 if n == 0 else 1 if stride == 0 else n for n, stride in zip(ref.shape, ref.strides, strict=True))
    return math.prod(extents) * DTYPES[ref.dtype].itemsize
