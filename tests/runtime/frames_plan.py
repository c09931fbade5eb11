"""A Plan by hand that takes camera frames and returns its device input `images` as float32, and a null driver on which
the kernel of frames runs, compiled for the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from frtc.codegen.frames import frames_cubin
from frtc.codegen.nvrtc import Job, compile_all, compile_one
from frtc.codegen.plan_writer import PlanWriter
from frtc.kernels.cubin import parameters_of, resources_of
from frtc.kernels.smxx_frames import CAMERA, CUBIN, THREADS, stage
from frtc.kernels.targets import load_targets
from frtc.runtime.plan import BuiltFor, Call, Entry, Launch, Program, Ref, Run, Slot, Stage
from frtc.runtime.plan_file import Plan
from frtc.runtime.policy import Camera, Images, Policy
from tests.kernels import frames_cpu
from tests.runtime.null_driver import Graph, Kernel, NullApi

Array = np.ndarray[Any, Any]
SOURCE = """
template <typename T>
__device__ void widen(const T* x, float* y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = x[i];
}
extern "C" __global__ void widen_u8(const unsigned char* x, float* y, int n) { widen(x, y, n); }
extern "C" __global__ void widen_f32(const float* x, float* y, int n) { widen(x, y, n); }
"""


def images(
    cameras: Sequence[Camera], size: int = 32, resize: str = "pil_bilinear", border: float = 0, place: str = "center"
) -> Images:
    return Images(tuple(cameras), size, resize, border, place)  # type: ignore[arg-type]


def write(
    path: Path,
    step: Images,
    target: str = "hopper",
    frames: bool = True,
    defines: tuple[str, ...] = (),
    more: tuple[Any, ...] = (),
) -> Path:
    """frames: with the kernel, as Plans have it today. defines: macros for it. more: steps, their inputs unread."""
    about, policy = load_targets()[target], Policy((step, *more), ())
    inputs = policy.device_inputs()
    dtype, shape = inputs["images"]
    n = int(np.prod(shape))
    packed = tuple(int(np.prod(shape[i + 1 :])) for i in range(4))
    x = Ref("slot", 0, dtype, shape, packed, slot="images")
    y = Ref("slot", 0, "f32", shape, packed, slot="seen")
    launch = Launch(0, (64, 1, 1), 128, 0, (("operand", 0), ("result", 0), ("i32", n)))
    call = Call("widen", "cast", {"dtype": "f32"}, (x,), (y,), (launch,))
    symbol = f"widen_{dtype}"
    program = Program(
        model="frames",
        target=BuiltFor(about.name, about.sm, about.nvcc, about.min_driver, "baseline", about.evidence),
        weights_nbytes=0,
        arena_nbytes=0,
        state_nbytes=0,
        kernels=(Entry("cubin.000", symbol, 0),),
        weights=(),
        inputs=tuple(Slot(name, *kind) for name, kind in inputs.items()),
        outputs=(Slot("seen", "f32", shape),),
        stages=(Stage("see", (call,)),),
        schedule=(Run("see"),),
        policy=policy.to_json(),
    )
    blobs = {"cubin.000": compile_all([Job(SOURCE, symbol, about)])[0].image}
    made = frames_cubin(policy, about) if frames else {}
    if defines:
        made[CUBIN] = compile_one(Job.of(stage(len(step.cameras), step.size), about, defines)).image
    with PlanWriter(path, program, blobs | made) as writer:
        writer.finish({})
    return path


class FramesApi(NullApi):
    """A null driver where a launch of a graph runs the kernel of frames, and what widens the result of it."""

    def __init__(self, plan: Plan, *defines: str) -> None:
        files = plan.files()
        sizes = {}
        for name in ("cubin.000", CUBIN):
            image = bytes(files.get(name, b""))
            sizes |= {symbol: parameters_of(image, symbol) for symbol in resources_of(image)} if image else {}
        super().__init__(sizes, sm=plan.program.target.sm)
        self.defines = defines
        self.known_pinned: set[int] = set()  # addresses on the host that the driver calls pinned

    def do_cuPointerGetAttribute(self, attribute: Any, address: int) -> Any:
        if attribute.name.endswith("ORDINAL"):
            return 0
        here = any(start <= address < start + len(data) for start, data in self.live.items())
        return 2 if here else int(address in self.known_pinned)

    def do_cuMemcpyDtoH(self, to: int, source: int, nbytes: int) -> None:
        self.do_cuMemcpyDtoHAsync(to, source, nbytes, 0)

    def do_cuGraphLaunch(self, graph: Graph, stream: Any) -> None:
        copies = iter(graph.copies)
        for handle, _, kind, _ in graph.nodes:
            if kind == "copy":
                to, source = next(copies)
                to[:] = source
            else:
                kernel = self.kernels[handle]
                (self.run_frames if "frames" in kernel.symbol else self.run_widen)(kernel)

    def run_frames(self, kernel: Kernel) -> None:
        assert kernel.block == (THREADS, 1, 1)
        table, pictures, found = kernel.arguments
        views = kernel.grid[2]
        records = np.frombuffer(bytes(self.device(table, views * CAMERA.itemsize)), CAMERA).copy()
        for name in ("frame", "across", "down"):
            records[name] = [self.here(int(address)) for address in records[name]]
        pointers = (records.ctypes.data, self.here(pictures), self.here(found))
        frames_cpu.launch(*pointers, kernel.grid, *self.defines)

    def run_widen(self, kernel: Kernel) -> None:
        x, y, n = kernel.arguments
        dtype = np.dtype(np.uint8 if kernel.symbol == "widen_u8" else np.float32)
        values = np.frombuffer(self.device(x, n * dtype.itemsize), dtype)
        self.device(y, 4 * n)[:] = values.astype(np.float32).tobytes()

    def here(self, address: int) -> int:
        """Where the bytes of a device address lie on the host."""
        if not address:
            return 0
        start = max(a for a in self.live if a <= address)
        data = self.live[start]
        assert address < start + len(data)
        return ctypes.addressof(ctypes.c_char.from_buffer(data)) + address - start


class OnNull:
    """An array in the null driver's device memory, with the bytes and strides of one of NumPy's."""

    def __init__(self, api: NullApi, array: Array, **more: Any) -> None:
        base = array if array.base is None else array.base
        while isinstance(base.base, np.ndarray):
            base = base.base
        start = api.do_cuMemAlloc(base.nbytes)
        api.device(start, base.nbytes)[:] = ctypes.string_at(base.ctypes.data, base.nbytes)
        address = start + array.ctypes.data - base.ctypes.data
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (address, False), "strides": array.strides,
            "version": 3, **more,
        }  # fmt: skip
