"""Flash-style attention on mma.sync for sm_80 and later: which sites it serves, its tiles, their cost, its launch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target

SOURCE = "smxx_attention.cuh"
MAX_TOKEN = 8192  # elements of all heads of a token whose scale the kernel finds
MAX_GRID_Z = 65535  # CUDA programming guide, technical specifications per compute capability


@dataclass(frozen=True, slots=True)
class Tile:
    """WM groups of 16 packed rows times WN groups of keys, BN keys at a time, STAGES tiles of k and v in flight."""

    wm: int
    wn: int
    bn: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.wm

    @property
    def threads(self) -> int:
        return 32 * self.wm * self.wn


# In order of preference where costs are equal.
TILES = (
    Tile(4, 1, 64, 1),
    Tile(4, 1, 64, 2),
    Tile(8, 1, 64, 1),
    Tile(4, 1, 32, 1),
    Tile(2, 2, 64, 1),
    Tile(2, 1, 64, 1),
    Tile(1, 4, 64, 1),
    Tile(1, 4, 128, 1),
)
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 24, 32)  # of at most 32: a warp holds their statistics


@dataclass(frozen=True, slots=True)
class Shape:
    """An attention site in numbers. Batch axes are one; strides are of (batch, head, row), the mask's also of key."""

    batch: int
    heads_kv: int
    group: int  # query heads that read one key head
    sq: int
    sk: int
    d: int
    dv: int
    strides: tuple[tuple[int, ...], ...]  # of q, k, v, out
    mask_strides: tuple[int, ...]
    has_mask: bool
    per_row: bool  # whether the result is stored with a scale for each token

    @property
    def rows(self) -> int:
        return self.group * self.sq

    @property
    def token(self) -> int:
        """Elements of a token's result: all heads."""
        return self.heads_kv * self.group * self.dv

    @property
    def blocks_z(self) -> int:
        return self.batch * self.heads_kv

    @staticmethod
    def of(site: Site) -> Shape:
        q, k, v, mask, _ = operands_of(site)
        heads, sq, d = q.shape[-3:]
        heads_kv, sk, dv = v.shape[-3:]
        views = [strides_of(operand, operand.shape, 3) for operand in (q, k, v, site.results[0])]
        mask_view = strides_of(mask, (*q.shape[:-1], sk), 4) if mask else (0, 0, 0, 0)
        batch, group = math.prod(q.shape[:-3]), heads // heads_kv
        flags = (mask is not None, per_row_of(site))
        return Shape(batch, heads_kv, group, sq, sk, d, dv, tuple(views), mask_view, *flags)


def operands_of(site: Site) -> tuple[Operand, Operand, Operand, Operand | None, Operand | None]:
    """q, k, v, mask, length of a site; the optional ones may be left out at the end."""
    q, k, v, mask, length = (*site.operands, None, None)[:5]
    assert q and k and v, "attention needs q, k and v"
    return q, k, v, mask, length


def inv_of(site: Site) -> Operand | None:
    """The number that a result in e4m3 is stored times."""
    return site.operands[5] if len(site.operands) > 5 else None


def per_row_of(site: Site) -> bool:
    return bool(site.attrs.get("per_row", False))


def scale_strides(site: Site) -> tuple[int, ...]:
    """Of (batch, token) of the scales [..., Sq, 1]."""
    scales = site.results[1]
    *lead, rows, one = scales.shape
    *steps, row, last = scales.strides
    batch, _, row = strides_of(Operand("f32", (*lead, 1, rows, one), (*steps, 0, row, last)), (*lead, 1, rows, one), 3)
    return batch, row


def strides_of(operand: Operand, shape: tuple[int, ...], kept: int) -> tuple[int, ...]:
    """Strides of (batch, head, row, key)[:kept] of an operand broadcast to `shape` [..., head, row, key].

    Raises ValueError where the leading axes are not one axis with one stride.
    """
    missing = len(shape) - len(operand.shape)
    extents = (1,) * missing + operand.shape
    strides = (0,) * missing + operand.strides
    steps = [0 if extent == 1 else stride for extent, stride in zip(extents, strides, strict=True)]
    lead = [(size, step) for size, step in zip(shape[:-3], steps[:-3], strict=True) if size > 1]
    for (_, outer), (size, inner) in itertools.pairwise(lead):
        if outer != size * inner:
            raise ValueError(f"leading axes {list(shape[:-3])} with strides {steps[:-3]} are not one axis")
    return ((lead[-1][1] if lead else 0), *steps[-3:])[:kept]


