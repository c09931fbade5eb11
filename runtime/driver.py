"""The calls of the CUDA driver that a session makes, and nothing else: every one goes through here.

`api` is cuda.bindings.driver, or a stand-in with the same functions (a null driver, or one that counts).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from frtc.errors import EnvironmentFault, FrtcError, UsageError
from frtc.kernels.targets import load_targets
from frtc.runtime import tensor_map
from frtc.runtime.plan import BuiltFor, Launch, TensorMap

VERSION_FILES = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")
HOST_MEMORY, DEVICE_MEMORY = 1, 2  # CUmemorytype
READ_ONLY, PORTABLE = 8, 1  # flags of registered and of pinned memory
CLUSTERS_SM_LEAST = 90
EARLY_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC: an edge from where a kernel releases those behind it
C_TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}  # others: addresses


class DriverFault(FrtcError):
    """A driver call failed: a bug in a kernel or in the session, unless the machine is at fault."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Device:
    """integrated: one memory for CPU and GPU. branch: 580 of driver 580.65; 0 if unknown. cuda: 13000 for 13.0

    sms   multiprocessors, of a MIG slice those of the slice
    """

    name: str
    sm: int
    integrated: bool
    branch: int
    cuda: int
    sms: int


class Driver:
    """One device on its primary context."""

    def __init__(self, ordinal: int = 0, api: Any = None) -> None:
        self.api = api or _bindings()
        self._start()
        if not 0 <= ordinal < int(self.call("cuDeviceGetCount")):
            raise _no_gpu(f"there is no GPU {ordinal}")
        self.handle = self.call("cuDeviceGet", ordinal)
        self.device = self._facts()
        self.context = self.call("cuDevicePrimaryCtxRetain", self.handle)
        self._inside: AbstractContextManager[None] = _Inside(self)

    def call(self, name: str, *arguments: Any) -> Any:
        """The value in the answer of a driver function; its status is checked."""
        status, *values = getattr(self.api, name)(*arguments)
        if int(status):
            raise self._fault(name, status)
        return values[0] if len(values) == 1 else values

    def repeated(self, name: str, *arguments: Any) -> Callable[[], None]:
        """The same call as often as inferences come: what can be done once is, and caches are cold by then."""
        function, fault = getattr(self.api, name), self._fault

        def call() -> None:
            status = function(*arguments)[0]
            if status:
                raise fault(name, status)

        return call

    def current(self) -> AbstractContextManager[None]:
        """The primary context is the thread's current one inside, and whatever it was before afterwards."""
        return self._inside

    def release(self) -> None:
        """`current` refuses from now on: addresses that were ours may be another session's."""
        self._inside = _Closed()
        self.call("cuDevicePrimaryCtxRelease", self.handle)

    def require(self, target: BuiltFor, path: Path) -> None:
        """The Plan was built for this device, and the driver is new enough."""
        if self.device.sm != target.sm:
            fits = [t.name for t in load_targets().values() if t.sm == self.device.sm]
            found = f"{self.device.name} (sm_{self.device.sm})"
            rows = [("built for", f"{target.name} ({target.nvcc})"), ("found", found)]
            hint = f"frtc compile CHECKPOINT --arch {fits[0]} -o {path}" if fits else "frtc has no target for this GPU"
            raise EnvironmentFault("plan.target", "the Plan was compiled for another GPU", rows, hint)
        if self.device.sms < target.sms:
            what = "the GPU has too few multiprocessors for this Plan, whose blocks wait for each other"
            rows = [("wants", str(target.sms)), ("found", f"{self.device.sms} on {self.device.name}")]
            hint = f"frtc compile CHECKPOINT --arch {target.name} --family baseline -o {path}"
            raise EnvironmentFault("plan.target", what, rows, hint)
        if 0 < self.device.branch < target.min_driver:
            rows = [("wants", str(target.min_driver)), ("found", str(self.device.branch))]
            what = "the NVIDIA driver is too old for this Plan"
            raise EnvironmentFault("env.driver", what, rows, "update the driver")

    # ---- memory ----

    def alloc(self, nbytes: int) -> int:
        return int(self.call("cuMemAlloc", max(nbytes, 1)))

    def host_alloc(self, nbytes: int) -> int:
        """Pinned memory, seen by all contexts."""
        return int(self.call("cuMemHostAlloc", max(nbytes, 1), PORTABLE))

    def register(self, address: int, nbytes: int) -> bool:
        """Pin memory that is there already, a read-only mapping for instance. Not every system can."""
        status, *_ = self.api.cuMemHostRegister(address, nbytes, READ_ONLY)
        return not int(status)

    def is_pinned(self, address: int) -> bool:
        """Whether the driver knows this host memory, so that a copy from it needs no help of the CPU."""
        return self._memory_type(address) == HOST_MEMORY

    def ordinal_of(self, address: int) -> int | None:
        """The GPU whose memory lies at an address; None: none's."""
        with self.current():
            if self._memory_type(address) != DEVICE_MEMORY:
                return None
            name = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            return int(self.call("cuPointerGetAttribute", name, address))

    def _memory_type(self, address: int) -> int:
        """0 for memory that the driver does not know."""
        name = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        status, *values = self.api.cuPointerGetAttribute(name, address)
        return int(values[0]) if values and not int(status) else 0

    def free_bytes(self) -> int:
        return int(self.call("cuMemGetInfo")[0])

    # ---- kernels and graphs ----

    def load(self, image: bytes) -> Any:
        return self.call("cuModuleLoadData", image)

    def function(self, module: Any, symbol: str, smem: int) -> Any:
        """A kernel that may use `smem` bytes of dynamic shared memory."""
        function = self.call("cuModuleGetFunction", module, symbol.encode())
        attribute = self.api.CUfunction_attribute
        self.call("cuFuncSetAttribute", function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem)
        # The same split of L1 for all: an SM changes it only when it is empty, and the next launch would wait for that.
        self.call("cuFuncSetAttribute", function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        return function

    def cluster_of(self, function: Any) -> int:
        """Blocks in a cluster of the kernel; 0: it is launched without."""
        if self.device.sm < CLUSTERS_SM_LEAST:
            return 0
        attribute, size = self.api.CUfunction_attribute, 1
        for axis in ("WIDTH", "HEIGHT", "DEPTH"):
            name = getattr(attribute, f"CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_{axis}")
            size *= int(self.call("cuFuncGetAttribute", name, function))
        return size

    def held(self, function: Any, launch: Launch, cluster: int) -> int:
        """Blocks of the launch that the device, or what this process may use of it, holds at once."""
        if not cluster:
            each = self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, launch.block, launch.smem)
            return int(each) * self.device.sms
        config = self.api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.smem
        return int(self.call("cuOccupancyMaxActiveClusters", function, config)) * cluster

    def add_kernel(self, graph: Any, after: Sequence[Any], function: Any, launch: Launch, values: Iterable[Any]) -> Any:
        node, _kept = self._node(function, launch, values)
        return self.call("cuGraphAddKernelNode", graph, list(after), len(after), node)

    def add_copy(self, graph: Any, after: Sequence[Any], to: int, source: int, nbytes: int, back: bool) -> Any:
        """A copy from pinned memory to the device, or `back`."""
        kinds = self.api.CUmemorytype.CU_MEMORYTYPE_HOST, self.api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy = self.api.CUDA_MEMCPY3D()
        copy.srcMemoryType, copy.dstMemoryType = reversed(kinds) if back else kinds
        copy.srcHost, copy.srcDevice, copy.dstHost, copy.dstDevice = (0, source, to, 0) if back else (source, 0, 0, to)
        copy.WidthInBytes, copy.Height, copy.Depth = nbytes, 1, 1
        return self.call("cuGraphAddMemcpyNode", graph, list(after), len(after), copy, self.context)

    def add_early_edges(self, graph: Any, after: Sequence[Any], kernel: Any) -> None:
        """`kernel` may begin when all blocks of each kernel in `after` have released it or ended."""
        edge = self.api.CUgraphEdgeData()
        edge.from_port = EARLY_PORT
        edge.type = self.api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        count = len(after)
        if count:
            self.call("cuGraphAddDependencies", graph, list(after), [kernel] * count, [edge] * count, count)

    def set_kernel(self, executable: Any, place: Any, function: Any, launch: Launch, values: Iterable[Any]) -> None:
        node, _kept = self._node(function, launch, values)
        self.call("cuGraphExecKernelNodeSetParams", executable, place, node)

    def encode(self, map: TensorMap, address: int) -> tensor_map.Cell:
        """A tensor map as a kernel parameter."""
        return tensor_map.cell_of(self.call("cuTensorMapEncodeTiled", *tensor_map.arguments(self.api, map, address)))

    def _node(self, function: Any, launch: Launch, values: Iterable[Any]) -> tuple[Any, Any]:
        """(node parameters, what must live until the driver has copied them)."""
        cells: list[Any] = [
            value if isinstance(value, tensor_map.Cell) else C_TYPES.get(kind, ctypes.c_uint64)(value)
            for (kind, _), value in zip(launch.params, values, strict=True)
        ]
        table = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        node = self.api.CUDA_KERNEL_NODE_PARAMS()
        node.func, node.kernelParams, node.sharedMemBytes = function, ctypes.addressof(table), launch.smem
        node.gridDimX, node.gridDimY, node.gridDimZ = launch.grid
        node.blockDimX, node.blockDimY, node.blockDimZ = launch.block, 1, 1
        return node, (cells, table)

    # ---- start and faults ----

    def _start(self) -> None:
        try:
            status, *_ = self.api.cuInit(0)
        except RuntimeError as fault:  # the bindings find no libcuda
            raise _no_gpu("the NVIDIA driver is not installed", str(fault)) from None
        name = self._name(status)
        if name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE", "CUDA_ERROR_STUB_LIBRARY"):
            raise _no_gpu("the NVIDIA driver sees no GPU", name)
        if int(status):
            rows = [("found", name)]
            raise EnvironmentFault("env.driver", "the NVIDIA driver does not start", rows, "`nvidia-smi` may say more")

    def _facts(self) -> Device:
        attribute = self.api.CUdevice_attribute
        asked = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "INTEGRATED", "MULTIPROCESSOR_COUNT")
        ids = [getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}") for name in asked]
        major, minor, integrated, sms = (int(self.call("cuDeviceGetAttribute", i, self.handle)) for i in ids)
        name = bytes(self.call("cuDeviceGetName", 128, self.handle)).decode(errors="replace").strip("\0 ")
        cuda = int(self.call("cuDriverGetVersion"))
        return Device(name, 10 * major + minor, bool(integrated), driver_branch(), cuda, sms)

    def _name(self, status: Any) -> str:
        return str(getattr(status, "name", status))

    def _fault(self, call: str, status: Any) -> FrtcError:
        name = self._name(status)
        if name == "CUDA_ERROR_OUT_OF_MEMORY":
            hint = "close other programs that use the GPU"
            return EnvironmentFault("env.memory", "the GPU has too little free memory", [("in", call)], hint)
        if call == "cuModuleLoadData":
            what = "the NVIDIA driver does not load the Plan's kernels"
            return EnvironmentFault("env.driver", what, [("found", name)], "update the driver")
        return DriverFault("gpu.call", f"{call} failed: {name}")


