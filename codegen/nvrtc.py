"""CUDA C++ to cubin through NVRTC: no GPU, no CUDA toolkit, everything from wheels.

    cubins = compile_all([Job.of(stage, target) for stage in stages])     # same order; each compiled once, cached

Our own headers are handed over in memory, so that no path can reach the output; the vendor's come from the
`nvidia-cuda-runtime` wheel, and for kernels that include `cute/` or `cutlass/` from `nvidia-cutlass`. A cubin is cached
under the hash of all that made it (source, our headers, entry, options, versions of compiler and wheels): FRTC_CACHE
names the folder, ~/.cache/frtc otherwise.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from frtc.codegen.render import headers_of, source_of
from frtc.errors import EnvironmentFault
from frtc.kernels.cubin import Resources, resources_of, sm_of
from frtc.kernels.spec import Stage
from frtc.kernels.targets import Target

# --fmad stays on: kernels that need the two roundings say so with intrinsics. No fast math: division, square root and
# exponentials are within the errors of the CUDA programming guide.
OPTIONS = ("--std=c++20", "--device-as-default-execution-space")
INTERNAL = b"_INTERNAL_"  # begins names that carry the compiler's process id: no two compilations would be equal
COMPILER = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime")  # distributions whose version enters the cache key
# Kernels of the native families use narrow headers of CUTLASS, which in turn need cuda/std. Without asserts, which
# would put the paths of the headers into the cubin.
CUTLASS = ("nvidia-cutlass", "nvidia-cuda-cccl")
CUTLASS_OPTIONS = ("--device-int128", "--define-macro=NDEBUG")
CUTLASS_INCLUDE = re.compile(r"^\s*#\s*include\s*<(cute|cutlass)/", re.MULTILINE)


class CompileFailed(Exception):
    """NVRTC refused a source of ours: a bug in a kernel or its spec. The text has the entry and the compiler's log."""


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to compile: C++ text, the template-id to instantiate, the target, macros (`NAME` or `NAME=VALUE`)."""

    source: str
    entry: str
    target: Target
    defines: tuple[str, ...] = ()

    @staticmethod
    def of(stage: Stage, target: Target, defines: tuple[str, ...] = ()) -> Job:
        return Job(source_of(stage), stage.entry, target, defines)

    @property
    def options(self) -> tuple[str, ...]:
        macros = tuple(f"--define-macro={macro}" for macro in self.defines)
        extra = CUTLASS_OPTIONS if self.needs_cutlass else ()
        return (f"--gpu-architecture={self.target.nvcc}", *OPTIONS, *extra, *macros)

    @property
    def needs_cutlass(self) -> bool:
        """Whether the source or one of our headers in it includes headers of CUTLASS."""
        return any(CUTLASS_INCLUDE.search(text) for text in (self.source, *headers_of(self.source).values()))

    def key(self) -> str:
        """Hash of everything that decides the cubin's bytes."""
        compiler = compiler_version(CUTLASS if self.needs_cutlass else ())
        made_of = [self.source, headers_of(self.source), self.entry, self.options, compiler]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel: the ELF image and the mangled name to look up in it."""

    image: bytes
    symbol: str

    @property
    def sm(self) -> int:
        return sm_of(self.image)

    @property
    def resources(self) -> Resources:
        return resources_of(self.image)[self.symbol]


def compile_all(
    jobs: Sequence[Job],
    workers: int | None = None,
    done: Callable[[Job, float], None] | None = None,
) -> list[Cubin]:
    """Cubins in the order of `jobs`; equal jobs share one. NVRTC works outside the interpreter lock, so threads scale.

    `done(job, fraction)` is called after each compiled or cached kernel, from the caller's thread.
    """
    keys = [job.key() for job in jobs]
    unique = dict(zip(keys, jobs, strict=True))
    cubins: dict[str, Cubin] = {}
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        running = {key: pool.submit(_cached, job, key) for key, job in unique.items()}
        for key, future in running.items():
            cubins[key] = future.result()
            if done:
                done(unique[key], len(cubins) / len(unique))
    return [cubins[key] for key in keys]


def compile_one(job: Job) -> Cubin:
    return compile_all([job], workers=1)[0]


def ptx_of(job: Job) -> str:
    """The PTX that the job's cubin is assembled from: for people and tests to look at. Not cached."""
    with _compiled(job) as program:
        size = _check(_nvrtc().nvrtcGetPTXSize(program))
        return _fill(size, lambda text: _nvrtc().nvrtcGetPTX(program, text)).decode().rstrip("\0")