def refuse(site: Site, target: Target) -> str:
    """Why this kernel cannot serve the site on the target, or ""."""
    q, k, v, mask, length = operands_of(site)
    out = site.results[0]
    reasons = [
        (q.dtype not in ("bf16", "f16") or {k.dtype, v.dtype} != {q.dtype}, f"q, k, v are {q.dtype}, {k.dtype}, "
         f"{v.dtype}: needs one of bf16, f16"),
        (out.dtype not in ("bf16", "f16", "f32", "e4m3"), f"result is {out.dtype}: needs bf16, f16, f32 or e4m3"),
        (any(d % 8 or not 8 <= d <= 256 for d in (q.shape[-1], v.shape[-1])),
         f"head sizes {q.shape[-1]} and {v.shape[-1]}: need multiples of 8 up to 256"),
        (site.attrs.get("probs", "f32") not in ("f32", "bf16"), f"probabilities in {site.attrs.get('probs')}"),
        (not site.attrs["scale"] > 0, f"scale {site.attrs['scale']} is not positive"),
        (mask is not None and mask.dtype != "bool", "the mask is not bool"),
        (length is not None and length.dtype != "i32", "the length is not i32"),
        (min(q.shape + k.shape) < 1, "an empty operand"),
        ("cp.async" not in target.has, f"{target.nvcc} has no cp.async"),
    ]  # fmt: skip
    for refused, reason in reasons:
        if refused:
            return reason
    return _refuse_scales(site) or _refuse_views(site) or _refuse_sizes(site, target)


def _refuse_scales(site: Site) -> str:
    """A result in e4m3 is stored with one scale that is given, or with one for each token; no other has scales."""
    out, inv, per_row = site.results[0], inv_of(site), per_row_of(site)
    token = out.shape[-3] * out.shape[-1]
    scaled = (inv is not None) + per_row
    reasons = [
        (scaled != (out.dtype == "e4m3"), f"a result in {out.dtype} with {scaled} kinds of scale"),
        (inv is not None and inv.dtype != "f32", "inv is not f32"),
        (per_row and site.results[-1].dtype != "f32", "the scales are not f32"),
        (per_row and site.attrs.get("staged", "bf16") != "bf16", f"results staged in {site.attrs.get('staged')}"),
        (per_row and token > MAX_TOKEN, f"tokens of {token} elements: a warp's registers hold {MAX_TOKEN}"),
    ]
    return next((reason for refused, reason in reasons if refused), "")


def _refuse_views(site: Site) -> str:
    q, k, v, mask, _ = operands_of(site)
    for name, operand in (("q", q), ("k", k), ("v", v), ("result", site.results[0])):
        step = 16 // max(2, DTYPES[operand.dtype].itemsize)
        aligned = step * DTYPES[operand.dtype].itemsize  # bytes: e4m3 is written 8 at a time
        if operand.strides[-1] != 1:
            return f"the last axis of {name} is not contiguous"
        if not operand.aligned:
            return f"{name} starts at no multiple of 16 bytes"
        if name in "kv" and operand.shape[-2] > 1 and operand.strides[-2] >= 1 << 30:
            return f"rows of {name} are {operand.strides[-2]} elements apart: the kernel counts them in 32-bit bytes"
        if any(s % step for s, extent in zip(operand.strides[:-1], operand.shape[:-1], strict=True) if extent > 1):
            return f"rows of {name} with strides {list(operand.strides)} are not {aligned}-byte aligned"
        try:
            strides_of(operand, operand.shape, 3)
        except ValueError as error:
            return f"{name}: {error}"
    try:
        if per_row_of(site):
            scale_strides(site)
    except ValueError as error:
        return f"scales: {error}"
    try:
        if mask:
            strides_of(mask, (*q.shape[:-1], k.shape[-2]), 4)
    except ValueError as error:
        return f"mask: {error}"
    return ""


