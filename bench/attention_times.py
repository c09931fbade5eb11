"""Attention of the baseline and of the wgmma family at the sites of policies, on one GPU.

    PYTHONPATH=. python3 -m bench.attention_times [--all | --steps]

A chain of 100 launches in a CUDA graph, over a few sets of buffers that L2 holds, as a layer finds its operands; median
of 25 replays, with full edges and, where the kernel waits itself, with early ones. `--all`: every config, not only
the one that its cost model prefers. Predicted microseconds beside the measured ones; a table and a JSON.

`--steps`: every config of the kernels that split the keys of a denoise step, as its chain has them: 180 launches over
18 caches whose keys were there before, early edges. Alone, where a launch that fills registers cannot begin beside the
one before it, and each behind a launch that waits two microseconds in few registers: what it adds to a chain of those.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import sm90_attention, sm90_attention_keys, sm90_attention_split, smxx_attention
from frtc.kernels.spec import Config, Kernel, Param, Site, Stage
from frtc.kernels.targets import Target
from tests.kernels.device import Arguments, Gpu
from tests.kernels.harness import TARGET, Buffers, Case, operands_of
from tests.kernels.sites_attention import AttentionSite, cached_site, in_e4m3, real_sites, self_site

NAMES = (
    "vision 2 views",
    "vision 3 views",
    "prefix 2 views, prompt 48 of 48",
    "prefix 2 views, prompt 48 of 200",
    "prefix 1 views, prompt 48 of 48",
    "prefix 3 views, prompt 48 of 48",
    "step 2 views, prompt 48 of 48, chunk 50",
    "step 2 views, prompt 48 of 48, chunk 10",
    "step 2 views, prompt 48 of 200, chunk 50",
    "step 3 views, prompt 48 of 48, chunk 50",
    "step 1 views, prompt 48 of 48, chunk 50",
)
# Of policies with one more token in the step, with grouped heads of 64.
OTHERS = (
    AttentionSite("one query", cached_site((8, 1), 1, 561, 256, resume=560), 560),
    AttentionSite("to the prefix, 15 heads", cached_site((15, 5), 50, 177, 64), 177),
    AttentionSite("patches of a large image", self_site(2, 12, 1024, 64)),
)
SPLITTING: tuple[Kernel, ...] = (*sm90_attention_split.KERNELS, *sm90_attention_keys.KERNELS)
KERNELS: tuple[Kernel, ...] = (*smxx_attention.KERNELS, *sm90_attention.KERNELS, *SPLITTING)
LAUNCHES, REPLAYS, SETS = 100, 25, 4
STEPS = (
    "step 2 views, prompt 48 of 48, chunk 50",
    "step 2 views, prompt 48 of 48, chunk 10",
    "step 2 views, prompt 48 of 200, chunk 50",
    "step 3 views, prompt 48 of 48, chunk 50",
)
STEP_LAUNCHES, CACHES, WAIT_NS = 180, 18, 2000
WAITING = """
#include "ptx.cuh"
namespace frtc {
__global__ void __launch_bounds__(128) waiting(int ns) {
    grid_wait();
    grid_release();
    u64 begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    const i64 clocks = clock64();
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begun < ns && clock64() - clocks < 4 * ns);
}
}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of one launch in the chain. early: None where the kernel does not wait."""

    site: str
    result: str
    kernel: str
    config: str
    registers: int
    predicted: float
    measured: float
    early: float | None


def sites() -> list[AttentionSite]:
    by_name = {about.name: about for about in real_sites()}
    return [about for name in NAMES for about in (by_name[name], in_e4m3(by_name[name], False))] + list(OTHERS)


def cases(every: bool) -> Iterator[tuple[AttentionSite, Kernel, Config]]:
    for about in sites():
        for kernel in KERNELS:
            if kernel.refuse(about.site, TARGET):
                continue
            found = kernel.configs(about.site, TARGET)
            best = min(found, key=lambda config: kernel.cost(about.site, config, TARGET))
            yield from ((about, kernel, c) for c in (found if every and kernel.family != "baseline" else [best]))


def measure(gpu: Gpu, about: AttentionSite, kernel: Kernel, config: Config) -> Row:
    case = Case(about.site, kernel, config, **about.judged)
    (stage,) = kernel.stages(about.site, config, TARGET)
    with Buffers(gpu, case, operands_of(case), copies=SETS) as buffers:
        sets = [buffers.launches(k) for k in range(SETS)]
        chain = [launch for k in range(LAUNCHES) for launch in sets[k % SETS]]
        times = [gpu.time_us(chain, REPLAYS, early) / LAUNCHES for early in (False, True)[: 1 + stage.waits]]
        named = " ".join(f"{name}={value}" for name, value in config.items())
        result = about.site.results[0].dtype
        predicted = round(kernel.cost(about.site, config, TARGET), 2)
        measured = [round(us, 2) for us in times]
        early = measured[1] if stage.waits else None
        return Row(about.name, result, kernel.name, named, buffers.registers, predicted, measured[0], early)


@dataclass(frozen=True, slots=True)
class Step:
    """Microseconds of a launch in a chain with early edges: alone; what it adds to launches that only wait."""

    site: str
    kernel: str
    config: str
    registers: int
    blocks: int
    alone: float
    added: float


def settled(kernel: Kernel, rows: int) -> Kernel:
    """As the builder leaves it where the first `rows` keys were there before."""

    def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
        (stage,) = kernel.stages(site, config, target)
        at = stage.settled[0]
        return (replace(stage, params=(*stage.params[:at], Param("i32", rows), *stage.params[at + 1 :])),)

    return replace(kernel, stages=stages)


def step_cases() -> Iterator[tuple[AttentionSite, Case]]:
    for about in sites():
        if about.name.removesuffix(", e4m3 times inv") not in STEPS or about.name in STEPS:
            continue
        for kernel in SPLITTING:
            if not kernel.refuse(about.site, TARGET):
                before = settled(kernel, int(about.site.attrs["resume"]))
                for config in kernel.configs(about.site, TARGET):
                    yield about, Case(about.site, before, config, **about.judged)


def measure_steps(gpu: Gpu) -> Iterator[Step]:
    found = list(step_cases())
    jobs = [Job(WAITING, "frtc::waiting", TARGET)]
    compile_all([*jobs, *(job for _, case in found for job in case.jobs())])
    stage = Stage("", "", (64, 1, 1), 128, 0, (Param("i32", WAIT_NS),), waits=True)
    waiting = (gpu.function(compile_all(jobs)[0], 0), stage, Arguments(stage, [], [], 0))
    base = gpu.time_us([waiting] * STEP_LAUNCHES, REPLAYS, early=True) / STEP_LAUNCHES
    for about, case in found:
        with Buffers(gpu, case, operands_of(case), copies=CACHES) as buffers:
            sets = [buffers.launches(k)[0] for k in range(CACHES)]
            chain = [sets[k % CACHES] for k in range(STEP_LAUNCHES)]
            alone = gpu.time_us(chain, REPLAYS, early=True) / STEP_LAUNCHES
            pairs = [launch for attention in chain for launch in (waiting, attention)]
            added = gpu.time_us(pairs, REPLAYS, early=True) / STEP_LAUNCHES - base
            config = " ".join(f"{name}={value}" for name, value in case.config.items())
            grid = sets[0][1].grid
            name = about.name.removesuffix(", e4m3 times inv")
            blocks = grid[0] * grid[1] * grid[2]
            yield Step(name, case.kernel.name, config, buffers.registers, blocks, round(alone, 2), round(added, 2))


def steps(gpu: Gpu) -> list[Step]:
    print("alone   added  regs blocks  site, kernel, config: us a launch")
    rows = []
    for row in measure_steps(gpu):
        rows.append(row)
        about = f"{row.site:42s} {row.kernel} {row.config}"
        print(f"{row.alone:5.2f} {row.added:7.2f} {row.registers:5d} {row.blocks:6d}  {about}", flush=True)
    return rows


def line(row: Row) -> str:
    early = "      -" if row.early is None else f"{row.early:7.2f}"
    about = f"{row.site.removesuffix(', e4m3 times inv')}, {row.result}"
    return f"{row.predicted:9.2f} {row.measured:9.2f} {early} {row.registers:5d}  {about:46s} {row.kernel} {row.config}"


def write(gpu: Gpu, rows: Sequence[Row | Step], command: str, name: str = "attention_times.json") -> Path:
    folder = Path(os.environ.get("OUT") or "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"device": str(gpu), "commit": os.environ.get("FRTC_COMMIT", ""), "command": command}
    (folder / name).write_text(json.dumps({**result, "rows": list(map(asdict, rows))}, indent=1) + "\n")
    return folder / name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m bench.attention_times")
    parser.add_argument("--all", action="store_true", help="every config of the wgmma family")
    parser.add_argument("--steps", action="store_true", help="every kernel that splits the keys of a step, in a chain")
    asked = parser.parse_args()
    every: bool = asked.all
    if asked.steps:
        gpu = Gpu()
        command = "python3 -m bench.attention_times --steps"
        print("written to", write(gpu, steps(gpu), command, "attention_steps.json"))
        return
    gpu, found = Gpu(), list(cases(every))
    compile_all([job for about, kernel, config in found for job in Case(about.site, kernel, config).jobs()])
    print("predicted  measured   early  regs  site, result, kernel, config: us a launch")
    rows = []
    for about, kernel, config in found:
        rows.append(measure(gpu, about, kernel, config))
        print(line(rows[-1]), flush=True)
    print("written to", write(gpu, rows, "python3 -m bench.attention_times" + " --all" * every))


if __name__ == "__main__":
    main()
