"""cuBLASLt in chains of the kind that our own candidates are measured in (frtc/tuning): weights that are not in the
cache, one launch after the other in one graph with its two marks, p50 of replays.

    rival = Rival(Gpu(), Library.load())
    found = rival.best(Problem(560, 2048, 2048, "e4m3"))          # found.us of the fastest algorithm
    rival.with_rest(found, rest, cubin, early=True)               # the same and a launch behind it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from cuda.bindings import driver as cu

from bench.cublaslt import WORKSPACE, Failed, Heuristic, Library, Problem, Product
from bench.separate import Separate
from frtc.codegen.nvrtc import Cubin
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand, Site
from frtc.tuning.chain import COLD, COPIES_MOST, LAUNCHES_LEAST, MOST
from frtc.tuning.inputs import Fill, elements, limits, values
from tests.kernels.device import Arguments, DriverError, Gpu, call

WARM_UP, REPLAYS = 3, 21
ROWS_CHECKED, ERROR = 16, 3e-2  # of every algorithm, against torch in fp32: fast accumulation drops bits


def copies_of(nbytes: int, l2: int) -> int:
    """Of a weight, as a chain of candidates has them."""
    return max(1, min(-(-max(COLD, 2 * l2) // nbytes), COPIES_MOST, MOST // nbytes))


@dataclass(frozen=True, slots=True)
class Found:
    """us: of the fastest algorithm, nan where none ran; place: its place among the `count` that the heuristic named."""

    product: Product
    buffers: Buffers
    us: float
    algorithm: Heuristic | None
    place: int
    count: int
    failed: tuple[str, ...]

    def about(self) -> dict[str, int]:
        if self.algorithm is None:
            return {}
        problem, numbers = self.product.problem, self.product.configuration(self.algorithm)
        return {"place": self.place, **numbers, "ld_x": problem.ld_x, "ld_w": problem.ld_w}


class Rival:
    """cuBLASLt on this GPU."""

    def __init__(self, gpu: Gpu, library: Library) -> None:
        self.gpu, self.library = gpu, library
        self.marks = [call(cu.cuEventCreate(0)) for _ in range(2)]
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self.one = torch.ones(1, device="cuda")

    def best(self, problem: Problem) -> Found:
        product, buffers = self.library.product(problem, self.one.data_ptr()), Buffers(problem, self.gpu.l2)
        algorithms, failed = product.algorithms(), list[str]()
        times: dict[int, float] = {}
        for place, algorithm in enumerate(algorithms):
            try:
                times[place] = self.time(self._runs(product, algorithm, buffers), buffers.launches)
                buffers.check()
            except (Failed, DriverError, AssertionError) as fault:
                times.pop(place, None)
                failed.append(f"algorithm {place}: {str(fault)[:120]}")
        place = min(times, key=lambda i: times[i], default=-1)
        best = algorithms[place] if times else None
        return Found(product, buffers, times.get(place, math.nan), best, place, len(algorithms), tuple(failed))

    def _runs(self, product: Product, algorithm: Heuristic, buffers: Buffers) -> Callable[[int], None]:
        x, y, workspace = (tensor.data_ptr() for tensor in (buffers.x, buffers.y, self.workspace))
        stream = int(self.gpu.stream)
        return lambda i: product.run(algorithm, buffers.w_at(i), x, y, workspace, stream)

    def with_rest(self, found: Found, rest: Separate, cubin: Cubin, early: bool) -> float:
        """Microseconds of the product and the launch behind it, or Failed."""
        assert found.algorithm is not None
        operands = [filled(rest.site, place) for place in range(len(rest.site.operands))]
        operands[rest.product] = found.buffers.y
        results = [
            torch.full((size_of(result),), 0xFF, dtype=torch.uint8, device="cuda") for result in rest.site.results
        ]
        function = self.gpu.function(cubin, rest.stage.smem)
        given, made = ([0 if t is None else t.data_ptr() for t in tensors] for tensors in (operands, results))
        arguments = Arguments(rest.stage, given, made, 0)
        multiply = self._runs(found.product, found.algorithm, found.buffers)

        def run(i: int) -> None:
            multiply(i)
            launch(function, rest, arguments, self.gpu.stream, early)

        try:
            us = self.time(run, found.buffers.launches)
        except DriverError as fault:
            raise Failed(f"the launch behind the product: {fault}") from None
        blank = [i for i, raw in enumerate(results) if raw.numel() and bool((raw == 0xFF).all())]
        if blank:
            raise Failed(f"results {blank} of {rest.site.op} were not written")
        return us

    def time(self, run: Callable[[int], None], launches: int) -> float:
        """p50 of replays of `launches` runs, of one of them."""
        torch.cuda.synchronize()
        run(0)  # loads what a capture cannot
        self.gpu.synchronize()
        executable = self._captured(run, launches)
        times = []
        for _ in range(WARM_UP + REPLAYS):
            call(cu.cuGraphLaunch(executable, self.gpu.stream))
            self.gpu.synchronize()
            times.append(call(cu.cuEventElapsedTime(*self.marks)) * 1e3)
        call(cu.cuGraphExecDestroy(executable))
        return float(median(times[WARM_UP:])) / launches

    def _captured(self, run: Callable[[int], None], launches: int) -> Any:
        stream, external = self.gpu.stream, cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        call(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            call(cu.cuEventRecordWithFlags(self.marks[0], stream, external))
            for i in range(launches):
                run(i)
            call(cu.cuEventRecordWithFlags(self.marks[1], stream, external))
        finally:  # also what failed: the stream is of no use before
            graph = call(cu.cuStreamEndCapture(stream))
        executable = call(cu.cuGraphInstantiate(graph, 0))
        call(cu.cuGraphDestroy(graph))
        return executable


class Buffers:
    """x, y and many copies of w on the device."""

    def __init__(self, problem: Problem, l2: int) -> None:
        self.problem = problem
        x_bytes, w_bytes = problem.nbytes
        self.pitch = -(-w_bytes // 256) * 256
        self.copies = copies_of(self.pitch, l2)
        self.launches = max(self.copies, LAUNCHES_LEAST)
        self.x = numbers(Fill("", 0, problem.dtype, x_bytes // DTYPES[problem.dtype].itemsize))
        self.w = torch.empty((self.copies, self.pitch), dtype=torch.uint8, device="cuda")
        self.w[:, :w_bytes] = numbers(Fill("", 0, problem.dtype, w_bytes // DTYPES[problem.dtype].itemsize))
        self.y = torch.full((problem.m, problem.n), math.nan, dtype=torch.bfloat16, device="cuda")

    def w_at(self, i: int) -> int:
        return int(self.w.data_ptr()) + i % self.copies * self.pitch

    def check(self) -> None:
        """The first rows of y are those of the product; they are unknown afterwards."""
        p, size = self.problem, DTYPES[self.problem.dtype].itemsize
        kind = torch.float8_e4m3fn if p.dtype == "e4m3" else torch.bfloat16
        x, w = (
            raw[: rows * ld * size].view(kind).view(rows, ld)[:, : p.k].float()
            for raw, rows, ld in ((self.x, p.m, p.ld_x or p.k), (self.w[0], p.n, p.ld_w or p.k))
        )
        wanted, got = x[:ROWS_CHECKED] @ w.T, self.y[:ROWS_CHECKED].float()
        apart = float((got - wanted).norm() / wanted.norm())
        self.y.fill_(math.nan)
        assert apart <= ERROR, f"relative error {apart:.1e}"


def launch(function: Any, rest: Separate, arguments: Arguments, stream: Any, early: bool) -> None:
    """On a stream that may be capturing. early: as soon as the launch before it lets go, or ends."""
    config, stage = cu.CUlaunchConfig(), rest.stage
    config.gridDimX, config.gridDimY, config.gridDimZ = stage.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = stage.block, 1, 1
    config.sharedMemBytes, config.hStream = stage.smem, stream
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = ([attribute], 1) if early else ([], 0)
    call(cu.cuLaunchKernelEx(config, function, arguments.address, 0))


def size_of(operand: Operand) -> int:
    """Bytes from the first element to behind the last."""
    return elements(operand) * DTYPES[operand.dtype].itemsize


def numbers(fill: Fill) -> torch.Tensor:
    """What an operand of our own candidates holds, as bytes on the device."""
    return torch.from_numpy(values(fill).view("uint8").copy()).cuda()


def filled(site: Site, place: int) -> torch.Tensor | None:
    operand = site.operands[place]
    if operand is None:
        return None
    return numbers(Fill("", 0, operand.dtype, elements(operand), *limits(site, place)))