def _refuse_sizes(site: Site, target: Target) -> str:
    shape = Shape.of(site)
    if shape.blocks_z > MAX_GRID_Z:
        return f"{shape.blocks_z} batches times key heads: the grid allows {MAX_GRID_Z}"
    if all(reason for _, reason in candidates(site, target)):
        return "; ".join(f"{show(config)}: {reason}" for config, reason in candidates(site, target))
    return ""


def smem_bytes(tile: Tile, d: int, dv: int) -> int:
    """Dynamic shared memory: the tiles, or the sums that take their place at the end. See AttentionTile, finish."""
    k_pitch, v_pitch = _round_up(d, 16) + 8, _round_up(dv, 16) + 8
    tiles = 2 * (tile.rows * k_pitch + tile.stages * tile.bn * (k_pitch + v_pitch))
    sums = tile.wn * tile.rows * (4 * (dv + 8) + 8 + 4)  # and (maximum, weight) and share of each row
    sums += 8 * tile.rows  # and where each row lies in the result
    return max(tiles, sums)


def candidates(site: Site, target: Target) -> list[tuple[Config, str]]:
    """All tiles and numbers of splits, each with the reason why it is left out, or ""."""
    shape = Shape.of(site)
    return [
        ({"WM": t.wm, "WN": t.wn, "BN": t.bn, "STAGES": t.stages, "SPLITS": n}, _exclude(t, n, shape, target))
        for t in TILES
        for n in SPLITS
    ]


def _exclude(tile: Tile, splits: int, shape: Shape, target: Target) -> str:
    smem = smem_bytes(tile, shape.d, shape.dv)
    blocks = _ceil_div(shape.rows, tile.rows) * shape.blocks_z
    if smem > target.smem_per_block:
        return f"needs {smem} bytes of shared memory, a block has {target.smem_per_block}"
    if tile.rows >= shape.rows + 16 and tile.wm > 1:
        return f"{tile.rows - shape.rows} of {tile.rows} rows would be empty"
    if splits > max(1, _ceil_div(shape.sk, tile.bn)):
        return f"more splits than the {_ceil_div(shape.sk, tile.bn)} tiles of keys"
    if splits > 1 and 3 * _round_up(splits, 4) > shape.dv + 8:
        return f"statistics of {splits} splits have no room in the bytes of {shape.dv + 8} sums a row"
    if splits > 1 and blocks >= 2 * target.sms:
        return f"{blocks} blocks fill {target.sms} SMs without splitting"
    if splits > 1 and blocks * splits > 4 * target.sms:
        return f"{blocks * splits} blocks: splits beyond 4 blocks an SM only add partial sums"
    return ""


def configs(site: Site, target: Target) -> list[Config]:
    return [config for config, reason in candidates(site, target) if not reason]


def tile_of(config: Config) -> Tile:
    return Tile(config["WM"], config["WN"], config["BN"], config["STAGES"])


def show(config: Config) -> str:
    tile = tile_of(config)
    return (
        f"{tile.rows}x{tile.bn} rows x keys, {tile.wm}x{tile.wn} warps, {tile.stages} stage, {config['SPLITS']} split"
    )


# Cost model. A block's tiles of keys each take the longer of their arithmetic and of their way from L2; blocks that
# share an SM share its rates. The rates of tensor cores and steps are a fit to 130 measurements on an H200 (all sites
# and configs of the test): 7 % apart on average, 98 % of them within 25 %. That fit was of an earlier copy loop and
# combination, whose terms it separated; the terms of today's (LOAD_US, DRAIN_US, ARRIVE_US, ROUND_US) are estimates.
LAUNCH_US = 1.0  # a dependent graph node with a grid of about one wave: H200, measured 0.97
START_US = 1.4  # the length and the queries, from L2 or memory
STEP_US = 0.45  # barriers, softmax and fragment latencies of one tile that other blocks on the SM can hide
LOAD_US = 0.45  # from the request for a tile to its first bytes
DRAIN_US = 0.06  # a thread's 4 columns of the block's sums through shared memory
ARRIVE_US = 1.8  # a fence, an atomic, the statistics of all splits and their shares
ROUND_US = 0.45  # the loads of partial sums that a thread has under way at once
L2_GBS_PER_SM = 90.0  # 64 bytes a clock at 1.4 to 1.9 GHz, less what queues
MMA_SHARE = {True: 0.52, False: 0.85}  # of the dense rate that mma.sync reaches, by whether the target has a wider path