class _Inside(AbstractContextManager[None]):
    """`Driver.current`: one for all, as it keeps nothing; a generator each time costs every inference microseconds."""

    def __init__(self, driver: Driver) -> None:
        self.push, self.pop = driver.repeated("cuCtxPushCurrent", driver.context), driver.repeated("cuCtxPopCurrent")

    def __enter__(self) -> None:
        self.push()

    def __exit__(self, *fault: object) -> None:
        self.pop()


class _Closed(AbstractContextManager[None]):
    """`Driver.current` of a driver that was released."""

    def __enter__(self) -> None:
        raise UsageError("session.closed", "the session is closed")

    def __exit__(self, *fault: object) -> None:
        pass


def host_bytes(address: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Host memory of the driver's as an array of bytes, without owning it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def driver_branch() -> int:
    """580 of an installed driver 580.65.06; 0 where the system does not say."""
    for path in VERSION_FILES:
        try:
            text = Path(path).read_text()
        except OSError:
            continue
        if found := re.search(r"\b(\d{3,4})\.\d+", text):
            return int(found[1])
    return 0


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as fault:
        what = "cuda-bindings, through which frtc reaches the GPU, cannot be imported"
        hint = "pip install 'cuda-bindings>=13,<14'"
        raise EnvironmentFault("env.driver", what, [("found", str(fault))], hint) from None
    return driver


def _no_gpu(what: str, found: str = "") -> EnvironmentFault:
    rows = [("found", found.splitlines()[0])] if found else []
    return EnvironmentFault("env.no_gpu", what, rows, "--device cpu emulates the Plan, slowly, without a GPU")
