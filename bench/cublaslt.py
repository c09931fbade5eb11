"""cuBLASLt through ctypes: y[M, N] = x[M, K] w[N, K]^T in bf16, by any algorithm that its heuristic names.

    library = Library.load()
    product = library.product(Problem(560, 2048, 2048, "e4m3"), scale=address of a one in fp32)
    for algorithm in product.algorithms():
        product.run(algorithm, w, x, y, workspace, stream)      # addresses; may be captured into a graph

cuBLASLt counts columns first, so that its D is y transposed: A is w, transposed, B is x. Products are summed in fp32;
e4m3 with fast accumulation and one scale for each operand, read on the device. Numbers and sizes of records: cublasLt.h
of CUDA 13.0.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from frtc.errors import EnvironmentFault
from frtc.kernels.dtypes import DTYPES

SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
WHEELS = ("nvidia/cu13/lib", "nvidia/cublas/lib")  # of CUDA 13 and 12, beside torch
MOST_ALGORITHMS = 32
WORKSPACE = 64 << 20  # bytes that an algorithm may use

OK = 0  # a cublasStatus_t
COMPUTE_32F, R_32F = 68, 0  # cublasComputeType_t, cudaDataType_t
TYPES = {"bf16": 14, "e4m3": 28, "f32": R_32F}  # cudaDataType_t
TRANSPOSED, AS_IT_IS = 1, 0  # cublasOperation_t
# cublasLtMatmulDescAttributes_t
TRANSA, TRANSB, A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM = 3, 4, 17, 18, 25
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
# cublasLtMatmulAlgoConfigAttributes_t, of which the cluster's shape has 16 bits
CONFIG = {"id": 0, "tile": 1, "split_k": 2, "stages": 6, "cluster": 8}

Value = ctypes.c_int32 | ctypes.c_int8 | ctypes.c_uint64


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True, slots=True)
class Problem:
    """One product. ld: elements from row to row; 0: K, without gaps."""

    m: int
    n: int
    k: int
    dtype: str  # of x and w: "bf16" or "e4m3"
    ld_x: int = 0
    ld_w: int = 0

    def layouts(self) -> dict[str, tuple[int, int, int, int]]:
        """(type, rows, columns, elements from column to column) of A, B and D, as cuBLASLt counts."""
        kind = TYPES[self.dtype]
        return {
            "A": (kind, self.k, self.n, self.ld_w or self.k),
            "B": (kind, self.k, self.m, self.ld_x or self.k),
            "D": (TYPES["bf16"], self.n, self.m, self.n),
        }

    def attributes(self, scale: int) -> list[tuple[int, Value]]:
        """Of the operation. scale: address of one number in fp32."""
        found: list[tuple[int, Value]] = [(TRANSA, ctypes.c_int32(TRANSPOSED)), (TRANSB, ctypes.c_int32(AS_IT_IS))]
        if self.dtype == "e4m3":
            scales = [(which, ctypes.c_uint64(scale)) for which in (A_SCALE_POINTER, B_SCALE_POINTER)]
            found += [*scales, (FAST_ACCUM, ctypes.c_int8(1))]
        return found

    @property
    def nbytes(self) -> tuple[int, int]:
        """Of x and w, gaps included."""
        size = DTYPES[self.dtype].itemsize
        return self.m * (self.ld_x or self.k) * size, self.n * (self.ld_w or self.k) * size


class Failed(Exception):
    """A call of cuBLASLt gave a status that is not success."""


def paths(packages: Sequence[Path]) -> list[str]:
    """What to try, in turn: the wheels in these folders, then whatever the loader finds."""
    found = [folder / wheel / name for folder in packages for wheel in WHEELS for name in SONAMES]
    return [*(str(path) for path in found if path.is_file()), *SONAMES]


class Library:
    """The loaded library."""

    def __init__(self, calls: Any) -> None:
        self.calls = calls

    @staticmethod
    def load() -> Library:
        torch = importlib.util.find_spec("torch")
        beside = [Path(torch.origin).parent.parent] if torch and torch.origin else []
        tried = paths(beside)
        for path in tried:
            try:
                return Library(ctypes.CDLL(path))
            except OSError:
                continue
        rows = [("tried", path) for path in tried]
        hint = "run where torch was installed with CUDA: its wheels bring cuBLASLt"
        raise EnvironmentFault("bench.cublaslt", "cuBLASLt cannot be loaded", rows, hint)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.calls, name)(*arguments)
        if status != OK:
            raise Failed(f"{name} gave status {status}")

    def version(self) -> int:
        self.calls.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(self.calls.cublasLtGetVersion())

    def created(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """The handle that a call writes to its first parameter."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    @cached_property
    def handle(self) -> ctypes.c_void_p:
        """Needs the GPU."""
        return self.created("cublasLtCreate")

    def product(self, problem: Problem, scale: int) -> Product:
        return Product(self, problem, scale)