def cache_folder() -> Path:
    """Where cubins are kept. May be deleted at any time."""
    root = os.environ.get("FRTC_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "frtc") / "cubins"


@cache
def compiler_version(headers: tuple[str, ...] = ()) -> str:
    """Versions of NVRTC, of the wheels it came from and of those that `headers` names: "13.0 nvidia-cuda-nvrtc ..."."""
    major, minor = _check(_nvrtc().nvrtcVersion())
    return " ".join([f"{major}.{minor}", *(f"{name} {_distribution(name)}" for name in (*COMPILER, *headers))])


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "elsewhere"


def _cached(job: Job, key: str) -> Cubin:
    """From the cache, or compiled and put there. An entry that does not hold together is compiled again."""
    path = cache_folder() / key[:2] / f"{key}.cubin"
    kept = _read(path)
    if kept is None:
        kept = _compile(job)
        _write(path, kept)
    return kept


def _read(path: Path) -> Cubin | None:
    """File layout: one line of JSON (symbol, sha256 of symbol and image), then the image."""
    try:
        head, _, image = path.read_bytes().partition(b"\n")
        about = json.loads(head)
        cubin = Cubin(image, about["symbol"])
        if about["sha256"] == _digest(cubin):
            return cubin
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _write(path: Path, cubin: Cubin) -> None:
    """By atomic rename: readers see a whole file or none. A cache that cannot be written is only slower."""
    head = json.dumps({"symbol": cubin.symbol, "sha256": _digest(cubin)}).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(head + b"\n" + cubin.image)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
    except OSError:
        pass


def _digest(cubin: Cubin) -> str:
    return hashlib.sha256(cubin.symbol.encode() + b"\0" + cubin.image).hexdigest()


def _compile(job: Job) -> Cubin:
    nvrtc = _nvrtc()
    with _compiled(job) as program:
        symbol = _check(nvrtc.nvrtcGetLoweredName(program, job.entry.encode())).decode()
        image = _fill(_check(nvrtc.nvrtcGetCUBINSize(program)), lambda text: nvrtc.nvrtcGetCUBIN(program, text))
    if INTERNAL in image and not job.needs_cutlass:  # CUTLASS's own headers have such variables
        what = "a variable at namespace scope has internal linkage: write `inline constexpr`"
        raise CompileFailed(f"{job.entry} for {job.target.nvcc}: {what}")
    return Cubin(image, symbol)


@contextmanager
def _compiled(job: Job) -> Iterator[Any]:
    """NVRTC's program of a job, compiled."""
    nvrtc = _nvrtc()
    _require_version(job.target)
    headers = headers_of(job.source)
    folders = (*_vendor_headers(), *(_cutlass_headers() if job.needs_cutlass else ()))
    options = [*job.options, *(f"--include-path={folder}" for folder in folders)]
    program = _check(
        nvrtc.nvrtcCreateProgram(
            job.source.encode(),
            b"frtc.cu",
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
    )
    try:
        _check(nvrtc.nvrtcAddNameExpression(program, job.entry.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileFailed(f"{job.entry} for {job.target.nvcc}: {status.name}\n{_log(program)}")
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(program: Any) -> str:
    nvrtc = _nvrtc()
    text = _fill(_check(nvrtc.nvrtcGetProgramLogSize(program)), lambda text: nvrtc.nvrtcGetProgramLog(program, text))
    return text.decode(errors="replace").strip("\0 \n")


def _fill(size: int, call: Callable[[bytes], Any]) -> bytes:
    """`size` bytes written by `call`. The bindings write into a bytes object: it must be one that nobody else holds,
    and CPython shares those of length 0 and 1."""
    text = bytes(size + 2)
    _check(call(text))
    return text[:size]


def _check(answer: Iterable[Any]) -> Any:
    """The value in an answer of the bindings, which start with a status."""
    status, *values = answer
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise CompileFailed(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else values


@cache
def _nvrtc() -> Any:
    """The bindings, with the library behind them loaded."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as fault:  # the bindings' "library not found" is a RuntimeError
        raise EnvironmentFault(
            "compiler.missing", "NVRTC, which compiles the kernels, is not installed", [("found", str(fault))],
            hint="pip install 'frtc[compile]'",
        ) from fault  # fmt: skip
    return nvrtc


@cache
def _vendor_headers() -> tuple[str, ...]:
    """Folders with cuda_bf16.h and its kin."""
    return (_header_folder("cudart", "the CUDA runtime", "nvidia-cuda-runtime"),)


@cache
def _cutlass_headers() -> tuple[str, ...]:
    """Folders with cute/ and cutlass/, and with cuda/std, which they include."""
    folders = (("cutlass", "CUTLASS"), ("cccl", "CCCL"))
    return tuple(_header_folder(name, title, wheel) for (name, title), wheel in zip(folders, CUTLASS, strict=True))


def _header_folder(name: str, title: str, wheel: str) -> str:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory(name)
    if folder is None:
        what, hint = f"the headers of {title} are not installed", f"pip install 'frtc[compile]' (it brings {wheel})"
        raise EnvironmentFault("compiler.headers", what, hint=hint)
    return str(folder)


def _require_version(target: Target) -> None:
    major, minor = _check(_nvrtc().nvrtcVersion())
    if major != target.nvrtc_major:
        raise EnvironmentFault(
            "compiler.version", f"target {target.name} needs NVRTC {target.nvrtc_major}, this is {major}.{minor}",
            hint=f"pip install 'nvidia-cuda-nvrtc>={target.nvrtc_major},<{target.nvrtc_major + 1}'",
        )  # fmt: skip
