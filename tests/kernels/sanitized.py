"""What runs under compute-sanitizer: every kernel of a family at small awkward sites, each buffer an allocation of its
own; a Plan's self-test; and three faulty kernels that the tools must see. bench/sanitize.py starts it.

    python3 -m tests.kernels.sanitized baseline memcheck          also sm_90a; racecheck, initcheck
    python3 -m tests.kernels.sanitized sm_90a memcheck 0,3,17     cases by their place in the list
    python3 -m tests.kernels.sanitized faulty memcheck
    python3 -m tests.kernels.sanitized FILE.plan memcheck

Instrumented kernels are ten to a hundred times slower and patched when first launched, so there is one launch of each,
of a few thousand to a few million products; nothing is timed. Results are only judged coarsely: the bars are those of
the kernels' own tests.

For initcheck results and scratch are left as they were allocated, and not read afterwards, but for a few bytes that no
kernel ever writes: those between and behind the rows that a kernel stores and then finishes itself (finish.cuh). A move
of 16 bytes takes them along with a row's last elements, and its reader leaves them out, whatever they hold (whole_row);
a cp.async that leaves them where they are and fills up with zeros (fetch) is reported as a read of 16 bytes, too, by
sanitizers before 2026.4.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import smxx_finish_gemm
from frtc.kernels.catalog import CATALOG, Choice
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand, Param, Site, Stage
from tests.kernels import (
    sites_attention,
    sites_finish,
    sites_gemm,
    sites_moments,
    sites_pointwise,
    sites_rope_gemm,
    sites_rows,
)
from tests.kernels.device import POISON, Arguments, Gpu
from tests.kernels.harness import (
    GUARD,
    TARGET,
    Array,
    Case,
    as_bytes,
    expected,
    faults,
    operands_of,
    place,
    span_bytes,
    view_of,
)
from tests.kernels.sites_attention import AttentionSite, cached_site, self_site
from tests.kernels.sites_gemm import FULL, gated, linear, matmul, scaled

FAMILIES, TOOLS = ("baseline", "sm_90a"), ("memcheck", "racecheck", "initcheck")
SANE = 5e-2  # relative error
ROUND = 16  # bytes: in a Plan whatever lies behind a buffer begins at a multiple, and vectors may end there
DONE, PROCESS = "sanitized:", "process:"  # begin the last line, and the first one
# What tells one path through a kernel from another, whatever its tile. A warp's rows are two blocks' in clusters of 8.
PATHS: dict[str, Callable[[Any], Any]] = {
    "PARTS": str, "FINISH": str, "SPLIT": lambda n: (n > 1) + (n > 4), "SPLITS": lambda n: n > 1,
    "ROWS": lambda n: n == 0, "WARPGROUPS": lambda n: n > 1,
}  # fmt: skip


def products() -> list[Site]:
    """Sizes that no tile divides, gaps, every epilogue; the last two have tiles for more than all SMs."""
    return [
        linear(61, 201, 1021, **FULL), linear(61, 208, 1024, **FULL), linear(33, 95, 128, "f16", residual="f16"),
        gated(33, 77, 205, act="gelu_erf"), gated(33, 80, 208, "f16", "silu"), linear(9, 40, 2040, "f16"),
        scaled(linear(61, 203, 333, **FULL, gap=24), "e4m3", "e4m3", x_scale=True),
        scaled(linear(70, 200, 1008, **FULL), "e4m3", "e4m3"), scaled(gated(33, 77, 205), "e4m3", "e4m3", x_scale=True),
        scaled(linear(50, 208, 1040, **FULL), "e4m3", "e4m3"),
        scaled(gated(33, 80, 1040), "e4m3"), scaled(linear(33, 95, 128, bias="bf16"), "bf16"),
        linear(33, 77, 131, "f32", bias="f32", act="silu", gap=3), linear(50, 33, 1024, "f32"),
        linear(97, 96, 520, **FULL),
        gated(20, 31, 65, "f32", "silu"), matmul((2, 2), 33, 77, 131), matmul((3,), 70, 90, 200, transposed=True),
        scaled(linear(150, 17200, 144, bias="bf16"), "e4m3", "e4m3"), gated(150, 8600, 72),
    ]  # fmt: skip


def finished() -> list[Site]:
    norm, rows = sites_finish.linear_norm, sites_finish.per_row
    fp8 = norm(50, 200, 1040, "ada", inv=True, **sites_finish.GATED)
    return [
        norm(33, 203, 333, "layer", bias="f32", act="gelu_erf", residual="f32"), norm(61, 264, 520, "ada"),
        sites_finish.in_fp8(fp8), rows(norm(33, 200, 1024, "rms", residual="bf16")),
        rows(linear(33, 203, 333, bias="f32")), rows(gated(33, 77, 205, act="silu")), rows(linear(70, 104, 64, "f16")),
        rows(gated(33, 80, 1024)), sites_finish.in_fp8(rows(linear(70, 1000, 336)), x_scale=True),
        rows(gated(70, 80, 208)),
    ]  # fmt: skip


def roped() -> list[Site]:
    made = sites_rope_gemm.rope_qkv
    return [
        made(33, 3, 2, 16, 200, bias="f32", gap=16), made(61, 2, 1, 128, 512, x="e4m3", alpha="one", x_scale=True),
        made(7, 2, 1, 32, 2048, angles="bf16"), made(70, 0, 3, 32, 512, x="e4m3", alpha="each"),
    ]  # fmt: skip


def deferred() -> list[Site]:
    """Makers and readers of moments, of vectors of each size."""
    made, reads = sites_moments.producer, sites_moments.deferred
    return [
        made(150, 17200, 72, "layer", residual="bf16"), made(61, 200, 1040, "rms", "e4m3", **sites_moments.ADA),
        made(50, 208, 1040, "rms", "e4m3", **sites_moments.ADA),
        reads(linear(61, 201, 1000), "layer", "f32"), reads(scaled(gated(33, 80, 1040)), "rms", "f32"),
        reads(gated(150, 8600, 72), "layer"), reads(sites_rope_gemm.rope_qkv(33, 3, 2, 16, 1040, gap=16), "rms"),
        made(61, 200, 1021, "layer", "f32", out="bf16", residual="f32"),
        made(9, 72, 333, "rms", "f32", inv=True, out="f16"), made(97, 96, 528, "rms", "e4m3", residual="bf16"),
        sites_moments.mixed(reads(linear(50, 33, 1021, "f32", residual="f32"), "rms")),
    ]  # fmt: skip


def of_rows() -> list[Site]:
    made = sites_rows
    norms = [
        made.rms_norm(5, 1001), made.layer_norm(9, 72, "f32"), made.ada_rms_norm(9, 72, "f16", "bf16", "f32"),
        made.residual_norm(7, 1001, "ada", gate="f32", own_styles=True),
    ]  # fmt: skip
    return [
        *norms, made.in_e4m3(norms[0], False), made.in_e4m3(norms[3], True), made.in_e4m3(norms[1], True),
        made.rope(3, 5, 72), made.rope(3, 5, 10, pairing="interleaved"), made.rope_qkv(7, 90, 6, 2, 72),
        made.embedding(50, 13, 33), made.index((10, 3, 24)), made.index((10,), "i32"), made.write((600, 7), (4, 7), -2),
        made.softmax(5, 1001, "f32"), made.softmax(8, 128), made.cumsum((3, 73), "f32", "f32"),
        made.cumsum((968,), "bool", "i64"),
        *(made.reduce(f"reduce_{op}", (3, 50, 70), (-1,), keepdims=True) for op in ("sum", "mean", "max")),
        *(made.reduce(f"reduce_{op}", (60, 3), (-1,), "bool") for op in ("any", "all")),
    ]  # fmt: skip


def attentions() -> list[AttentionSite]:
    made = sites_attention
    step = AttentionSite("step", cached_site((8, 1), 10, 170, 256, resume=160), 141)
    return [
        AttentionSite("own keys", self_site(2, 3, 65, 72)),
        AttentionSite("prefix", cached_site((8, 1), 19, 130, 256), 99),
        step, made.in_e4m3(step, False), made.in_e4m3(step, True),
        AttentionSite("one", cached_site((4, 2), 1, 90, 64), 5),
        AttentionSite("causal", cached_site((4, 2), 33, 33, 128, causal=True), 33),
        AttentionSite("masked", made.with_mask(self_site(2, 2, 40, 64), 2, 1, 40, 40)),
    ]  # fmt: skip


def sites() -> list[tuple[Site, dict[str, Any]]]:
    """With what a Case of each is made of."""
    programs = [s for s in sites_pointwise.awkward_sites() if s.operands][::6]
    return [
        *((s, {"inputs": sites_gemm.inputs_of}) for s in products()),
        *((s, {"inputs": sites_finish.inputs}) for s in finished()),
        *((s, {"inputs": sites_rope_gemm.inputs}) for s in roped()),
        *((s, {"inputs": sites_moments.inputs}) for s in deferred()),
        *((s, {"inputs": sites_rows.inputs, "in_place": ((0, 0),) if s.op == "write" else ()}) for s in of_rows()),
        *((s, {"inputs": sites_pointwise.inputs}) for s in programs),
        *((about.site, {"inputs": about.inputs}) for about in attentions()),
    ]


def cases_of(family: str) -> list[Case]:
    """At every site the cheapest config of each path through each kernel, unless the path was met with such types."""
    met = set[Any]()
    found = []
    for site, about in sites():
        paths: dict[Any, Choice] = {}
        for choice in sorted(CATALOG.candidates(site, TARGET, (family,)), key=lambda c: c.cost_us):
            paths.setdefault((choice.kernel.name, site.op, path_of(choice)), choice)
        for path, choice in paths.items():
            if (key := (path, types_of(site))) not in met:
                met.add(key)
                found.append(Case(site, choice.kernel, choice.config, bar=SANE, level_rows=True, **about))
    return found


def types_of(site: Site) -> tuple[str, ...]:
    """Of the first operands, bf16 for all 16 bits, where rows are stored in e4m3, and which norm is made up for."""
    read = ["bf16" if o.dtype == "f16" else o.dtype for o in site.operands[:2] if o]
    norm = str(site.attrs.get("norm", "none"))
    return *read, norm, *(f"{result.dtype}" for result in site.results if result.dtype in ("e4m3", "f32"))


def path_of(choice: Choice | Case) -> tuple[Any, ...]:
    return tuple((name, of(choice.config[name])) for name, of in PATHS.items() if name in choice.config)


# ---- one launch -----------------------------------------------------------------------------------------------------


@contextmanager
def allocations(gpu: Gpu) -> Iterator[Callable[[int, int | None], int]]:
    """allocate(bytes, what every byte holds; None: nothing was written)."""
    held: list[int] = []

    def allocate(nbytes: int, byte: int | None) -> int:
        held.append(gpu.alloc(rounded(nbytes)))
        if byte is not None:
            gpu.upload(held[-1], np.full(rounded(nbytes), byte, np.uint8))
        return held[-1]

    yield allocate
    for address in held:
        gpu.free(address)


def rounded(nbytes: int) -> int:
    return -(-nbytes // ROUND) * ROUND


def gaps(operand: Operand) -> list[slice]:
    """The bytes of an operand's buffer that no element has."""
    raw = np.zeros(GUARD + rounded(span_bytes(operand)) + GUARD, np.uint8)
    view_of(raw, as_bytes(operand))[...] = 1
    owned = raw[GUARD:-GUARD]
    edges = np.flatnonzero(np.diff(owned, prepend=1, append=1))  # where owned bytes end, and begin again
    return [slice(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def finished_rows(case: Case) -> tuple[Param, Operand] | None:
    """Where a kernel stores rows that it finishes itself: the first result, or the end of scratch."""
    site = case.site
    if site.op == "linear_norm":
        return Param("result", 0), site.results[0]
    if site.op not in ("linear", "gated_linear") or not site.attrs.get("per_row"):
        return None
    rows = smxx_finish_gemm.as_product(site).results[0]
    return Param("scratch", case.kernel.scratch(site, case.config) - rounded(span_bytes(rows))), rows


def fill_gaps(gpu: Gpu, case: Case, results: list[int], scratch: int) -> None:
    """Between and behind rows that the kernel finishes itself: the module's text says why."""
    if found := finished_rows(case):
        param, rows = found
        at = results[0] if param.kind == "result" else scratch + int(param.value)
        for gap in gaps(rows):
            gpu.upload(at + gap.start, np.full(gap.stop - gap.start, POISON, np.uint8))


def run(gpu: Gpu, case: Case, blank: bool) -> list[str]:
    """Launch the case once; what is wrong with its results. blank: they are left unwritten before, unread after."""
    site, given = case.site, operands_of(case)
    in_place = dict(case.in_place)
    with allocations(gpu) as allocate:
        operands, results, held = list[int](), list[int](), list[Array]()
        for operand, values in zip(site.operands, given, strict=True):
            raw = place(operand, values)[GUARD:-GUARD] if operand else np.empty(0, np.uint8)
            operands.append(allocate(raw.nbytes, POISON) if operand else 0)
            gpu.upload(operands[-1], raw)
        for index, result in enumerate(site.results):
            held.append(place(result, None)[GUARD:-GUARD])
            fresh = None if blank else POISON
            at = operands[in_place[index]] if index in in_place else allocate(held[-1].nbytes, fresh)
            results.append(at)
        scratch = allocate(case.kernel.scratch(site, case.config), None if blank else POISON)
        counters = allocate(case.kernel.counters(site, case.config), 0)
        if blank:
            fill_gaps(gpu, case, results, scratch)
        launch(gpu, case, operands, results, scratch, counters)
        if blank:
            return []
        for at, raw in zip(results, held, strict=True):
            gpu.download(at, raw)
        found = [
            np.ndarray(o.shape, DTYPES[o.dtype].numpy, raw.data, 0, [s * DTYPES[o.dtype].itemsize for s in o.strides])
            for o, raw in zip(site.results, held, strict=True)
        ]
        return faults(case, found, expected(case, given))[0]


def launch(gpu: Gpu, case: Case, operands: list[int], results: list[int], scratch: int, counters: int) -> None:
    stages = case.kernel.stages(case.site, case.config, TARGET)
    for stage, cubin in zip(stages, compile_all(case.jobs()), strict=True):
        gpu.launch(gpu.function(cubin, stage.smem), stage, Arguments(stage, operands, results, scratch, counters))
    gpu.synchronize()


def run_family(gpu: Gpu, family: str, tool: str, places: Sequence[int] | None) -> tuple[int, int]:
    """(cases, how many had wrong results); of all cases, or of some by their place among them."""
    wrong, cases = 0, cases_of(family)
    chosen = cases if places is None else [cases[place] for place in places]
    for case in chosen:
        print(f"case: {case}", flush=True)
        if found := run(gpu, case, tool == "initcheck"):
            print("wrong:", *found, flush=True)
            wrong += 1
    return len(chosen), wrong


# ---- faults that must be seen ---------------------------------------------------------------------------------------

THREADS = 64
FAULTY = """
namespace frtc {
enum class Fault { memcheck, racecheck, initcheck };
template <Fault FAULT>
__global__ void faulty(int* y) {
    __shared__ int tile[64];
    const int i = threadIdx.x;
    if (FAULT == Fault::memcheck) y[i + 4] = 1;  // the last four behind the end
    if (FAULT == Fault::racecheck) {
        tile[i] = i;  // no barrier before another warp's element
        y[i] = tile[63 - i];
    }
    if (FAULT == Fault::initcheck) y[i] += 1;  // of what nobody wrote
}
}
"""


def fault_job(tool: str) -> Job:
    return Job(FAULTY, f"frtc::faulty<frtc::Fault::{tool}>", TARGET)


def run_faulty(gpu: Gpu, tool: str) -> tuple[int, int]:
    """The fault that the tool is for."""
    print(f"case: faulty {tool}", flush=True)
    (cubin,) = compile_all([fault_job(tool)])
    stage = Stage("", "", (1, 1, 1), THREADS, 0, (Param("result", 0),))
    with allocations(gpu) as allocate:
        y = allocate(4 * THREADS, None)
        gpu.launch(gpu.function(cubin, 0), stage, Arguments(stage, [], [y], 0))
        gpu.synchronize()
    return 1, 0


# ---- a Plan ---------------------------------------------------------------------------------------------------------


def run_plan(path: str) -> tuple[int, int]:
    """Its self-test, then two whole inferences: (values, how many differ)."""
    from frtc import observation, selftest
    from frtc.policy import Policy

    with Policy.load(path, "cuda", untested=True) as policy:
        print("case: self-test", flush=True)
        outcome = selftest.check(policy)
        for draw in range(2):
            print(f"case: inference {draw}", flush=True)
            policy.infer(observation.seeded(policy.steps, draw), draw=draw)
        return len(outcome.values), len(outcome.failed)


def main(arguments: Sequence[str]) -> int:
    what, tool, *listed = arguments
    assert tool in TOOLS
    print(f"{PROCESS} {os.getpid()}", flush=True)
    if what.endswith(".plan"):
        cases, wrong = run_plan(what)
    elif what == "faulty":
        cases, wrong = run_faulty(Gpu(), tool)
    else:
        places = [int(place) for place in listed[0].split(",")] if listed else None
        cases, wrong = run_family(Gpu(), what, tool, places)
    print(f"{DONE} {cases} cases, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