def cost(site: Site, config: Config, target: Target) -> float:
    """Estimated microseconds with all keys visible."""
    shape, tile, splits = Shape.of(site), tile_of(config), config["SPLITS"]
    blocks = _ceil_div(shape.rows, tile.rows) * shape.blocks_z * splits
    per_sm = _blocks_per_sm(shape, tile, target)
    waves = _ceil_div(blocks, per_sm * target.sms)
    shared = min(per_sm, _ceil_div(blocks, target.sms))  # blocks that run on one SM at a time
    steps = _ceil_div(_ceil_div(shape.sk, tile.bn), splits)
    wide = bool({"wgmma", "tcgen05"} & target.has)
    flops = 2 * tile.rows * tile.bn * (_round_up(shape.d, 16) + shape.dv)
    busy = min(1.0, shared * tile.threads / 256)  # two warps on each quarter of an SM keep its tensor core fed
    math_us = STEP_US + flops * shared / (target.tflops["bf16"] * 1e6 / target.sms * MMA_SHARE[wide] * busy)
    copy_us = 2 * tile.bn * (shape.d + shape.dv) * shared / (L2_GBS_PER_SM * 1e3)
    waits_us = copy_us + LOAD_US * (2 if tile.stages == 1 else 1)  # one stage: v is asked for after k has come
    first_us = LOAD_US + copy_us + math_us
    drain_us = DRAIN_US * _quads(shape, tile)
    total = LAUNCH_US + START_US + waves * (first_us + (steps - 1) * max(math_us, waits_us) + drain_us)
    total += _combine_us(shape, tile, splits) if splits > 1 else 0.0
    return total + (_tokens_us(shape, tile) if shape.per_row else 0.0)


