"""Attention on wgmma, keys and values through tensor maps: which sites it serves, its tiles, their cost, its launch."""

from __future__ import annotations

import math

from frtc.kernels import smxx_attention
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.sm90_room import alone, fitting
from frtc.kernels.smxx_attention import MAX_GRID_Z, Shape, inv_of, operands_of, per_row_of
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage, TensorMap
from frtc.kernels.targets import Target

SOURCE = "sm90_attention.cuh"
ROWS, PANEL, THREADS = 64, 64, 256  # packed rows of a block; columns of 128 bytes; two warpgroups
WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # of products, of those in sm90.cuh
KEYS = (64, 80, 96, 128)  # of a tile, in order of preference where costs are equal
ACCUMULATORS = 352  # columns of sums and scores that 255 registers a thread hold without spilling
BARRIERS = 40  # bytes


def refuse(site: Site, target: Target) -> str:
    """Why this kernel cannot serve the site on the target, or ""."""
    return refuse_kind(site, target) or _refuse_sizes(site, target)


def refuse_kind(site: Site, target: Target, causal: bool = False) -> str:
    """Why no kernel of this family can, or none that is not `causal`. What the baseline refuses is refused."""
    _, _, _, mask, _ = operands_of(site)
    out = site.results[0]
    reasons = [
        (not {"wgmma", "tma"} <= target.has, f"{target.nvcc} has no wgmma or no tensor maps"),
        (mask is not None, "a mask"),
        (bool(site.attrs.get("causal", False)) and not causal, "causality"),
        (per_row_of(site), "a scale for each token"),
        (out.dtype == "f32", "result is f32: needs bf16, f16 or e4m3"),
    ]
    for refused, reason in reasons:
        if refused:
            return reason
    return smxx_attention.refuse(site, target) or _refuse_views(site)


def _refuse_views(site: Site) -> str:
    """Tensor maps take no axis that repeats."""
    for name, operand in zip("qkv", operands_of(site)[:3], strict=True):
        assert operand is not None
        if any(step == 0 for step, extent in zip(operand.strides, operand.shape, strict=True) if extent > 1):
            return f"{name} repeats along an axis: strides {list(operand.strides)}"
    return ""


def _refuse_sizes(site: Site, target: Target) -> str:
    shape = Shape.of(site)
    heads = shape.heads_kv * shape.group // pack(shape)
    if max(heads, shape.batch) > MAX_GRID_Z:
        return f"{heads} groups of heads, {shape.batch} batches: the grid allows {MAX_GRID_Z}"
    if configs(site, target):
        return ""
    return "; ".join(f"{config['BN']} keys: {reason}" for config, reason in candidates(site, target))


def pack(shape: Shape, rows: int = ROWS) -> int:
    """Neighbouring heads in a tile of rows: the largest power of two that divides the heads of a key head."""
    return min(rows, shape.group & -shape.group)


def smem_bytes(d: int, dv: int, bn: int) -> int:
    """q, then k and v of each warpgroup, rows of 128 bytes for each 64 columns; five barriers."""
    keys, values = _ceil_div(d, PANEL), _ceil_div(dv, PANEL)
    return 128 * (ROWS * keys + 2 * bn * (keys + values)) + BARRIERS


def out_width(dv: int) -> int:
    """Columns of the second product."""
    return next(width for width in WIDTHS if width >= dv)


def candidates(site: Site, target: Target) -> list[tuple[Config, str]]:
    """All tiles, each with the reason why it is left out, or ""."""
    shape = Shape.of(site)
    return [({"BN": bn}, _exclude(bn, shape, target)) for bn in KEYS]


def _exclude(bn: int, shape: Shape, target: Target) -> str:
    smem = smem_bytes(shape.d, shape.dv, bn)
    if smem > target.smem_per_block:
        return f"needs {smem} bytes of shared memory, a block has {target.smem_per_block}"
    if out_width(shape.dv) + bn > ACCUMULATORS:
        return f"{out_width(shape.dv)} columns of sums and {bn} of scores spill"
    if bn > KEYS[0] and shape.sk <= bn:
        return f"one tile holds all {shape.sk} keys and leaves a warpgroup idle"
    return ""


def configs(site: Site, target: Target) -> list[Config]:
    return [config for config, reason in candidates(site, target) if not reason]


# Cost model, in clocks of an SM: counts of bytes and instructions. Shared memory feeds wgmma with 90 bytes a clock and
# L2 an SM with 64, or with 45 where panels of 128 bytes are cut from rows of other sizes; a product of 64 rows takes a
# clock for each two columns of a step. Softmax: 8 clocks of the special function unit for a warp's 32 powers; its other
# instructions run beside those of the other warpgroup. LAUNCH_US and SLOWER are fitted to 46 measurements on an H200
# (bench/attention_times.py, full edges): 42 of them within 10 %, all within 14 %.
CLOCK_MHZ = 1755.0  # under load
LAUNCH_US, SLOWER = 1.2, 1.2
FEED, FILL, FILL_CUT = 90.0, 64.0, 45.0  # bytes a clock from shared memory to wgmma, from L2 to an SM
START, STEP, STORE = 900.0, 200.0, 700.0  # clocks: to the first byte; barriers of a tile; the last stores
SHARED_COLUMNS = 176  # columns of sums and scores up to which registers hold two blocks an SM


