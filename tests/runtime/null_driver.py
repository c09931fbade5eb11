"""A CUDA driver that does nothing but record: `Driver(api=NullApi())` needs no GPU.

Structures and enums are those of the bindings. Memory is numbers, apart from pinned memory, which is real.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver as cu

OK = cu.CUresult.CUDA_SUCCESS


class Graph:
    """nodes   (handle, after, "kernel" | "event" | "copy", what)
    early   (from, to) of the programmatic edges
    copies  of the "copy" nodes in this order: destination and source
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[int, list[int], str, Any]] = []
        self.early: set[tuple[int, int]] = set()
        self.copies: list[tuple[memoryview, memoryview]] = []


class MapBytes(ctypes.Structure):
    """An encoded tensor map among a kernel's arguments; its value is the number that the null driver wrote in it."""

    _fields_ = (("value", ctypes.c_uint64), ("rest", ctypes.c_uint64 * 15))


class Kernel:
    """What a kernel node was given, its arguments read through the pointers of the driver's interface."""

    def __init__(self, node: Any, symbol: str, all_sizes: dict[str, tuple[int, ...]]) -> None:
        self.symbol, sizes = symbol, all_sizes[symbol]
        self.grid = (node.gridDimX, node.gridDimY, node.gridDimZ)
        self.block, self.smem = (node.blockDimX, node.blockDimY, node.blockDimZ), node.sharedMemBytes
        table = (ctypes.c_void_p * len(sizes)).from_address(int(node.kernelParams))
        kinds = {4: ctypes.c_int32, 8: ctypes.c_uint64, 128: MapBytes}
        self.arguments = [kinds[size].from_address(at).value for size, at in zip(sizes, table, strict=True)]  # type: ignore[arg-type]


