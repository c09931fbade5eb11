"""Products of a policy by every family beside torch (cuBLAS), each in a chain on weights that are not in the cache.

    PYTHONPATH=. python3 -m bench.product_times [--policy pi05] [--precision fp8] [--horizon 50] [--best 4]

A row a site: the candidates that the cost model likes best, the best of each kernel, and torch's product of the same
sizes and type with the plain epilogue. Times are p50 of replays per launch, in microseconds, with early edges as in a
Plan. `share`: torch's time over ours, so 0.9 is the bar of the plain epilogue and 1 that of the fused one.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from typing import Any

import torch

from bench import report
from bench.full_model import PRECISIONS, Shape
from bench.sites import distinct, uses
from frtc.codegen.nvrtc import compile_all
from frtc.compiler import target_named
from frtc.kernels.catalog import CATALOG, label
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand, Site
from frtc.kernels.tactic import key_of
from frtc.tuning.chain import COLD, chain_of, jobs_of
from frtc.tuning.questions import Question, worth_it
from frtc.tuning.worker import Worker

PRODUCTS = ("linear", "gated_linear", "linear_rope_qkv", "linear_norm", "linear_moments")
FEWEST_BYTES = 1 << 19  # of a weight: smaller products are left out
WEIGHTS = frozenset({1})  # place of w in every product


def size_of(site: Site) -> tuple[int, int, int, str]:
    """(M, N, K, type of the products)"""
    x, w = site.operands[:2]
    assert x is not None and w is not None
    return math.prod(x.shape[:-1]), w.shape[0], w.shape[1], x.dtype if x.dtype == w.dtype else "w8a16"


def torch_us(m: int, n: int, k: int, dtype: str) -> float:
    """One product by torch in a graph, weights in turns; nan for what torch has no product of."""
    if dtype not in ("e4m3", "bf16"):
        return math.nan
    size = 1 if dtype == "e4m3" else 2
    copies = max(2, min(128, math.ceil(COLD / (n * k * size))))
    x = torch.randn(m, k, device="cuda").bfloat16()
    ws = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies)]
    one = torch.ones((), device="cuda")
    if dtype == "e4m3":
        x, ws = x.to(torch.float8_e4m3fn), [w.to(torch.float8_e4m3fn) for w in ws]

    def run(w: torch.Tensor) -> torch.Tensor:
        if dtype == "e4m3":
            return torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return x @ w.t()

    run(ws[0])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for w in ws * max(1, 16 // copies):
            run(w)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(24):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (copies * max(1, 16 // copies)))
    return sorted(times[3:])[len(times[3:]) // 2]


def apart(site: Site, align: int) -> Site:
    """The site with rows of x and w at multiples of `align` bytes."""
    operands = list(site.operands)
    for place in (0, 1):
        o = site.operands[place]
        assert o is not None
        size = DTYPES[o.dtype].itemsize
        ld = math.ceil(o.shape[-1] * size / align) * align // size
        operands[place] = Operand(o.dtype, o.shape, tuple(s // o.shape[-1] * ld for s in o.strides[:-1]) + (1,))
    return replace(site, operands=tuple(operands))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05")
    parser.add_argument("--precision", nargs="+", default=["fp8", "bf16"], choices=PRECISIONS)
    parser.add_argument("--horizon", type=int, nargs="+", default=[50, 10])
    parser.add_argument("--best", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--ops", nargs="+", default=list(PRODUCTS), choices=PRODUCTS)
    parser.add_argument("--apart", type=int, default=0, help="bytes: rows of x and w start at multiples of it, too")
    arguments = parser.parse_args()
    target, until = target_named("hopper"), time.monotonic() + arguments.seconds
    sites: dict[str, tuple[str, Site, int]] = {}
    for precision in arguments.precision:
        for horizon in arguments.horizon:
            shape = Shape(arguments.policy, precision=precision, horizon=horizon)
            for use in distinct(uses(shape, families=target.families())):
                w = use.site.operands[1] if len(use.site.operands) > 1 else None
                if use.site.op in arguments.ops and w is not None and w.nbytes >= FEWEST_BYTES:
                    sites.setdefault(key_of(use.site), (use.stage, use.site, use.count))
    if arguments.apart:
        moved = {key: (stage, apart(site, arguments.apart), n) for key, (stage, site, n) in sites.items()}
        sites |= {key_of(site): (stage, site, n) for stage, site, n in moved.values()}
    questions = []
    for key, (stage, site, _) in sites.items():
        found = list(CATALOG.candidates(site, target, target.families("native")))
        chosen = min(found, key=lambda choice: choice.cost_us)
        questions.append((stage, Question(key, site, WEIGHTS, 0.0, worth_it(found, chosen, arguments.best))))
    jobs = list(dict.fromkeys(j for _, q in questions for c in q.candidates for j in jobs_of(q, c, target)))
    begun = time.monotonic()
    cubins = dict(zip(jobs, compile_all(jobs), strict=True))
    print(f"{len(questions)} sites, {len(jobs)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    libraries: dict[Any, float] = {}
    with Worker() as worker:
        worker.start()
        for stage, question in questions:
            if time.monotonic() > until:
                print("no time for the rest", flush=True)
                break
            size = size_of(question.site)
            timed = []
            for choice in question.candidates:
                answer = worker.measure(chain_of(question, choice, target, cubins))
                name = label(choice.kernel, choice.config)
                timed.append({"kernel": name, "estimated_us": choice.cost_us, "us": answer.us, "failed": answer.failed})
            if size not in libraries:
                libraries[size] = torch_us(*size)
            library = {"torch_us": libraries[size], "timed": timed}
            rows.append({"stage": stage, "op": question.site.op, "size": size, **library})
            show(rows[-1])
    report.write("product_times", report.about("bench.product_times", "cuda") | {"rows": rows})
    return 0


def show(row: dict[str, Any]) -> None:
    m, n, k, dtype = row["size"]
    print(f"{row['stage']:14s} {row['op']:16s} {dtype} {m}x{n}x{k}  torch {row['torch_us']:.2f}")
    for each in sorted(row["timed"], key=lambda t: t["us"] or 1e9):
        share = row["torch_us"] / each["us"] if each["us"] else 0.0
        times = f"{each['us']:8.2f} us  estimated {each['estimated_us']:7.2f}  share {share:5.2f}"
        print(f"    {times}  {each['kernel']} {each['failed']}")


if __name__ == "__main__":
    raise SystemExit(main())