def cost(site: Site, config: Config, target: Target) -> float:
    """Estimated microseconds with all keys visible."""
    shape = Shape.of(site)
    bn: int = config["BN"]
    tiles, width = _ceil_div(shape.sk, bn), out_width(shape.dv)
    scores = _ceil_div(shape.d, 16) * max(bn / 2, 32 * (ROWS + bn) / FEED)
    sums = bn / 16 * max(width / 2, 32 * width / FEED)
    softmax = 8 * bn / 2 + width / 2 + STEP
    alone = scores + softmax + sums
    waves, shared = _waves(shape, bn, target)
    fill = FILL if shape.d % PANEL == shape.dv % PANEL == 0 else FILL_CUT
    key_bytes, value_bytes = 128 * _ceil_div(shape.d, PANEL), 128 * _ceil_div(shape.dv, PANEL)  # of a row
    copy = shared * bn * (key_bytes + value_bytes) / fill
    both = max(alone, shared * 2 * (scores + sums), 2 * copy)
    start = START + shared * (ROWS + 2 * bn) * key_bytes / fill
    end = STORE + 2 * 4 * ROWS * shape.dv / 128
    block = start + tiles // 2 * both + tiles % 2 * max(alone, copy) + end
    return LAUNCH_US + SLOWER * waves * block / CLOCK_MHZ


def _waves(shape: Shape, bn: int, target: Target) -> tuple[int, int]:
    """How often all SMs get blocks, and how many an SM has at a time."""
    blocks = _blocks(shape)
    by_smem = fitting(_smem(shape, bn, target), target)
    per_sm = max(1, min(by_smem, 2 if out_width(shape.dv) + bn <= SHARED_COLUMNS else 1))
    return _ceil_div(blocks, per_sm * target.sms), min(per_sm, _ceil_div(blocks, target.sms))


def _blocks(shape: Shape) -> int:
    return _ceil_div(shape.sq * pack(shape), ROWS) * shape.heads_kv * shape.group // pack(shape) * shape.batch


def _smem(shape: Shape, bn: int, target: Target) -> int:
    """Bytes that a block asks for: where there are no more blocks than SMs, so many that each has one."""
    used = smem_bytes(shape.d, shape.dv, bn)
    return alone(used, target) if _blocks(shape) <= target.sms else used


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    """One launch."""
    shape, packed = Shape.of(site), pack(Shape.of(site))
    q, out, bn = operands_of(site)[0], site.results[0], config["BN"]
    heads = shape.heads_kv * shape.group
    sizes = [shape.d, shape.dv, bn, packed]
    stage = Stage(
        source=SOURCE,
        entry=f"frtc::sm90_attention<{DTYPES[q.dtype].cuda}, {DTYPES[out.dtype].cuda}, {', '.join(map(str, sizes))}>",
        grid=(_ceil_div(shape.sq, ROWS // packed), heads // packed, shape.batch),
        block=THREADS,
        smem=_smem(shape, bn, target),
        params=params_of(site),
        tensormaps=maps_of(site, ROWS, bn),
        waits=True,
    )
    return (stage,)


def maps_of(site: Site, rows: int, keys: int) -> tuple[TensorMap, ...]:
    """Of q in boxes of `rows` packed rows, of k and v in boxes of `keys` keys."""
    shape, packed = Shape.of(site), pack(Shape.of(site), rows)
    boxes = [(packed, rows // packed), (1, keys), (1, keys)]
    return tuple(
        _map(index, operand, shape.batch, shape.strides[index], box)
        for index, (operand, box) in enumerate(zip(operands_of(site)[:3], boxes, strict=True))
        if operand
    )


def _map(index: int, operand: Operand, batch: int, strides: tuple[int, ...], box: tuple[int, int]) -> TensorMap:
    """Axes column, head, row, batch. An axis of one is given the stride that it would have without gaps."""
    heads, rows, columns = operand.shape[-3:]
    size = DTYPES[operand.dtype].itemsize
    extents, steps = (columns, heads, rows, batch), [strides[1], strides[2], strides[0]]
    span = size * columns
    for axis, extent in enumerate(extents[1:]):
        steps[axis] = span if extent == 1 else size * steps[axis]
        span = max(span, steps[axis] * extent)
    return TensorMap(Param("operand", index), operand.dtype, extents, tuple(steps), (PANEL, *box, 1), swizzle=128)


def params_of(site: Site) -> tuple[Param, ...]:
    """In the order of the parameters of the kernels of this family."""
    shape = Shape.of(site)
    null = Param("i64", 0)
    length = Param("operand", 4) if operands_of(site)[4] else null
    inv = Param("operand", 5) if inv_of(site) else null
    strides = [Param("i64", step) for step in shape.strides[3]]
    sizes = [Param("i32", n) for n in (shape.group, shape.sq, shape.sk, int(site.attrs.get("resume", -1)))]
    scale = Param("f32", float(site.attrs["scale"]) * math.log2(math.e))
    return (*(Param("tensormap", i) for i in range(3)), length, Param("result", 0), *strides, *sizes, scale, inv)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


KERNELS = (Kernel("sm90_attention", "attention", "sm_90a", refuse, configs, cost, stages),)
