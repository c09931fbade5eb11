"""Attention of few queries on wgmma, a cluster of blocks shares the keys: what it serves, tiles, cost, launch."""

from __future__ import annotations

import itertools

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.sm90_attention import LAUNCH_US, PANEL, SLOWER, WIDTHS, maps_of, pack, params_of, refuse_kind
from frtc.kernels.sm90_room import CLUSTERED, alone, fitting
from frtc.kernels.smxx_attention import MAX_GRID_Z, Shape, operands_of
from frtc.kernels.spec import Config, Kernel, Param, Site, Stage
from frtc.kernels.targets import Target

SOURCE = "sm90_attention_split.cuh"
THREADS = 128
TILES = (32, 16, 64)  # rows of a cluster, in order of preference where costs are equal
SPLITS = (8, 4, 2)  # blocks of a cluster
REGISTERS = 210  # a thread's sums and probabilities: what 255 hold without spilling
MOST_BLOCKS = 2  # of 128 threads and up to 255 registers on an SM


def refuse(site: Site, target: Target) -> str:
    """Why this kernel cannot serve the site on the target, or ""."""
    return refuse_kind(site, target, causal=True) or _refuse_types(site) or _refuse_sizes(site, target)


def _refuse_types(site: Site) -> str:
    shape, q = Shape.of(site), operands_of(site)[0]
    if q.dtype != "bf16":
        return f"operands are {q.dtype}: blocks exchange sums in bf16"
    if shape.d % PANEL or shape.dv % PANEL:
        return f"head sizes {shape.d} and {shape.dv}: need multiples of {PANEL}"
    return ""


def _refuse_sizes(site: Site, target: Target) -> str:
    shape = Shape.of(site)
    heads = shape.heads_kv * shape.group
    if max(heads, shape.batch) > MAX_GRID_Z:
        return f"{heads} heads, {shape.batch} batches: the grid allows {MAX_GRID_Z}"
    if configs(site, target):
        return ""
    return "; ".join(f"{c['ROWS']} rows, {c['SPLIT']} blocks: {reason}" for c, reason in candidates(site, target))


def keys_of(shape: Shape, split: int) -> int:
    """Keys of a block: the narrowest product that holds its part of them, or 0 where none does."""
    return next((width for width in WIDTHS if width * split >= shape.sk), 0)


