"""The least of a CUDA device that kernel tests need: primary context, memory, modules, launches, graph timing."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from frtc.codegen.nvrtc import Cubin
from frtc.kernels.spec import Stage
from frtc.runtime import tensor_map
from frtc.runtime.driver import EARLY_PORT

POISON = 0xFF  # a NaN in every float type, -1 in every integer


class DriverError(Exception):
    """A driver call failed; an illegal access in a kernel shows at the next synchronisation."""


def call(answer: Sequence[Any]) -> Any:
    """The value in an answer of the bindings, which start with a status."""
    status, *values = answer
    if status != cu.CUresult.CUDA_SUCCESS:
        name = cu.cuGetErrorName(status)[1]
        raise DriverError(name.decode() if isinstance(name, bytes) else str(status))
    return values[0] if len(values) == 1 else values


class Arguments:
    """Packed kernel parameters; must live until the launch or the graph node is made."""

    def __init__(
        self, stage: Stage, operands: Sequence[int], results: Sequence[int], scratch: int, counters: int = 0
    ) -> None:
        starts = {"scratch": scratch, "counters": counters}
        maps = [_encoded(map, operands, results) for map in stage.tensormaps]
        self._values = [
            maps[int(p.value)] if p.kind == "tensormap" else _value(p.kind, p.value, operands, results, starts)
            for p in stage.params
        ]
        self._array = (ctypes.c_void_p * len(self._values))(*(ctypes.addressof(v) for v in self._values))
        self.address = ctypes.addressof(self._array)


def _encoded(map: Any, operands: Sequence[int], results: Sequence[int]) -> Any:
    """A tensor map (spec.TensorMap) of the buffer that it is of now."""
    address = (operands if map.of.kind == "operand" else results)[int(map.of.value)]
    return tensor_map.cell_of(call(cu.cuTensorMapEncodeTiled(*tensor_map.arguments(cu, map, address))))


def _value(kind: str, value: float, operands: Sequence[int], results: Sequence[int], starts: Mapping[str, int]) -> Any:
    if kind == "operand":
        return ctypes.c_uint64(operands[int(value)])
    if kind == "result":
        return ctypes.c_uint64(results[int(value)])
    if kind in starts:
        return ctypes.c_uint64(starts[kind] + int(value))
    number: Any = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}[kind]
    return number(value)


class Gpu:
    """Device 0 on its primary context."""

    def __init__(self) -> None:
        call(cu.cuInit(0))
        device = call(cu.cuDeviceGet(0))
        call(cu.cuCtxSetCurrent(call(cu.cuDevicePrimaryCtxRetain(device))))
        attribute = cu.CUdevice_attribute
        major, minor, self.l2 = (
            int(call(cu.cuDeviceGetAttribute(a, device)))
            for a in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
            )
        )
        self.sm = major * 10 + minor
        self.name = call(cu.cuDeviceGetName(128, device)).decode().strip("\0 ")
        self.driver = int(call(cu.cuDriverGetVersion()))
        # 0: ordered with the copies below, which go through the legacy default stream and may still be under way
        # when their call returns.
        self.stream = call(cu.cuStreamCreate(0))
        self._functions: dict[bytes, Any] = {}

    def __str__(self) -> str:
        return f"{self.name}, driver {self.driver}"

    def alloc(self, nbytes: int) -> int:
        return int(call(cu.cuMemAlloc(max(nbytes, 1))))

    def free(self, address: int) -> None:
        call(cu.cuMemFree(address))

    def upload(self, address: int, data: np.ndarray[Any, Any]) -> None:
        if data.nbytes:
            call(cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))

    def download(self, address: int, data: np.ndarray[Any, Any]) -> None:
        if data.nbytes:
            call(cu.cuMemcpyDtoH(data.ctypes.data, address, data.nbytes))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        call(cu.cuMemcpyDtoD(to, source, nbytes))

    def poison(self, address: int, nbytes: int) -> None:
        if nbytes:
            call(cu.cuMemsetD8(address, POISON, nbytes))

    def function(self, cubin: Cubin, smem: int) -> Any:
        """The kernel in a cubin, with its dynamic shared memory allowed."""
        function = self._functions.get(cubin.image)
        if function is None:
            module = call(cu.cuModuleLoadData(cubin.image))
            function = call(cu.cuModuleGetFunction(module, cubin.symbol.encode()))
            self._functions[cubin.image] = function
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(cu.cuFuncSetAttribute(function, limit, smem))
        return function

    def launch(self, function: Any, stage: Stage, arguments: Arguments) -> None:
        shape = (*stage.grid, stage.block, 1, 1)
        call(cu.cuLaunchKernel(function, *shape, stage.smem, self.stream, arguments.address, 0))

    def synchronize(self) -> None:
        call(cu.cuStreamSynchronize(self.stream))

    def time_us(self, launches: Sequence[tuple[Any, Stage, Arguments]], replays: int = 7, early: bool = False) -> float:
        """Microseconds of all launches, one after the other, in one graph: the median of `replays`.

        early: each may begin when the one before has released it, as an early launch of a Plan; its kernel waits.
        """
        graph = call(cu.cuGraphCreate(0))
        previous: list[Any] = []
        for function, stage, arguments in launches:
            node = cu.CUDA_KERNEL_NODE_PARAMS()
            node.func, node.kernelParams, node.sharedMemBytes = function, arguments.address, stage.smem
            node.gridDimX, node.gridDimY, node.gridDimZ = stage.grid
            node.blockDimX, node.blockDimY, node.blockDimZ = stage.block, 1, 1
            after, previous = (
                previous,
                [call(cu.cuGraphAddKernelNode(graph, previous, 0 if early else len(previous), node))],
            )
            if early and after:
                edge = cu.CUgraphEdgeData()
                edge.from_port = EARLY_PORT
                edge.type = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
                call(cu.cuGraphAddDependencies(graph, after, previous, [edge], 1))
        executable = call(cu.cuGraphInstantiate(graph, 0))
        start, stop = call(cu.cuEventCreate(0)), call(cu.cuEventCreate(0))
        times = []
        for _ in range(replays + 2):  # two to warm up
            call(cu.cuEventRecord(start, self.stream))
            call(cu.cuGraphLaunch(executable, self.stream))
            call(cu.cuEventRecord(stop, self.stream))
            call(cu.cuEventSynchronize(stop))
            times.append(call(cu.cuEventElapsedTime(start, stop)) * 1e3)
        for event in (start, stop):
            call(cu.cuEventDestroy(event))
        call(cu.cuGraphExecDestroy(executable))
        call(cu.cuGraphDestroy(graph))
        return float(median(times[2:]))