class Product:
    """The descriptors of a problem; they live as long as the process."""

    def __init__(self, library: Library, problem: Problem, scale: int) -> None:
        self.library, self.problem = library, problem
        self.operation = library.created("cublasLtMatmulDescCreate", COMPUTE_32F, R_32F)
        for which, value in problem.attributes(scale):
            size = ctypes.c_size_t(ctypes.sizeof(value))
            library.call("cublasLtMatmulDescSetAttribute", self.operation, which, ctypes.byref(value), size)
        self.layouts = {
            name: library.created(
                "cublasLtMatrixLayoutCreate", kind, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(ld)
            )
            for name, (kind, rows, columns, ld) in problem.layouts().items()
        }

    def algorithms(self) -> list[Heuristic]:
        """Those that the heuristic names and that can run, best guess first. Needs the GPU."""
        preference = self.library.created("cublasLtMatmulPreferenceCreate")
        most, size = ctypes.c_uint64(WORKSPACE), ctypes.c_size_t(8)
        self.library.call(
            "cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE_BYTES, ctypes.byref(most), size
        )
        found, count = (Heuristic * MOST_ALGORITHMS)(), ctypes.c_int()
        layouts = [self.layouts[name] for name in ("A", "B", "D", "D")]  # C is D's: its factor is 0
        self.library.call(
            "cublasLtMatmulAlgoGetHeuristic", self.library.handle, self.operation, *layouts, preference,
            MOST_ALGORITHMS, found, ctypes.byref(count),
        )  # fmt: skip
        return [each for each in found[: count.value] if each.state == OK]

    def run(self, algorithm: Heuristic, w: int, x: int, y: int, workspace: int, stream: int) -> None:
        """Enqueue one product. All but the algorithm are addresses."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        a, b, d = (self.layouts[name] for name in ("A", "B", "D"))
        pointer = ctypes.c_void_p
        self.library.call(
            "cublasLtMatmul", self.library.handle, self.operation, ctypes.byref(one), pointer(w), a, pointer(x), b,
            ctypes.byref(zero), pointer(y), d, pointer(y), d, ctypes.byref(algorithm.algorithm), pointer(workspace),
            ctypes.c_size_t(WORKSPACE), pointer(stream),
        )  # fmt: skip

    def configuration(self, algorithm: Heuristic) -> dict[str, int]:
        """What the algorithm is, in numbers of cublasLt.h."""
        return dict(self._configuration(algorithm)) | {"workspace": int(algorithm.workspace)}

    def _configuration(self, algorithm: Heuristic) -> Iterator[tuple[str, int]]:
        for name, which in CONFIG.items():
            value, written = ctypes.c_uint32(), ctypes.c_size_t()
            size = ctypes.c_size_t(2 if name == "cluster" else 4)
            self.library.call(
                "cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(algorithm.algorithm), which, ctypes.byref(value),
                size, ctypes.byref(written),
            )  # fmt: skip
            yield name, value.value
