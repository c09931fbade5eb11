"""Attention of few queries on wgmma with keys and values in registers: what it serves, tiles, cost, launch."""

from __future__ import annotations

import math

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.sm90_attention import LAUNCH_US, SLOWER, pack
from frtc.kernels.sm90_attention_split import CLUSTERED
from frtc.kernels.smxx_attention import MAX_GRID_Z, Shape, inv_of, operands_of, per_row_of
from frtc.kernels.smxx_attention import refuse as refuse_baseline
from frtc.kernels.spec import Config, Kernel, Param, Site, Stage
from frtc.kernels.targets import Target

SOURCE = "sm90_attention_keys.cuh"
THREADS, WARPS, SPLIT = 256, 8, 8  # SPLIT: blocks of a cluster, which share the keys
TILES = (32, 16, 8, 64)  # rows of a cluster, in order of preference where costs are equal
KEYS = 16  # of a tile
EARLY, LATE = KEYS * (WARPS - 1) * SPLIT, 8 * SPLIT  # most keys before and from the first one that is new
MAX_OFFSET = 1 << 31  # bytes


def refuse(site: Site, target: Target) -> str:
    """Why this kernel cannot serve the site on the target, or "". What the baseline refuses is refused."""
    _, _, _, mask, _ = operands_of(site)
    out = site.results[0]
    reasons = [
        ("wgmma" not in target.has, f"{target.nvcc} has no wgmma"),
        (mask is not None, "a mask"),
        (per_row_of(site), "a scale for each token"),
        (out.dtype == "f32", "result is f32: needs bf16, f16 or e4m3"),
    ]
    for refused, reason in reasons:
        if refused:
            return reason
    return refuse_baseline(site, target) or _refuse_types(site) or _refuse_sizes(site, target)


def _refuse_types(site: Site) -> str:
    shape, (q, k, v, *_) = Shape.of(site), operands_of(site)
    if q.dtype != "bf16":
        return f"operands are {q.dtype}: blocks exchange sums in bf16"
    if shape.d % 32 or shape.dv % 16:
        return f"head sizes {shape.d} and {shape.dv}: need multiples of 32 and of 16"
    for name, operand in (("k", k), ("v", v)):
        if operand.shape[-2] * operand.strides[-2] * DTYPES[operand.dtype].itemsize >= MAX_OFFSET:
            return f"rows of {name} are {operand.strides[-2]} elements apart: the kernel counts 31 bits of bytes"
    return ""


def _refuse_sizes(site: Site, target: Target) -> str:
    shape = Shape.of(site)
    heads, fresh = shape.heads_kv * shape.group, fresh_of(site)
    if max(heads, shape.batch) > MAX_GRID_Z:
        return f"{heads} heads, {shape.batch} batches: the grid allows {MAX_GRID_Z}"
    if fresh > EARLY or shape.sk - fresh > LATE:
        return f"{fresh} and {shape.sk - fresh} keys: registers of a cluster hold {EARLY} and {LATE} new ones"
    if configs(site, target):
        return ""
    return "; ".join(f"{c['ROWS']} rows: {reason}" for c, reason in candidates(site, target))


def resume_of(site: Site) -> int:
    """The first key that is seen whatever the length is; -1 where there is none."""
    resume = int(site.attrs.get("resume", -1))
    return resume if 0 <= resume < Shape.of(site).sk else -1


def fresh_of(site: Site) -> int:
    """The first key that may be new: its row and those behind it are read behind the wait."""
    shape, resume = Shape.of(site), resume_of(site)
    return resume if resume >= 0 else shape.sk - min(shape.sk, shape.sq, LATE)


def tiles_of(site: Site) -> int:
    """Of 16 keys in a block; the last one holds new ones."""
    return _ceil_div(_ceil_div(fresh_of(site), SPLIT), KEYS) + 1


def smem_bytes(shape: Shape, rows: int) -> int:
    """q, p, maxima and weights of warps, received sums and statistics, barriers: see KeysTile."""
    columns = 32 if shape.dv > 128 else 16  # of a warp
    panels = 128 * rows * (_ceil_div(shape.d, 64) + 2)
    return panels + 2 * 4 * WARPS * rows + SPLIT * rows * (2 * columns + 8) + 16


def candidates(site: Site, target: Target) -> list[tuple[Config, str]]:
    """All tiles, each with the reason why it is left out, or ""."""
    shape = Shape.of(site)
    return [({"ROWS": rows, "SPLIT": SPLIT}, _exclude(rows, shape, target)) for rows in TILES]


def _exclude(rows: int, shape: Shape, target: Target) -> str:
    smem, queries = smem_bytes(shape, rows), shape.sq * pack(shape, rows)
    if smem > target.smem_per_block:
        return f"needs {smem} bytes of shared memory, a block has {target.smem_per_block}"
    if rows == 8 and shape.dv <= 128:
        return f"8 rows of {shape.dv} columns leave packets of 8 bytes"
    if rows > 8 and rows >= 2 * queries and (rows > 16 or shape.dv > 128):
        return f"{rows - queries} of {rows} rows would be empty"
    if rows < TILES[0] and _turns(shape, rows) > 2:
        return f"SMs take the blocks in {_turns(shape, rows)} turns"
    return ""