def _blocks_per_sm(shape: Shape, tile: Tile, target: Target) -> int:
    """As shared memory and registers allow; of each block's shared memory the driver keeps 1 KiB more."""
    registers = min(255, 72 + shape.dv // 2 + tile.bn // tile.wn // 2)  # within 20 % of what the compiler takes
    by_registers = 65536 // (_round_up(registers, 8) * tile.threads)
    return max(1, min(target.smem_per_sm // (smem_bytes(tile, shape.d, shape.dv) + 1024), by_registers))


def _quads(shape: Shape, tile: Tile) -> int:
    """Groups of 4 columns of a row tile that one thread adds up."""
    return _ceil_div(min(tile.rows, shape.rows) * shape.dv // 4, tile.threads)


def _combine_us(shape: Shape, tile: Tile, splits: int) -> float:
    """The last block of a row tile reads the partial sums of all splits: in rounds of 4 of them, or as L2 delivers."""
    rounds = _ceil_div(_quads(shape, tile), _ceil_div(shape.dv, 32)) * _ceil_div(splits, 4)
    partial = 4 * min(tile.rows, shape.rows) * shape.dv
    return ARRIVE_US + max(ROUND_US * rounds, ROUND_US + splits * partial / (L2_GBS_PER_SM * 1e3))


def _panel(shape: Shape, tile: Tile) -> int:
    """Row tiles after which a token ends with a tile."""
    return shape.group // math.gcd(shape.group, tile.rows)


def _tokens_us(shape: Shape, tile: Tile) -> float:
    """The last block of a panel reads the results of its tokens, 16 loads a lane at once, and writes their codes."""
    panel = _panel(shape, tile)
    tokens = min(shape.sq, panel * tile.rows // shape.group)
    at_once = max(1, 16 // _ceil_div(shape.token, 256)) * (tile.threads // 32)
    arrive = ARRIVE_US if panel * shape.heads_kv > 1 else 0.0
    return arrive + max(ROUND_US * _ceil_div(tokens, at_once), 2 * tokens * shape.token / (L2_GBS_PER_SM * 1e3))


def scratch(site: Site, config: Config) -> int:
    """Sums, maxima and weights of the splits: fp32 [splits, B * Hkv, rows, Dv] and [splits, B * Hkv, rows, 2]; then,
    where tokens have scales, their results: bf16 [B, Sq, Hq, Dv]."""
    shape = Shape.of(site)
    return _staged_at(shape, config) + (2 * shape.batch * shape.sq * shape.token if shape.per_row else 0)


def counters(site: Site, config: Config) -> int:
    """32-bit counters: one for each row tile of each key head where split, then one for each panel of each batch."""
    shape, tile = Shape.of(site), tile_of(config)
    panels = _ceil_div(_ceil_div(shape.rows, tile.rows), _panel(shape, tile)) * shape.batch if shape.per_row else 0
    return _panels_at(shape, config) + 4 * panels


def _panels_at(shape: Shape, config: Config) -> int:
    return 0 if config["SPLITS"] == 1 else 4 * _ceil_div(shape.rows, tile_of(config).rows) * shape.blocks_z


def _partials(shape: Shape, config: Config) -> int:
    return int(config["SPLITS"]) * shape.blocks_z * shape.rows


def _stats_at(shape: Shape, config: Config) -> int:
    return 4 * _partials(shape, config) * shape.dv


def _staged_at(shape: Shape, config: Config) -> int:
    split = config["SPLITS"] > 1
    return _round_up(_stats_at(shape, config) + 8 * _partials(shape, config), 16) if split else 0


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    """One launch."""
    shape, tile = Shape.of(site), tile_of(config)
    q, _, _, mask, _ = operands_of(site)
    types = [DTYPES[q.dtype].cuda, DTYPES[site.results[0].dtype].cuda]
    sizes = [shape.d, shape.dv, tile.wm, tile.wn, tile.bn, tile.stages]
    flags = [_flag(mask is not None), _flag(config["SPLITS"] > 1), str(shape.token if shape.per_row else 0)]
    stage = Stage(
        source=SOURCE,
        entry=f"frtc::smxx_attention<{', '.join([*types, *map(str, sizes), *flags])}>",
        grid=(_ceil_div(shape.rows, tile.rows), config["SPLITS"], shape.blocks_z),
        block=tile.threads,
        smem=smem_bytes(tile, shape.d, shape.dv),
        params=_params(site, shape, config),
        waits=True,
    )
    return (stage,)


def _params(site: Site, shape: Shape, config: Config) -> tuple[Param, ...]:
    """In the order of the kernel's parameters."""
    split = config["SPLITS"] > 1
    pointers = [Param("operand", i) for i in range(5)] + [Param("result", 0)]
    partial = [Param("scratch", 0), Param("scratch", _stats_at(shape, config)), Param("counters", 0)]
    partial = partial if split else [Param("i64", 0)] * 3  # null pointers
    views = [*shape.strides[:3], shape.mask_strides, shape.strides[3]]
    strides = [Param("i64", step) for view in views for step in view]
    resume, causal = int(site.attrs.get("resume", -1)), int(site.attrs.get("causal", False))
    sizes = [shape.heads_kv, shape.group, shape.sq, shape.sk, resume, causal]
    scale = Param("f32", float(site.attrs["scale"]) * math.log2(math.e))
    codes = _codes_params(site, shape, config)
    return (*pointers, *partial, *strides, *(Param("i32", n) for n in sizes), scale, *codes)


def _codes_params(site: Site, shape: Shape, config: Config) -> tuple[Param, ...]:
    """What a result in e4m3 needs, or zeros."""
    null = Param("i64", 0)
    inv = null if inv_of(site) is None else Param("operand", 5)
    if not shape.per_row:
        return (inv, *[null] * 5, Param("i32", 1))
    staged, arrived = Param("scratch", _staged_at(shape, config)), Param("counters", _panels_at(shape, config))
    steps = [Param("i64", step) for step in scale_strides(site)]
    return (inv, Param("result", 1), staged, arrived, *steps, Param("i32", _panel(shape, tile_of(config))))


def _flag(value: bool) -> str:
    return str(value).lower()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, step: int) -> int:
    return _ceil_div(a, step) * step


KERNELS = (Kernel("smxx_attention", "attention", "baseline", refuse, configs, cost, stages, scratch, counters),)
