"""Attention of the baseline and of the wgmma family at the sites of policies, on one GPU.

    PYTHONPATH=. python3 -m bench.attention_times [--all]

A chain of 100 launches in a CUDA graph, over a few sets of buffers that L2 holds, as a layer finds its operands; median
of 25 replays, with full edges and, where the kernel waits itself, with early ones. `--all`: every config, not only
the one that its cost model prefers. Predicted microseconds beside the measured ones; a table and a JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frtc.codegen.nvrtc import compile_all
from frtc.kernels import sm90_attention, sm90_attention_split, smxx_attention
from frtc.kernels.spec import Config, Kernel
from tests.kernels.device import Gpu
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
KERNELS: tuple[Kernel, ...] = (*smxx_attention.KERNELS, *sm90_attention.KERNELS, *sm90_attention_split.KERNELS)
LAUNCHES, REPLAYS, SETS = 100, 25, 4


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


def line(row: Row) -> str:
    early = "      -" if row.early is None else f"{row.early:7.2f}"
    about = f"{row.site.removesuffix(', e4m3 times inv')}, {row.result}"
    return f"{row.predicted:9.2f} {row.measured:9.2f} {early} {row.registers:5d}  {about:46s} {row.kernel} {row.config}"


def write(gpu: Gpu, rows: list[Row], command: str) -> Path:
    folder = Path(os.environ.get("OUT") or "bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"device": str(gpu), "commit": os.environ.get("FRTC_COMMIT", ""), "command": command}
    (folder / "attention_times.json").write_text(
        json.dumps({**result, "rows": list(map(asdict, rows))}, indent=1) + "\n"
    )
    return folder / "attention_times.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m bench.attention_times")
    parser.add_argument("--all", action="store_true", help="every config of the wgmma family")
    every = parser.parse_args().all
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
