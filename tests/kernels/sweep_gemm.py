"""Time every config of the GEMM kernels at Pi0.5's sites: what the cost model is fitted to.

    PYTHONPATH=. python3 -m tests.kernels.sweep_gemm [WORD]      sites whose name holds WORD; needs a GPU

Names start with "fp8", "fp8 to fp8" and "w8a16" where operands are scaled.

Weights rotate over more than twice the L2, so that they come from DRAM as in a whole inference; activations stay in the
L2, where the kernel before left them. Writes sweep_gemm.json to $OUT or bench/results/: for every site the time of each
config beside its estimate. Results are not compared here: test_smxx_gemm.py does that for the same configs.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels.catalog import CATALOG, Choice
from frtc.kernels.dtypes import round_to
from frtc.kernels.spec import Site
from tests.kernels.device import Arguments, Gpu
from tests.kernels.harness import MEASURED, TARGET, moved_bytes, span_bytes
from tests.kernels.sites_gemm import Case, flops_of, real_sites, scaled_sites

SAMPLE = 1 << 18  # random elements, repeated to fill a buffer
WEIGHT = 1  # place of w among the operands


@dataclass(frozen=True, slots=True)
class Timed:
    config: dict[str, Any]
    us: float
    estimate_us: float


def filled(gpu: Gpu, dtype: str, nbytes: int) -> int:
    """A buffer of normal numbers."""
    sample = round_to(np.random.default_rng(0).standard_normal(SAMPLE, np.float32), dtype)
    address, done = gpu.alloc(nbytes), min(nbytes, sample.nbytes)
    gpu.upload(address, sample.view(np.uint8)[:done])
    while done < nbytes:
        step = min(done, nbytes - done)
        gpu.copy(address + done, address, step)
        done += step
    return address


class Memory:
    """Buffers of a site for all its configs: one of each activation, several weights, the largest scratch."""

    def __init__(self, gpu: Gpu, site: Site, choices: list[Choice]) -> None:
        weight = site.operands[WEIGHT]
        assert weight is not None
        self.copies = max(2, min(64, math.ceil(2 * gpu.l2 / span_bytes(weight))))
        self.stride = -(-span_bytes(weight) // 256) * 256
        self.operands = [0 if o is None else filled(gpu, o.dtype, span_bytes(o)) for o in site.operands]
        self.weights = filled(gpu, weight.dtype, self.copies * self.stride)
        self.results = [gpu.alloc(span_bytes(r)) for r in site.results]
        self.scratch = gpu.alloc(max(c.kernel.scratch(site, c.config) for c in choices))
        counters = np.zeros(max(1, *(c.kernel.counters(site, c.config) for c in choices)), np.uint8)
        self.counters = gpu.alloc(counters.nbytes)
        gpu.upload(self.counters, counters)

    def operands_at(self, round_: int) -> list[int]:
        found = list(self.operands)
        found[WEIGHT] = self.weights + round_ % self.copies * self.stride
        return found

    def free(self, gpu: Gpu) -> None:
        for address in (*self.operands, *self.results, self.weights, self.scratch, self.counters):
            if address:
                gpu.free(address)


def sweep(gpu: Gpu, case: Case, choices: list[Choice]) -> list[Timed]:
    """Times of all configs, fastest first."""
    memory, timed = Memory(gpu, case.site, choices), []
    for choice in choices:
        (stage,) = choice.kernel.stages(case.site, choice.config, TARGET)
        (cubin,) = compile_all([Job.of(stage, TARGET)])
        function = gpu.function(cubin, stage.smem)
        rounds = max(4, min(memory.copies, math.ceil(300 / choice.cost_us)))
        launches = [
            (function, stage, Arguments(stage, memory.operands_at(r), memory.results, memory.scratch, memory.counters))
            for r in range(rounds)
        ]
        timed.append(Timed(dict(choice.config), round(gpu.time_us(launches) / rounds, 3), round(choice.cost_us, 3)))
    memory.free(gpu)
    return sorted(timed, key=lambda t: t.us)


def describe(case: Case, timed: list[Timed], gpu: Gpu) -> str:
    """One line: roofline, the config that the cost model takes, the fastest one."""
    dram, tensor = MEASURED.get(gpu.name, (TARGET.dram, TARGET.tflops["bf16"]))
    flops = flops_of(case.site)
    roof = max(moved_bytes(case.site) / dram * 1e6, flops / tensor * 1e-6)
    taken, best = min(timed, key=lambda t: t.estimate_us), timed[0]
    numbers = f"{roof:7.2f} {taken.us:8.2f} {taken.estimate_us:8.2f} {best.us:8.2f} {best.estimate_us:8.2f}"
    shapes = " ".join("x".join(map(str, t.config.values())) for t in (taken, best))
    return f"{case.name:<32} {numbers} {flops / best.us * 1e-6:7.1f} {roof / best.us:5.0%}  {shapes}"


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    gpu = Gpu()
    cases = [case for case in (*real_sites(), *scaled_sites()) if word in case.name]
    choices = [list(CATALOG.candidates(case.site, TARGET)) for case in cases]
    jobs = {
        job.entry: job
        for case, found in zip(cases, choices, strict=True)
        for c in found
        for job in [Job.of(stage, TARGET) for stage in c.kernel.stages(case.site, c.config, TARGET)]
    }
    compile_all(list(jobs.values()))
    print(f"{gpu.name}, {len(jobs)} kernels; us")
    titles = ("roof", "taken", "estimate", "best", "estimate", "TFLOP/s")
    print(f"{'site':<32} {titles[0]:>7} {' '.join(f'{title:>8}' for title in titles[1:5])} {titles[5]} roof  configs")
    report = {}
    for case, found in zip(cases, choices, strict=True):
        timed = sweep(gpu, case, found)
        print(describe(case, timed, gpu), flush=True)
        report[case.name] = [{"us": t.us, "estimate_us": t.estimate_us, **t.config} for t in timed]
    folder = Path(os.environ.get("OUT") or "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"device": gpu.name, "commit": os.environ.get("FRTC_COMMIT", ""), "sites": report}
    (folder / "sweep_gemm.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