def configs(site: Site, target: Target) -> list[Config]:
    return [config for config, reason in candidates(site, target) if not reason]


# Cost model, in clocks of an SM, of launches with full edges: counts of instructions in the machine code, bytes and
# products; not fitted. A product with A in registers takes 16 clocks of 64 rows for up to 32 columns. A prototype of
# this scheme took 4.9 us of 32 rows and 4.0 of 16 between full edges on an H200, 4.1 and 2.5 between early ones.
# LAUNCH_US and SLOWER are sm90_attention's, CLUSTERED is sm90_attention_split's.
CLOCK_MHZ = 1755.0
FILL, EXCHANGE = 64.0, 12.0  # bytes a clock from L2 to an SM; to another SM
FIRST, RECEIVE, STORE = 700.0, 250.0, 350.0  # clocks: to the first bytes; of a packet on its way; adding and storing
BARRIER, PRODUCT = 150.0, 100.0  # clocks: stores to shared memory that all warps wait for; of one product alone
COLUMN = 16.0  # clocks of a scheduler's two warps for a column of scores: maximum, power, sum, rounding


def cost(site: Site, config: Config, target: Target) -> float:
    """Estimated microseconds. Keys that are not visible cost what others do."""
    shape, tiles = Shape.of(site), tiles_of(site)
    rows: int = config["ROWS"]
    asked = FIRST + 2 * (rows + tiles * KEYS) * shape.d / FILL
    step = 2 * max(16.0, rows / 2)  # of both warpgroups
    scores = asked + BARRIER + PRODUCT + shape.d / 16 * step
    softmax = scores + rows * COLUMN + 2 * BARRIER
    came = asked + 2 * tiles * KEYS * shape.dv / FILL
    values = max(softmax, came) + PRODUCT + tiles * step * (2 if shape.dv > 128 else 1)
    sent = values + 2 * rows * shape.dv * (SPLIT - 1) / SPLIT / EXCHANGE
    block = sent + RECEIVE + STORE * _ceil_div(rows, 4 * WARPS)
    return LAUNCH_US + SLOWER * _turns(shape, rows) * block / CLOCK_MHZ


def _turns(shape: Shape, rows: int) -> int:
    """How often all SMs that clusters can have get a block."""
    clusters = _ceil_div(shape.sq * pack(shape, rows), rows) * _groups(shape, rows) * shape.batch
    return _ceil_div(clusters * SPLIT, CLUSTERED[SPLIT])


def _groups(shape: Shape, rows: int) -> int:
    """Groups of heads that share rows."""
    return shape.heads_kv * shape.group // pack(shape, rows)


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    """One launch."""
    shape, rows = Shape.of(site), config["ROWS"]
    packed = pack(shape, rows)
    causal = "true" if site.attrs.get("causal", False) else "false"
    sizes = ", ".join(map(str, (shape.d, shape.dv, rows, tiles_of(site), packed)))
    params = _params(site)
    stage = Stage(
        source=SOURCE,
        entry=f"frtc::sm90_attention_keys<{DTYPES[site.results[0].dtype].cuda}, {sizes}, {causal}>",
        grid=(SPLIT * _ceil_div(shape.sq, rows // packed), _groups(shape, rows), shape.batch),
        block=THREADS,
        smem=smem_bytes(shape, rows),
        params=(*params, Param("i32", 0)),
        waits=True,
        settled=(len(params), 1, 2),
    )
    return (stage,)


def _params(site: Site) -> tuple[Param, ...]:
    """All but the number of settled rows."""
    shape, (_, k, v, _, length) = Shape.of(site), operands_of(site)
    null = Param("i64", 0)
    q_steps, k_steps, v_steps, out_steps = shape.strides
    steps = (*q_steps, *k_steps[:2], *v_steps[:2], *out_steps)
    row_bytes = (k_steps[2] * DTYPES[k.dtype].itemsize, v_steps[2] * DTYPES[v.dtype].itemsize)
    sizes = (*row_bytes, shape.group, shape.sq, shape.sk, fresh_of(site), resume_of(site))
    return (
        *(Param("operand", i) for i in range(3)),
        Param("operand", 4) if length else null,
        Param("result", 0),
        *(Param("i64", step) for step in steps),
        *(Param("i32", size) for size in sizes),
        Param("f32", float(site.attrs["scale"]) * math.log2(math.e)),
        Param("operand", 5) if inv_of(site) else null,
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


KERNELS = (Kernel("sm90_attention_keys", "attention", "sm_90a", refuse, configs, cost, stages),)
