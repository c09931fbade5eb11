"""GPU tests of kernels: run the launches of a Site, compare with the reference, time them, keep a table.

A test module lists its cases and hands each to `check`; on a GPU `conftest.py` has the kernels, inputs and references
of the coming ones made by other processes (`ahead.py`), prints the table at the end and writes it to $OUT or
bench/results/.

    CASES = [*every_config(site), chosen(site), Case(site, KERNEL, config, inputs=my_inputs)]

    @pytest.mark.gpu
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_gemm(gpu, case):
        check(gpu, case)

    @pytest.mark.gpu
    @pytest.mark.parametrize("case", [sabotaged(chosen(site), "FRTC_SABOTAGE_LAST_TILE")], ids=str)
    def test_gemm_sabotaged(gpu, case):
        check_fails(gpu, case)                 # the same comparison must fail when the macro is defined

What `swept` leaves to full runs has the marker `full`: `make gpu-kernels` is `-m "gpu and not full"`, three minutes.

The parameter must be called `case`. Inputs are N(0,1) with 1 % of the channels (last axis) times 30; integers must be
given by `inputs`: a function of (site, generator) that returns one array per operand (None where absent), in the shape
of the operand; `fresh` makes the default one for a single operand. Outputs, scratch, gaps between strided elements and
a guard band around every buffer are poisoned with NaN bytes, and bytes that no result owns must stay so.

The target is FRTC_TEST_TARGET (default hopper); FRTC_SEED changes the random inputs.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels.catalog import CATALOG
from frtc.kernels.cubin import parameters_of
from frtc.kernels.dtypes import DTYPES, round_to
from frtc.kernels.reference import REFERENCES
from frtc.kernels.spec import Config, Kernel, Operand, Site, Stage, TensorMap
from frtc.kernels.targets import Target, load_targets
from tests.kernels.device import POISON, Arguments, Gpu
from tests.kernels.session import SOURCES, spent

Array = np.ndarray[Any, Any]
TARGET = load_targets()[os.environ.get("FRTC_TEST_TARGET", "hopper")]

# Largest relative error by the type of the result (docs/design.md, section 9); a row may have ROW times that. Integers
# and booleans must be equal.
BARS = {"f32": 1e-5, "bf16": 4e-3, "f16": 4e-3}
ROW = 4.0
# Of e4m3 results, in steps from one of its numbers to the next: almost all, all, and the mean, which a factor that is
# wrong by less than a step everywhere would exceed.
CODES_OF_MOST, CODES_OF_ALL, MOST, MEAN_CODES = 1, 2, 0.999, 0.2
# `near` of e4m3 results of these: numeric.cuh makes them of tanh.approx, whose error is a share of |x| also where x is
# far below zero and the result much smaller than |x|. e4m3 has codes for numbers that small.
ROUGH, NEAR_ROUGH = ("gelu_tanh", "silu"), 1e-2
NEAR_ALL = 1e-3  # of all: where large terms cancel, what is left is many codes of a number that small

DRAWN = 1 << 22  # elements: of larger operands some rows are drawn, and repeated
PERIOD = 509  # rows, a prime: no tile of theirs equals another
GUARD = 256  # bytes around every buffer
CHECK_OPERANDS = 16 << 20  # operands up to this many bytes are compared after the launch: nothing may write to them

# What a device reaches, where it was measured here: bytes/s of a large copy, tensor TFLOP/s of a large bf16 product.
MEASURED = {"NVIDIA H200": (4.3e12, 790.0)}


@dataclass(frozen=True, slots=True)
class Case:
    """One Site served by one config of one kernel.

    inputs     makes the operands; None: `fresh` for each
    flops      floating-point operations, for the table
    bar        relative error instead of that of BARS, with the reason in a comment beside it
    near       of e4m3 results, and what follows from them: numbers closer than this share of a row's typical size are
               the same number, and a few may be further away, with the reason beside it
    level_rows judge a row smaller than the root-mean-square row as if it had that size, with the reason beside it
    sabotage   macro to define
    in_place   (result, operand) pairs that are one buffer
    """

    site: Site
    kernel: Kernel
    config: Config
    inputs: Callable[[Site, np.random.Generator], list[Array | None]] | None = None
    flops: float = 0.0
    bar: float | None = None
    near: float = 0.0
    level_rows: bool = False
    sabotage: str = ""
    in_place: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        sizes = " ".join("x".join(map(str, o.shape)) or "1" for o in self.site.operands if o)
        types = ",".join(sorted({o.dtype for o in (*self.site.operands, *self.site.results) if o}))
        config = " ".join(f"{k}={v}" for k, v in self.config.items())
        return " ".join(filter(None, (self.kernel.name, sizes, types, config, self.sabotage)))

    def jobs(self) -> list[Job]:
        stages = self.kernel.stages(self.site, self.config, TARGET)
        return [Job.of(stage, TARGET, (self.sabotage,) if self.sabotage else ()) for stage in stages]


def chosen(site: Site, families: Sequence[str] = ("baseline",), **about: Any) -> Case:
    """The case that codegen would run on TARGET."""
    choice = CATALOG.select(site, TARGET, families)
    return Case(site, choice.kernel, choice.config, **about)


def every_config(site: Site, **about: Any) -> list[Case]:
    """All configs of all kernels that can serve the site on TARGET."""
    return [Case(site, choice.kernel, choice.config, **about) for choice in CATALOG.candidates(site, TARGET)]


def sabotaged(case: Case, macro: str) -> Case:
    return replace(case, sabotage=macro)


def once(cases: Sequence[Case], splits: int = 99) -> list[Case]:
    """Each config of each kernel at one of its sites, which take turns from tile to tile.

    splits: so many numbers of parts of a sum are told apart: 1 none, 2 one from all others.
    """
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        tile = tuple((k, v) for k, v in case.config.items() if k != "SPLITS")
        found.setdefault((case.kernel.name, tile, min(case.config.get("SPLITS", 1), splits)), []).append(case)
    tiles = list(dict.fromkeys(key[:2] for key in found))
    return [same[tiles.index(key[:2]) % len(same)] for key, same in found.items()]


def distinct(cases: Sequence[Case]) -> list[Case]:
    """The first case of each kernel to compile."""
    return list({tuple(case.jobs()): case for case in reversed(cases)}.values())


def in_turn(pairs: Sequence[Any]) -> list[Any]:
    """One of each two: the first, the second, the first, ..."""
    return [pairs[min(i + i // 2 % 2, len(pairs) - 1)] for i in range(0, len(pairs), 2)]


def swept(cases: Sequence[Case], quick: Sequence[Case]) -> list[Any]:
    """All cases as parameters; those that are not among `quick` for full runs alone."""
    kept = {id(case) for case in quick}
    return [case if id(case) in kept else pytest.param(case, marks=pytest.mark.full) for case in cases]


def fresh(operand: Operand, generator: np.random.Generator, scale: float = 1.0) -> Array:
    """N(0,1) times `scale`, 1 % of the channels times 30, in the operand's type; booleans are fair coins."""
    if operand.dtype == "bool":
        return generator.random(operand.shape) < 0.5
    assert DTYPES[operand.dtype].kind == "float", f"integers must be given by the case, not drawn: {operand}"
    size, channels = math.prod(operand.shape), operand.shape[-1] if operand.shape else 1
    repeats = size > DRAWN and size // channels > PERIOD
    values = generator.standard_normal((PERIOD, channels) if repeats else operand.shape, np.float32)
    if channels >= 16:
        values[..., generator.choice(channels, max(1, channels // 100), replace=False)] *= 30
    if scale != 1:
        values *= np.float32(scale)
    rounded = round_to(values, operand.dtype)
    return np.resize(rounded, operand.shape) if repeats else rounded


def operands_of(case: Case) -> list[Array | None]:
    with spent("operands"):
        found = SOURCES[-1].operands(case)
        return drawn(case) if found is None else found


def drawn(case: Case) -> list[Array | None]:
    generator = np.random.default_rng([zlib.crc32(str(case).encode()), int(os.environ.get("FRTC_SEED", "0"))])
    if case.inputs:
        values = case.inputs(case.site, generator)
    else:
        values = [None if o is None else fresh(o, generator) for o in case.site.operands]
    none = [o is None for o in case.site.operands]
    assert all(v is None for v, absent in zip(values, none, strict=True) if absent), f"{case}: input of no operand"
    return [None if o is None or v is None else shared(o, v) for o, v in zip(case.site.operands, values, strict=True)]


def shared(operand: Operand, values: Array) -> Array:
    """The values with one of them along each axis that the view repeats (stride 0)."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in operand.strides)
    return np.broadcast_to(values[once], operand.shape)


def expected(case: Case, operands: Sequence[Array | None]) -> list[Array]:
    """What the reference says, rounded once to the results' types."""
    with spent("references"):
        found = SOURCES[-1].expected(case, operands)
        return referenced(case, operands) if found is None else found


def referenced(case: Case, operands: Sequence[Array | None]) -> list[Array]:
    values = REFERENCES[case.site.op](*operands, **case.site.attrs)
    results = values if isinstance(values, tuple) else (values,)
    return [round_to(np.asarray(v), o.dtype) for v, o in zip(results, case.site.results, strict=True)]


# ---- buffers --------------------------------------------------------------------------------------------------------


def span_bytes(operand: Operand) -> int:
    """Bytes from element 0 of a strided view to the end of its last element."""
    last = sum((n - 1) * step for n, step in zip(operand.shape, operand.strides, strict=True))
    return 0 if 0 in operand.shape else (last + 1) * DTYPES[operand.dtype].itemsize


def view_of(raw: Array, operand: Operand) -> Array:
    """The elements of an operand inside its guarded buffer."""
    dtype = DTYPES[operand.dtype].numpy
    strides = [step * dtype.itemsize for step in operand.strides]
    return np.ndarray(operand.shape, dtype, raw.data, GUARD, strides)


def place(operand: Operand, values: Array | None) -> Array:
    """A buffer with guards that holds `values` (None: nothing) at the operand's strides; all else is poison."""
    raw = np.full(2 * GUARD + span_bytes(operand), POISON, np.uint8)
    if values is not None:
        view_of(raw, operand)[...] = values
    return raw


def stray_bytes(raw: Array, operand: Operand) -> int:
    """Bytes outside the view that are no longer poison."""
    owned = np.zeros(raw.shape, np.uint8)
    view_of(owned, as_bytes(operand))[...] = 1
    return int(np.count_nonzero((raw != POISON) & (owned == 0)))


def as_bytes(operand: Operand) -> Operand:
    """The bytes of an operand as an operand: one more axis, over the bytes of an element."""
    size = DTYPES[operand.dtype].itemsize
    return Operand("u8", (*operand.shape, size), (*(step * size for step in operand.strides), 1))


class Buffers:
    """All buffers of one case on the device, `copies` times (0: as many as rotation wants), in one allocation.

    `owner[i]` is the buffer of operand i, then of result i; None where an operand is absent.
    """

    def __init__(self, gpu: Gpu, case: Case, operands: Sequence[Array | None], copies: int = 1) -> None:
        self.gpu, self.case = gpu, case
        self.raw: list[Array] = []
        self.owner: list[int | None] = []
        shared = dict(case.in_place)
        for operand, values in zip(case.site.operands, operands, strict=True):
            self.owner.append(None if operand is None else len(self.raw))
            self.raw += [] if operand is None else [place(operand, values)]
        for index, result in enumerate(case.site.results):
            self.owner.append(self.owner[shared[index]] if index in shared else len(self.raw))
            self.raw += [] if index in shared else [place(result, None)]
        with spent("buffers"):
            self._allocate(copies)
        self.stages = case.kernel.stages(case.site, case.config, TARGET)
        self.functions: list[Any] = []
        self.registers = 0  # of a thread, known once there are functions

    def _allocate(self, copies: int) -> None:
        site, config = self.case.site, self.case.config
        scratch = np.full(self.case.kernel.scratch(site, config), POISON, np.uint8)
        counters = np.zeros(self.case.kernel.counters(site, config), np.uint8)
        parts = [*self.raw, scratch, counters]
        ends = np.cumsum([-(-part.nbytes // 256) * 256 for part in parts])
        self.offsets = [0, *(int(end) for end in ends[:-1])]
        self.set_bytes = int(ends[-1])
        self.copies = copies or max(2, min(64, -(-2 * self.gpu.l2 // self.set_bytes)))
        self.base = self.gpu.alloc(self.set_bytes * self.copies)
        for part, offset in zip(parts, self.offsets, strict=True):
            self.gpu.upload(self.base + offset, part)
        for k in range(1, self.copies):
            self.gpu.copy(self.base + k * self.set_bytes, self.base, self.set_bytes)

    def __enter__(self) -> Buffers:
        return self

    def __exit__(self, *fault: object) -> None:
        with spent("buffers"):
            self.gpu.free(self.base)

    def launches(self, copy: int = 0) -> list[tuple[Any, Any, Arguments]]:
        """The launches of the case on one set of buffers."""
        start = self.base + copy * self.set_bytes
        *offsets, scratch, counters = (start + offset for offset in self.offsets)
        pointers = [0 if buffer is None else offsets[buffer] + GUARD for buffer in self.owner]
        operands, results = pointers[: len(self.case.site.operands)], pointers[len(self.case.site.operands) :]
        if not self.functions:
            with spent("kernels"):
                SOURCES[-1].await_cubins(self.case.jobs())
                cubins = compile_all(self.case.jobs())
                self.functions = [self.gpu.function(c, s.smem) for c, s in zip(cubins, self.stages, strict=True)]
            self.registers = max(cubin.resources.registers for cubin in cubins)
        arguments = [Arguments(stage, operands, results, scratch, counters) for stage in self.stages]
        return list(zip(self.functions, self.stages, arguments, strict=True))

    def results(self) -> list[Array]:
        """The results of set 0, after checking that nothing else was written."""
        with spent("results"):
            return self._results()

    def _results(self) -> list[Array]:
        written = self.owner[len(self.case.site.operands) :]
        for buffer, (raw, offset) in enumerate(zip(self.raw, self.offsets[:-2], strict=True)):
            if buffer in written or raw.nbytes <= CHECK_OPERANDS:
                after = np.empty_like(raw)
                self.gpu.download(self.base + offset, after)
                assert buffer in written or np.array_equal(after, raw), f"operand buffer {buffer} was written"
                self.raw[buffer] = after
        counters = np.zeros(self.case.kernel.counters(self.case.site, self.case.config), np.uint8)
        self.gpu.download(self.base + self.offsets[-1], counters)
        assert not counters.any(), "counters were not left at zero"
        found = []
        for index, (owner, operand) in enumerate(zip(written, self.case.site.results, strict=True)):
            assert owner is not None
            stray = stray_bytes(self.raw[owner], operand)
            assert not stray, f"{stray} bytes written outside result {index}"
            found.append(view_of(self.raw[owner], operand))
        return found


# ---- judgement ------------------------------------------------------------------------------------------------------


def difference(got: Array, want: Array, level_rows: bool = False) -> tuple[float, float]:
    """(relative error over the tensor, that of the worst row): |got - want| / |want| in the 2-norm; NaN is infinite."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    rows = (-1, a.shape[-1]) if a.ndim else (1, 1)
    with np.errstate(invalid="ignore"):
        gap = np.linalg.norm(np.where(a == b, 0.0, a - b).reshape(rows), axis=-1)  # infinities may be equal
    size = np.linalg.norm(b.reshape(rows), axis=-1)
    floor = np.sqrt(np.mean(size**2)) if level_rows else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        row = np.where(gap == 0, 0.0, gap / np.maximum(size, floor))
        whole = 0.0 if not gap.any() else np.linalg.norm(gap) / np.linalg.norm(size)
    return float(np.nan_to_num(whole, nan=np.inf)), float(np.nan_to_num(row, nan=np.inf).max(initial=0))


def faults(case: Case, got: Sequence[Array], want: Sequence[Array]) -> tuple[list[str], float]:
    """(what is wrong with each result, the largest relative error)."""
    with spent("comparison"):
        return _faults(case, got, want)


def _faults(case: Case, got: Sequence[Array], want: Sequence[Array]) -> tuple[list[str], float]:
    wrong, worst = [], 0.0
    for index, (g, w, operand) in enumerate(zip(got, want, case.site.results, strict=True)):
        if DTYPES[operand.dtype].kind != "float":
            bad = int(np.count_nonzero(g.view(np.uint8) != w.view(np.uint8) if operand.dtype == "bool" else g != w))
            wrong += [f"result {index}: {bad} of {w.size} elements differ"] if bad else []
            continue
        rough = case.site.attrs.get("act") in ROUGH
        if operand.dtype == "e4m3" and case.bar is None:
            reason, error = code_faults(g, w, max(case.near, NEAR_ROUGH) if rough else case.near)
            wrong += [f"result {index} (e4m3): {reason}"] if reason else []
            worst = max(worst, error)
            continue
        bar = case.bar or max(BARS[judged_as(case.site, index)], case.near)
        if rough and case.site.attrs.get(
            "per_row"
        ):  # a row's scale is that of its staged elements, which flip now and then
            bar = max(bar, BARS[str(case.site.attrs.get("staged", "bf16"))])
        error, row = difference(g, w, case.level_rows)
        worst = max(worst, error)
        if not (error <= bar and row <= ROW * bar):
            wrong.append(
                f"result {index} ({operand.dtype}): relative error {error:.2e}, worst row {row:.2e}, bar {bar:.0e}"
            )
    return wrong, worst


def judged_as(site: Site, index: int) -> str:
    """The type whose bar a result has: its own, but what is made of a rounded s has that of s where it is stored finer.

    Sums in another order round a few elements of s to the next 16-bit number. The norm is of these numbers and shows
    them however finely it is stored itself: 2.2e-5 in f32 over 13 rows of 264 on an H200.
    """
    dtype = site.results[index].dtype
    return site.results[0].dtype if site.op in ("linear_norm", "linear_moments") and dtype == "f32" else dtype


def code_faults(got: Array, want: Array, near: float = 0.0) -> tuple[str, float]:
    """(why e4m3 numbers are wrong or "", their mean distance in codes)."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    typical = np.sqrt(np.mean(np.nan_to_num(b) ** 2, axis=-1, keepdims=True))
    apart = np.where(np.abs(a - b) <= max(near, NEAR_ALL) * typical, 0, np.abs(codes(got) - codes(want)))
    if near:
        spare = 3 + apart.size // 10_000
        apart = np.sort(apart, axis=None)[:-spare] if apart.size > 2 * spare else apart
    off = int(np.count_nonzero(apart > CODES_OF_MOST))
    mean = float(apart.mean()) if apart.size else 0.0
    most = int(apart.max(initial=0))
    if off <= (1 - MOST) * (10 if near else 1) * apart.size and most <= CODES_OF_ALL and mean <= MEAN_CODES:
        return "", mean
    return f"{off} of {apart.size} are more than {CODES_OF_MOST} code away, one {most}, on average {mean:.3f}", mean


def codes(values: Array) -> Array:
    """e4m3 numbers in order as integers: neighbours differ by 1, both zeros are 0, NaN is a thousand away."""
    bits = values.view(np.uint8).astype(np.int32)
    size = bits & 0x7F
    return np.where(size == 0x7F, 1000, np.where(bits & 0x80, -size, size))


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `share` is the roofline's time over the measured one."""

    kernel: str
    op: str
    shapes: str
    config: str
    us: float
    gbs: float
    tflops: float
    share: float
    error: float
    registers: int


ROWS: list[Row] = []


def write_rows(name: str, rows: Sequence[Any], config: pytest.Config, device: str) -> Path:
    """Measured rows with device, commit and command: a file in $OUT or bench/results."""
    folder = Path(os.environ.get("OUT") or Path(config.rootpath) / "bench" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python3", "-m", "pytest", *config.invocation_params.args])
    about = {"device": device, "commit": os.environ.get("FRTC_COMMIT", ""), "command": command}
    (folder / name).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return folder / name


def moved_bytes(site: Site) -> int:
    """Bytes that must move at least: each operand element once (broadcast axes once), each result element once."""
    total = 0
    views = (*site.operands, *site.results)
    if site.op in ("embedding", "index"):
        views = (*site.results, *site.results)  # of the table only the rows that are asked for
    if site.op == "write":
        views = (site.operands[1], site.operands[1])
    for operand in views:
        if operand is not None:
            distinct = [n for n, step in zip(operand.shape, operand.strides, strict=True) if step]
            total += int(np.prod(distinct, dtype=np.int64)) * DTYPES[operand.dtype].itemsize
    return total


def measure(gpu: Gpu, case: Case, operands: Sequence[Array | None], error: float) -> Row:
    with Buffers(gpu, case, operands, copies=0) as buffers:
        return timed(buffers, error)


def timed(buffers: Buffers, error: float) -> Row:
    """Time of the case over rotating buffers, larger than the L2 where 64 sets suffice."""
    with spent("timing"):
        return _timed(buffers, error)


def _timed(buffers: Buffers, error: float) -> Row:
    gpu, case, rounds = buffers.gpu, buffers.case, max(buffers.copies, 16)
    us = gpu.time_us([x for k in range(rounds) for x in buffers.launches(k % buffers.copies)]) / rounds
    dram, tensor = MEASURED.get(gpu.name, (TARGET.dram, TARGET.tflops["bf16"]))
    moved = moved_bytes(case.site)
    roof_us = max(moved / dram * 1e6, case.flops / tensor * 1e-6)
    sizes = " ".join(f"{o.dtype}[{','.join(map(str, o.shape))}]" for o in case.site.operands if o)
    config = " ".join(f"{k}={v}" for k, v in case.config.items())
    return Row(
        case.kernel.name, case.site.op, sizes, config, round(us, 3), round(moved / us * 1e-3, 1),
        round(case.flops / us * 1e-6, 2), round(roof_us / us, 3), error, buffers.registers,
    )  # fmt: skip


def judge(buffers: Buffers, operands: Sequence[Array | None]) -> tuple[list[str], float]:
    """(what is wrong after one run, largest relative error)."""
    for launch in buffers.launches():
        buffers.gpu.launch(*launch)
    buffers.gpu.synchronize()
    return faults(buffers.case, buffers.results(), expected(buffers.case, operands))


def run(gpu: Gpu, case: Case) -> tuple[list[str], float, list[Array | None]]:
    """(what is wrong, largest relative error, operands used)."""
    operands = operands_of(case)
    with Buffers(gpu, case, operands) as buffers:
        return (*judge(buffers, operands), operands)


def bits(gpu: Gpu, case: Case, times: int = 8) -> set[bytes]:
    """The different results of so many runs, to the bit."""
    with Buffers(gpu, case, operands_of(case)) as buffers:
        seen = []
        for _ in range(times):
            for launch in buffers.launches():
                gpu.launch(*launch)
            gpu.synchronize()
            seen.append(b"".join(np.array(result).view(np.uint8).tobytes() for result in buffers.results()))
    return set(seen)


def check(gpu: Gpu, case: Case) -> None:
    """The case agrees with its reference; its time goes into the table."""
    operands = operands_of(case)
    with Buffers(gpu, case, operands, copies=0) as buffers:
        wrong, worst = judge(buffers, operands)
        assert not wrong, f"{case}\n" + "\n".join(wrong)
        ROWS.append(timed(buffers, worst))


def rows_in_order(map: TensorMap, size: int) -> list[int]:
    """Of a dense [rows, K] operand of elements of so many bytes, as the map hands them over."""
    _, *extents = map.extents
    row, steps = map.extents[0] * size, map.strides
    return [sum(n * s for n, s in zip(at[::-1], steps, strict=True)) // row for at in np.ndindex(*extents[::-1])]


def examine(stages: Iterable[Stage], target: Target, local: int = 0, registers: int = 255) -> None:
    """Cubins keep no more in registers and local memory of a thread; memory fits, parameters are as listed."""
    jobs = {Job.of(stage, target): stage for stage in stages}
    for (job, stage), cubin in zip(jobs.items(), compile_all(list(jobs)), strict=True):
        used = cubin.resources
        assert used.local <= local and used.registers <= registers, f"{job.entry}: {used}"
        assert used.smem + stage.smem <= target.smem_per_block
        sizes = tuple({"tensormap": 128, "i32": 4, "f32": 4}.get(p.kind, 8) for p in stage.params)
        assert parameters_of(cubin.image, cubin.symbol) == sizes, job.entry


def counted(case: Case, operands: Sequence[Array | None]) -> int:
    """The number that says how many rows are read."""
    given = zip(case.site.operands, operands, strict=True)
    (rows,) = (int(v) for o, v in given if o and v is not None and o.dtype == "i32")
    return rows


def check_counted(gpu: Gpu, case: Case, operands: list[Array | None], read: int, computed: int) -> None:
    """Right in the rows that are read, untouched from row `computed` on."""
    with Buffers(gpu, case, operands) as buffers:
        for launch in buffers.launches():
            gpu.launch(*launch)
        gpu.synchronize()
        got, want = buffers.results(), expected(case, operands)
    wrong, _ = faults(case, *([r[..., :read, :] for r in side] for side in (got, want))) if read else ([], 0.0)
    assert not wrong
    assert all(np.isnan(r[..., computed:, :].astype(np.float32)).all() for r in got), f"written beyond row {computed}"


def check_fails(gpu: Gpu, case: Case) -> None:
    """The sabotaged case must not agree: a comparison that cannot fail proves nothing."""
    assert case.sabotage
    wrong, worst, _ = run(gpu, case)
    assert wrong, f"{case} passes with relative error {worst:.2e} although it is sabotaged"