class NullApi:
    """sizes   bytes of each parameter, by kernel symbol
    fail    name of a function -> the status it answers
    """

    def __init__(self, sizes: dict[str, tuple[int, ...]], sm: int = 90, integrated: bool = False) -> None:
        self.sizes, self.sm, self.integrated, self.uuid = sizes, sm, integrated, bytes(range(16))
        self.sms = 132
        self.clusters: dict[str, tuple[int, int, int]] = {}  # axes of a kernel's cluster by symbol
        self.room = 1  # blocks, or clusters, of any kernel: on a multiprocessor, on the device
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[Any, ...]] = []
        self.fail: dict[str, Any] = {}
        self.live: dict[int, bytearray] = {}  # device memory by address
        self.functions: dict[int, str] = {}
        self.pinned: dict[int, Any] = {}
        self.kernels: dict[int, Kernel] = {}  # by node, as last set
        self.maps: list[tuple[Any, ...]] = []  # arguments of every encoding
        self.contexts = 0
        self.next = 0x10_0000_0000

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(cu, name)
        do = getattr(self, f"do_{name}", None)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            self.log.append((name, *arguments))
            if name in self.fail:
                return (self.fail[name],)
            if do is None:
                return (OK,)
            value = do(*arguments)
            return (OK,) if value is None else (OK, *value) if isinstance(value, tuple) else (OK, value)

        return call

    def fresh(self, nbytes: int = 1) -> int:
        at = self.next
        self.next += -(-max(nbytes, 1) // 512) * 512
        return at

    # ---- what has an answer ----

    def do_cuDeviceGetCount(self) -> int:
        return 1

    def do_cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> int:
        self.contexts += 1
        return 77

    def do_cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.contexts -= 1

    def do_cuCtxPopCurrent(self) -> int:
        return 77

    def do_cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"Null GPU\0\0"

    def do_cuDeviceGetUuid(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(bytes=self.uuid)

    def do_cuDriverGetVersion(self) -> int:
        return 13000

    def do_cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        known = {"COMPUTE_CAPABILITY_MAJOR": self.sm // 10, "COMPUTE_CAPABILITY_MINOR": self.sm % 10}
        return {**known, "INTEGRATED": int(self.integrated), "MULTIPROCESSOR_COUNT": self.sms}[name]

    def do_cuMemGetInfo(self) -> tuple[int, int]:
        return (1 << 33) - sum(map(len, self.live.values())), 1 << 33

    def do_cuMemAlloc(self, nbytes: int) -> int:
        at = self.fresh(nbytes)
        self.live[at] = bytearray(b"\x55" * nbytes)
        return at

    def do_cuMemFree(self, at: int) -> None:
        del self.live[at]

    def device(self, at: int, nbytes: int) -> memoryview:
        """Bytes of device memory; they lie in one allocation."""
        start = max(a for a in self.live if a <= at)
        assert at + nbytes <= start + len(self.live[start]), f"{nbytes} bytes at {at - start} of an allocation"
        return memoryview(self.live[start])[at - start : at - start + nbytes]

    def do_cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        self.device(to, nbytes)[:] = ctypes.string_at(source, nbytes)

    def do_cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        ctypes.memmove(to, bytes(self.device(source, nbytes)), nbytes)

    def do_cuMemsetD8Async(self, at: int, value: int, nbytes: int, stream: Any) -> None:
        self.device(at, nbytes)[:] = bytes([value]) * nbytes

    def do_cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        memory = (ctypes.c_uint8 * nbytes)()
        self.pinned[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def do_cuMemFreeHost(self, at: int) -> None:
        del self.pinned[at]

    def do_cuStreamCreate(self, flags: int) -> int:
        return self.fresh()

    def do_cuEventCreate(self, flags: int) -> int:
        return self.fresh()

    def do_cuEventElapsedTime(self, start: int, end: int) -> float:
        return 0.001

    def do_cuModuleLoadData(self, image: bytes) -> int:
        assert image[:4] == b"\x7fELF"
        return self.fresh()

    def do_cuModuleGetFunction(self, module: int, symbol: bytes) -> Any:
        handle = self.fresh()
        self.functions[handle] = symbol.decode()
        return cu.CUfunction(handle)

    def do_cuFuncGetAttribute(self, attribute: Any, function: Any) -> int:
        axis = ("WIDTH", "HEIGHT", "DEPTH").index(attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_"))
        return self.clusters.get(self.functions[int(function)], (0, 0, 0))[axis]

    def do_cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: Any, block: int, smem: int) -> int:
        return self.room

    def do_cuOccupancyMaxActiveClusters(self, function: Any, config: Any) -> int:
        return self.room

    def do_cuGraphCreate(self, flags: int) -> Graph:
        return Graph()

    def do_cuGraphAddKernelNode(self, graph: Graph, after: list[int], count: int, node: Any) -> int:
        assert len(after) == count and set(after) <= {n[0] for n in graph.nodes}
        handle = self.fresh()
        self.kernels[handle] = self.kernel(node)
        graph.nodes.append((handle, list(after), "kernel", self.kernels[handle]))
        return handle

    def do_cuGraphAddDependencies(self, graph: Graph, after: list[int], to: list[int], data: list[Any], n: int) -> None:
        """Programmatic ones only, from kernel to kernel: the driver refuses others."""
        assert n == len(after) == len(to) == len(data) > 0
        nodes = {node[0]: node for node in graph.nodes}
        for source, target, edge in zip(after, to, data, strict=True):
            assert edge.type == cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
            assert (edge.from_port, edge.to_port) == (1, 0)
            assert nodes[source][2] == nodes[target][2] == "kernel" and source not in nodes[target][1]
            nodes[target][1].append(source)
            graph.early.add((source, target))

    def do_cuGraphAddEventRecordNode(self, graph: Graph, after: list[int], count: int, event: int) -> int:
        assert len(after) == count
        handle = self.fresh()
        graph.nodes.append((handle, list(after), "event", event))
        return handle

    def do_cuGraphAddMemcpyNode(self, graph: Graph, after: list[int], count: int, copy: Any, context: int) -> int:
        """A contiguous copy between host and device."""
        assert len(after) == count and context == 77 and (copy.Height, copy.Depth) == (1, 1)
        kinds = tuple(kind.name.rpartition("_")[2] for kind in (copy.srcMemoryType, copy.dstMemoryType))
        assert kinds in (("HOST", "DEVICE"), ("DEVICE", "HOST"))
        there, nbytes = kinds[0] == "HOST", int(copy.WidthInBytes)
        host, device = map(int, (copy.srcHost, copy.dstDevice) if there else (copy.dstHost, copy.srcDevice))
        ends = self.device(device, nbytes), memoryview((ctypes.c_uint8 * nbytes).from_address(host)).cast("B")
        graph.copies.append(ends if there else ends[::-1])
        handle = self.fresh()
        graph.nodes.append((handle, list(after), "copy", (there, host, device, nbytes)))
        return handle

    def do_cuGraphLaunch(self, graph: Graph, stream: Any) -> None:
        """Copies alone; kernels do nothing."""
        for to, source in graph.copies:
            to[:] = source

    def do_cuTensorMapEncodeTiled(self, *arguments: Any) -> Any:
        """A map whose first word is its place in `maps`."""
        encoded = cu.CUtensorMap()
        ctypes.c_uint64.from_address(encoded.getPtr()).value = len(self.maps)
        self.maps.append(arguments)
        return encoded

    def do_cuGraphInstantiate(self, graph: Graph, flags: int) -> Graph:
        return graph

    def do_cuGraphExecKernelNodeSetParams(self, graph: Graph, handle: int, node: Any) -> None:
        assert handle in {n[0] for n in graph.nodes}
        self.kernels[handle] = self.kernel(node)

    def kernel(self, node: Any) -> Kernel:
        return Kernel(node, self.functions[int(node.func)], self.sizes)


class CopyingApi(NullApi):
    """With the copies of a process that has one stream."""

    def do_cuMemcpyHtoD(self, to: int, source: int, nbytes: int) -> None:
        self.device(to, nbytes)[:] = ctypes.string_at(source, nbytes)

    def do_cuMemcpyDtoH(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, bytes(self.device(source, nbytes)), nbytes)

    def do_cuMemcpyDtoD(self, to: int, source: int, nbytes: int) -> None:
        self.device(to, nbytes)[:] = self.device(source, nbytes)

    def do_cuMemsetD8(self, at: int, value: int, nbytes: int) -> None:
        self.device(at, nbytes)[:] = bytes([value]) * nbytes
