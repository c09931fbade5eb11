"""What a kernel says of itself: which op it serves, what it needs, its tile candidates, and the launches it becomes.

Codegen walks these records; a kernel never sees the IR, only a Site: the op's name, attributes, and operands as
(dtype, shape, strides). Adding a kernel is one template, one record, one test (docs/adding-a-kernel.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.targets import Target


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as a kernel sees it: a strided view of a buffer. Strides are in elements.

    aligned   element 0 lies at a multiple of 16 bytes, in every round of a loop
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool = True

    @property
    def nbytes(self) -> int:
        size = DTYPES[self.dtype].itemsize
        for extent in self.shape:
            size *= extent
        return size

    @staticmethod
    def packed(dtype: str, *shape: int) -> Operand:
        """A row-major operand without gaps."""
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        return Operand(dtype, tuple(shape), tuple(reversed(strides)))


@dataclass(frozen=True, slots=True)
class Site:
    """One op instance that asks for a kernel. Absent optional operands are None, in the order of the op's row."""

    op: str
    operands: tuple[Operand | None, ...]
    results: tuple[Operand, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel argument, in order.

    kind     "operand" and "result": pointer to element 0 of operand or result `value` (a null pointer where absent);
             "scratch": pointer `value` bytes into this op's scratch; "counters": the same into this op's counters;
             "tensormap": tensor map `value` of the stage, 128 bytes by value, aligned to 64;
             "i32", "i64", "f32": the number `value`
    """

    kind: str
    value: int | float


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A matrix, or an array of up to five axes, as the tensor memory accelerator copies boxes of it.

    of        Param("operand", i) or Param("result", i): element 0 of the map is element 0 of that operand
    dtype     of the elements, a name of kernels/dtypes.py
    extents   of the array in elements, innermost axis first; the innermost axis has no gaps
    strides   in BYTES of every axis but the innermost, multiples of 16
    box       what one copy moves, in elements, axes as in `extents`, each 1 to 256
    swizzle   0, 32, 64 or 128 bytes; a row of the box is not longer, unless it is 0

    Elements outside the extents read as zeros and are not written. L2 promotion is 128 bytes, 256 where a row of the
    array has that many.
    """

    of: Param
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One launch of one device function.

    source      the template file in kernels/ ("smxx_gemm.cuh"), or jinja2 ("smxx_pointwise.cu.j2") with `context`
    entry       the C++ template-id to instantiate: "frtc::gemm<__nv_bfloat16, 128, 64, 32>"
    smem        dynamic shared memory in bytes
    tensormaps  what parameters of kind "tensormap" are
    waits       every thread calls grid_wait() (kernels/ptx.cuh) before it touches anything but weights, so that the
                launch may begin before those that it depends on have ended
    ahead       places of operands that are read before grid_wait() all the same: the launch is early only where they
                are weights
    meets       its blocks wait for each other, all on SMs at once: no other such launch may run beside it
    begun       it lets the next launch begin before it has waited itself
    settled     () or (i, places of operands): parameter i is an i32 that the builder sets to how many of their leading
                rows the launch may read before grid_wait() (codegen/settled.py); 0 is always right
    """

    source: str
    entry: str
    grid: tuple[int, int, int]
    block: int
    smem: int
    params: tuple[Param, ...]
    context: Mapping[str, Any] = field(default_factory=dict)
    tensormaps: tuple[TensorMap, ...] = ()
    waits: bool = False
    ahead: tuple[int, ...] = ()
    meets: bool = False
    begun: bool = False
    settled: tuple[int, ...] = ()


Config = Mapping[str, Any]  # one candidate: template arguments by name


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row of the kernel table.

    refuse    why this kernel cannot serve the site on the target, or "" if it can
    configs   candidates, in order of preference before costs; each exclusion has its reason in a comment
    cost      estimated microseconds
    stages    the launches; the last one completes the op
    scratch   bytes of workspace that live from the first stage to the last
    counters  bytes that are zero before the first run and that every run leaves zero; never shared with another op
    """

    name: str
    op: str
    family: str
    refuse: Callable[[Site, Target], str]
    configs: Callable[[Site, Target], list[Config]]
    cost: Callable[[Site, Config, Target], float]
    stages: Callable[[Site, Config, Target], tuple[Stage, ...]]
    scratch: Callable[[Site, Config], int] = lambda site, config: 0
    counters: Callable[[Site, Config], int] = lambda site, config: 0