def smem_bytes(shape: Shape, rows: int, split: int) -> int:
    """Used by q, k, v, what is received, barriers: see SplitTile."""
    tiles = 2 * (rows * shape.d + keys_of(shape, split) * (shape.d + shape.dv))
    return tiles + rows * (2 * shape.dv + 8) + 8 * (shape.d // PANEL + 3)


def candidates(site: Site, target: Target) -> list[tuple[Config, str]]:
    """All tiles, each with the reason why it is left out, or ""."""
    shape = Shape.of(site)
    return [
        ({"ROWS": rows, "SPLIT": split, "ALONE": single}, _exclude(rows, split, single, shape, target))
        for rows, split, single in itertools.product(TILES, SPLITS, (False, True))
    ]


def _exclude(rows: int, split: int, single: bool, shape: Shape, target: Target) -> str:
    keys, smem = keys_of(shape, split), smem_bytes(shape, rows, split)
    if not keys:
        return f"{_ceil_div(shape.sk, split)} keys of a block: a product has up to {WIDTHS[-1]}"
    if smem > target.smem_per_block:
        return f"needs {smem} bytes of shared memory, a block has {target.smem_per_block}"
    if shape.dv // 2 + keys // 4 > REGISTERS or keys // 2 + keys // 4 > REGISTERS:
        return f"{shape.dv} columns of sums and {keys} of probabilities spill"
    if rows // split * shape.dv // 8 % 32:
        return f"{rows // split} rows of {shape.dv} leave lanes of a warp without a packet"
    if rows > 16 and rows >= 2 * shape.sq * pack(shape, rows):
        return f"{rows - shape.sq * pack(shape, rows)} of {rows} rows would be empty"
    if split > 2 and keys_of(shape, split // 2) == keys:
        return f"half as many blocks hold all {shape.sk} keys"
    if single and (_per_sm(smem, target) == 1 or _blocks(shape, rows, split) > CLUSTERED[split]):
        return "an SM takes one block anyway, or there are more than SMs"
    return ""


def configs(site: Site, target: Target) -> list[Config]:
    return [config for config, reason in candidates(site, target) if not reason]


# Cost model, in clocks of an SM after the grids before are complete: counts of bytes, products and instructions, from
# the time line of a decoder prototype on an H200; not fitted. Shared memory feeds wgmma with 90 bytes a clock, L2 an SM
# with 64, another SM with 12. LAUNCH_US and SLOWER are sm90_attention's.
CLOCK_MHZ = 1755.0
FILL, FEED, EXCHANGE = 64.0, 90.0, 12.0  # bytes a clock
FIRST, RECEIVE, STORE = 750.0, 250.0, 400.0  # clocks: to the first bytes; of a packet on its way; adding and storing
POWERS, SCORE = 8.0, 4.0  # clocks of a warp for 32 powers; for the other instructions of a score of each lane


def cost(site: Site, config: Config, target: Target) -> float:
    """Estimated microseconds. Keys that are not visible cost what others do."""
    shape = Shape.of(site)
    rows: int = config["ROWS"]
    split: int = config["SPLIT"]
    keys = keys_of(shape, split)
    waves, shared = _waves(shape, config, target)
    asked = FIRST + shared * 2 * (rows + keys) * shape.d / FILL
    scores = asked + shared * 4 * max(keys / 2, 32 * (64 + keys) / FEED)  # of the last panel of four steps
    softmax = scores + keys / 2 * (POWERS + SCORE)
    product = shared * keys / 16 * max(shape.dv / 2, 32 * shape.dv / FEED)
    values = max(softmax, asked + shared * 2 * keys * shape.dv / FILL) + product
    exchange = shared * 2 * rows * shape.dv * (split - 1) / split / EXCHANGE
    sent = max(values, values - product * (1 - PANEL / shape.dv) + exchange)  # a panel goes when its product is done
    block = sent + RECEIVE + STORE * _ceil_div(rows // split * shape.dv // 8, THREADS)
    return LAUNCH_US + SLOWER * waves * block / CLOCK_MHZ


def _waves(shape: Shape, config: Config, target: Target) -> tuple[int, int]:
    """How often all SMs get blocks, and how many an SM has at a time: of a launch that begins early, as many as fit."""
    split: int = config["SPLIT"]
    per_sm = _per_sm(_smem(shape, config, target), target)
    return _ceil_div(_blocks(shape, config["ROWS"], split), per_sm * CLUSTERED[split]), per_sm


def _per_sm(smem: int, target: Target) -> int:
    return max(1, min(MOST_BLOCKS, fitting(smem, target)))


def _smem(shape: Shape, config: Config, target: Target) -> int:
    """Bytes that a block asks for. ALONE: so many that an SM takes one block."""
    used = smem_bytes(shape, config["ROWS"], config["SPLIT"])
    return alone(used, target) if config["ALONE"] else used


def _blocks(shape: Shape, rows: int, split: int) -> int:
    return split * _ceil_div(shape.sq * pack(shape, rows), rows) * _groups(shape, rows) * shape.batch


def _groups(shape: Shape, rows: int) -> int:
    """Groups of heads that share rows."""
    return shape.heads_kv * shape.group // pack(shape, rows)


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    """One launch."""
    shape = Shape.of(site)
    rows, split = config["ROWS"], config["SPLIT"]
    packed, keys = pack(shape, rows), keys_of(shape, split)
    causal = str(bool(site.attrs.get("causal", False))).lower()
    sizes = ", ".join(map(str, (shape.d, shape.dv, keys, rows, split, packed, causal)))
    params = params_of(site)
    stage = Stage(
        source=SOURCE,
        entry=f"frtc::sm90_attention_split<{DTYPES[site.results[0].dtype].cuda}, {sizes}>",
        grid=(split * _ceil_div(shape.sq, rows // packed), _groups(shape, rows), shape.batch),
        block=THREADS,
        smem=_smem(shape, config, target),
        params=(*params, Param("i32", 0)),
        tensormaps=maps_of(site, rows, keys),
        waits=True,
        settled=(len(params), 1, 2),
    )
    return (stage,)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


KERNELS = (Kernel("sm90_attention_split", "attention", "sm_90a", refuse, configs, cost, stages),)
