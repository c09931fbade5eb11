"""Products whose rows are finished: linear_norm, and linear and gated_linear that find a scale for each row (per_row).

Device code: finish.cuh, smxx_finish_gemm.cuh, and smxx_gemm.cuh or another mainloop. To everything but its finish the
site is a linear (or gated_linear) over the same operands at the same places, whose result is s, or the rows staged in
bf16. What finishes them:

    FINISH=panel    in the same launch, the block that stores the last tile of a panel of BM rows
    FINISH=spread   in the same launch, all blocks, once all tiles are stored; where all are on SMs at once
    FINISH=launch   a second launch, a block a row; for scales alone: a norm's own launch needs no fusion
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from frtc.kernels import smxx_gemm
from frtc.kernels.costs import moving_us
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.mainloop import Mainloop, Tile
from frtc.kernels.product import NULL, PLACES, Argument, Product, epilogue_refuses, product_of
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target
from frtc.kernels.views import collapse, last_axis_is_dense

NAMES = {"linear": "row_scaled_gemm", "gated_linear": "row_scaled_gated_gemm", "linear_norm": "norm_gemm"}
STAGED = "bf16"  # what rows are rounded to before their largest magnitude is known
FLOATS = ("bf16", "f16", "f32")
NORM_W, NORM_B, INV = 8, 9, 10  # places in linear_norm

# One block finishes a panel alone: its SM reads 64 bytes of L2 and issues 4 instructions a clock, so that 64 rows of
# 1024 take longer than a launch of their own on all SMs, and a panel of 128 rows of a prefix ten times as long. All
# blocks, waiting for each other, need 10.2 us for 512 x 1152 x 1152 in the graph, where two launches need 4.4 + 3.0.
PANEL_ROWS = 64
NORM_WIDTH, SCALED_WIDTH = 4096, 16384  # longest rows that are served

# Of the finish of a panel: round trips to the counter and to the rows, measured on an H200; instructions of a lane for
# an element, counted in the code; and how many of them a warp and an SM then issue in a clock.
ARRIVE_US = 2.8
# All blocks meet, then each finishes a row, or its warps do; measured on an H200.
SPREAD_ROW_US, SPREAD_US, ROUND_US = 2.8, 3.0, 1.2
INSTRUCTIONS = {"scales": 6.0, "rms": 6.6, "ada": 6.6, "layer": 9.8}
AGAIN = 5.0  # the norm is made twice where its largest magnitude decides how it is stored
ISSUED_BY_WARP, ISSUED = 0.25, 1.5
BLOCK, MAX_ITEMS = 128, 4  # of the second launch: threads that short rows share, groups of 16 bytes a thread keeps


def as_product(site: Site) -> Site:
    """The linear or gated_linear that stores s."""
    op = "gated_linear" if site.op == "gated_linear" else "linear"
    operands = site.operands if site.op == "gated_linear" else site.operands[: PLACES[op]["inv"]]
    return Site(op, operands, (_rows(site),), {"act": site.attrs.get("act", "none")})


def _rows(site: Site) -> Operand:
    """s: a result of linear_norm, else staged in scratch."""
    if site.op == "linear_norm":
        return site.results[0]
    shape = site.results[0].shape
    ld = -(-shape[-1] // 8) * 8
    return Operand(STAGED, shape, (*Operand.packed(STAGED, *shape[:-1], ld).strides[:-1], 1))


def _product(site: Site) -> Product:
    p = product_of(as_product(site))
    assert isinstance(p, Product), p
    return p


def _y(site: Site) -> tuple[int, Operand]:
    """Place among the results, and the operand."""
    place = 1 if site.op == "linear_norm" else 0
    return place, site.results[place]


def _scale(site: Site) -> Operand | None:
    return site.results[-1] if site.attrs.get("per_row") else None


def _at(site: Site, place: int) -> Operand | None:
    return site.operands[place] if site.op == "linear_norm" and place < len(site.operands) else None


# ---- what is served -------------------------------------------------------------------------------------------------


def refuse(site: Site, target: Target, loop: Mainloop = smxx_gemm.MAINLOOP) -> str:
    norm = site.op == "linear_norm"
    if not norm and not site.attrs.get("per_row"):
        return "has no finish"
    if site.attrs.get("norm", "none") != "none":
        return "x_scale has moments of x's rows, which a product that is finished makes no factors of"
    if site.op == "gated_linear" and len(site.operands) > 2 and site.operands[2] is not None:
        return "gate and up are two weights; needs their rows interleaved in one"
    p = product_of(as_product(site))
    if isinstance(p, str):
        return p
    if reason := loop.refuse(p, target) or epilogue_refuses(p):
        return reason
    _, y = _y(site)
    width = NORM_WIDTH if norm else SCALED_WIDTH
    if y.shape[-1] > width:
        return f"rows of {y.shape[-1]} elements; at most {width}"
    if reason := _refuse_norm(site) or _refuse_results(site, p):
        return reason
    if norm and p.m > PANEL_ROWS:
        return f"{p.m} rows; with more than {PANEL_ROWS} a norm of its own is quicker than waiting for all blocks"
    return ""


def _refuse_norm(site: Site) -> str:
    if site.op != "linear_norm":
        return ""
    s = site.results[0]
    if s.dtype not in ("bf16", "f16"):
        return f"s is {s.dtype}; needs bf16 or f16"
    for name, vector in (("norm_w", _at(site, NORM_W)), ("norm_b", _at(site, NORM_B))):
        if vector is not None and vector.dtype not in FLOATS:
            return f"{name} is {vector.dtype}; needs one of {', '.join(FLOATS)}"
        if vector is not None and not (math.prod(vector.shape[:-1]) == 1 and last_axis_is_dense(vector, s.shape[-1])):
            return f"{name} is not one dense row for all"
    return ""


def _refuse_results(site: Site, p: Product) -> str:
    (_, y), scale, inv = _y(site), _scale(site), _at(site, INV)
    if (y.dtype == "e4m3") != (scale is not None or inv is not None) or y.dtype not in (*FLOATS, "e4m3"):
        return f"y is {y.dtype} with{'' if scale or inv else 'out'} a scale"
    if any(given is not None and given.dtype != "f32" for given in (scale, inv)):
        return "a scale is not f32"
    if not last_axis_is_dense(y, y.shape[-1]):
        return "last axis of y is strided"
    if any(_steps(result, p.batch) is None for result in (y, scale) if result is not None):
        return "leading axes of a result do not step as one"
    return ""


def _steps(result: Operand, batch: int) -> tuple[int, int] | None:
    """Elements from row to row and from batch to batch; None where these are not even."""
    lead, strides = result.shape[:-1], result.strides[:-1]
    cut = next((i for i in range(len(lead) + 1) if math.prod(lead[:i]) == batch), None)
    if cut is None:
        return None
    found = [collapse(lead[part], [strides[part]])[1][0] for part in (slice(cut, None), slice(cut))]
    return None if any(len(steps) > 1 for steps in found) else tuple(sum(steps) for steps in found)  # type: ignore[return-value]


# ---- configs and costs ----------------------------------------------------------------------------------------------


def configs(site: Site, target: Target, loop: Mainloop = smxx_gemm.MAINLOOP) -> list[Config]:
    found: list[Config] = []
    p = _product(site)
    for tile in loop.tiles(p, target):
        if not tile.persistent and _fits(site, tile):
            few = p.m <= PANEL_ROWS and tile.bn <= 64  # few rows in wide tiles occupy few SMs
            if few:
                found.append({**tile.config(), "FINISH": "panel"})
            if few and loop.together(p, tile, target):
                found.append({**tile.config(), "FINISH": "spread"})
        if site.op != "linear_norm":
            found.append({**tile.config(), "FINISH": "launch"})
    # Few rows are a step of a loop, ten times over: there a launch that only quantises is one node too many.
    return [config for config in found if config["FINISH"] != "launch"] or found


def _fits(site: Site, tile: Tile) -> bool:
    """Whether each warp has room for a row in the memory of the ring, beside the norm's vectors."""
    width = -(-_rows(site).shape[-1] // 8) * 8
    vectors = sum(width * DTYPES[v.dtype].itemsize for v in (_at(site, NORM_W), _at(site, NORM_B)) if v is not None)
    return (tile.free - vectors) // tile.warps >= width * DTYPES[_rows(site).dtype].itemsize


def cost(site: Site, config: Config, target: Target, loop: Mainloop = smxx_gemm.MAINLOOP) -> float:
    """Estimated microseconds: the product's and the finish's."""
    p = _product(site)
    tile = loop.tile(config, p)
    product_us = loop.cost_us(p, tile, target)
    if config["FINISH"] != "launch":
        return product_us + (panel_us if config["FINISH"] == "panel" else spread_us)(site, tile)
    lanes, _ = _lanes(site)
    items = -(-_rows(site).shape[-1] // (lanes * 8))
    return product_us + moving_us((_rows(site), *site.results), target) + 0.3 * (items - 1)


def spread_us(site: Site, tile: Tile) -> float:
    """Of the rows of a panel by all of its blocks."""
    p = _product(site)
    blocks = -(-p.n // tile.bn) * tile.shares
    rows = min(tile.bm, p.m)
    if rows <= blocks:
        return SPREAD_ROW_US
    return SPREAD_US + ROUND_US * -(-rows // (blocks * tile.warps))


def panel_us(site: Site, tile: Tile) -> float:
    """Of the last block of the tallest panel."""
    p = _product(site)
    norm = site.op == "linear_norm"
    instructions = INSTRUCTIONS[str(site.attrs["kind"]) if norm else "scales"]
    instructions += AGAIN if norm and _scale(site) else 0.0
    elements = min(tile.bm, p.m) * _rows(site).shape[-1]
    clocks = elements / 32 * instructions / min(ISSUED, ISSUED_BY_WARP * tile.warps)
    return ARRIVE_US + clocks / smxx_gemm.CLOCK * 1e6


# ---- launches -------------------------------------------------------------------------------------------------------


def stages(site: Site, config: Config, target: Target, loop: Mainloop = smxx_gemm.MAINLOOP) -> tuple[Stage, ...]:
    p = _product(site)
    tile = loop.tile(config, p)
    s_at = _s(site, loop.scratch(p, tile))
    arguments = tuple(_staged(argument, site, s_at) for argument in p.arguments())
    if config["FINISH"] == "launch":
        return (loop.stage(p, tile, target, p.epilogue(), arguments), _second(site, s_at, p))
    n, s, (_, y) = _rows(site).shape[-1], DTYPES[_rows(site).dtype].cuda, _y(site)
    per_row = str(_scale(site) is not None).lower()
    numbers = f"{tile.bm}, {tile.free}, {n}, {s}, {DTYPES[y.dtype].cuda}, {per_row}"
    spread = str(config["FINISH"] == "spread").lower()
    epilogue = f"frtc::Finished<{p.epilogue()}, {numbers}, {_norm(site)}, {spread}>"
    own = _arguments(site, p, Param("counters", loop.counters(p, tile)), s_at)
    stage = loop.stage(p, tile, target, epilogue, (*own, *arguments))
    return (replace(stage, source=f"{loop.header}_finish_gemm.cuh", meets=config["FINISH"] == "spread"),)


def _staged(argument: Argument, site: Site, s_at: Param) -> Argument:
    """The argument, or scratch in the place of a result that is staged there."""
    staged = site.op != "linear_norm" and argument.param.kind == "result"
    return Argument(argument.cuda, s_at) if staged else argument


def _s(site: Site, used: int) -> Param:
    """Where rows are staged: a result, or behind the scratch that the product uses."""
    return Param("result", 0) if site.op == "linear_norm" else Param("scratch", used)


def _norm(site: Site) -> str:
    if site.op != "linear_norm":
        return "frtc::NoNorm"
    return f"frtc::NormOf<frtc::Norm::{site.attrs['kind']}, {_cuda(site, NORM_W)}, {_cuda(site, NORM_B)}>"


def _cuda(site: Site, place: int) -> str:
    vector = _at(site, place)
    return DTYPES[vector.dtype].cuda if vector else "frtc::Absent"


def _arguments(site: Site, p: Product, counters: Param, s_at: Param) -> tuple[Argument, ...]:
    """In the order of the constructor of Finished."""
    (place, y), scale, s = _y(site), _scale(site), p.y
    vectors = [(_cuda(site, i), _at(site, i), i) for i in (NORM_W, NORM_B)] + [("float", _at(site, INV), INV)]
    (ld_y, batch_y), (ld_scale, batch_scale) = (_even(result, p.batch) for result in (y, scale))
    return (
        Argument("unsigned int*", counters),
        *(Argument(f"const {cuda}*", Param("operand", i) if given else NULL) for cuda, given, i in vectors),
        Argument(f"{s.cuda}*", s_at),
        Argument(f"{DTYPES[y.dtype].cuda}*", Param("result", place)),
        Argument("float*", Param("result", place + 1) if scale else NULL),
        *_numbers("int", "i32", (s.ld, ld_y, ld_scale)),
        *_numbers("long long", "i64", (s.batch, batch_y, batch_scale)),
        *(Argument("float", Param("f32", float(site.attrs.get(name, 0.0)))) for name in ("eps", "offset")),
    )


def _numbers(cuda: str, kind: str, values: Sequence[int]) -> tuple[Argument, ...]:
    return tuple(Argument(cuda, Param(kind, value)) for value in values)


def _even(result: Operand | None, batch: int) -> tuple[int, int]:
    steps = (0, 0) if result is None else _steps(result, batch)
    assert steps is not None, "refused"
    return steps


def _lanes(site: Site) -> tuple[int, int]:
    """Threads a row and rows a block of the second launch."""
    groups = -(-_rows(site).shape[-1] // 8)
    if groups <= 32:
        lanes = 1 << (groups - 1).bit_length()
        return lanes, BLOCK // lanes
    return -(-groups // (32 * MAX_ITEMS)) * 32, 1


def _second(site: Site, s_at: Param, p: Product) -> Stage:
    """The launch that quantises staged rows."""
    lanes, rows = _lanes(site)
    (y, scale), s = site.results, p.y
    steps = [_even(result, p.batch) for result in (y, scale)]
    count = p.batch * p.m
    numbers = (p.m, s.ld, *(step for step, _ in steps))
    batches = (s.batch, *(step for _, step in steps))
    return Stage(
        source="smxx_finish_gemm.cuh",
        entry=f"frtc::quantize_rows<{y.shape[-1]}, {lanes}, {rows}, {s.cuda}>",
        grid=(-(-count // rows), 1, 1),
        block=lanes * rows,
        smem=0,
        params=(
            s_at, Param("result", 0), Param("result", 1),
            NULL if p.rows is None else Param("operand", p.rows), Param("i32", count),
            *(Param("i32", value) for value in numbers), *(Param("i64", value) for value in batches),
        ),
        waits=True,
    )  # fmt: skip


def scratch(site: Site, config: Config, loop: Mainloop = smxx_gemm.MAINLOOP) -> int:
    """Bytes: those of the product, then staged rows."""
    p = _product(site)
    used = loop.scratch(p, loop.tile(config, p))
    if site.op == "linear_norm":
        return used
    s = _rows(site)
    return used + math.prod(s.shape[:-1]) * (-(-s.shape[-1] // 8) * 8) * DTYPES[STAGED].itemsize


def counters(site: Site, config: Config, loop: Mainloop = smxx_gemm.MAINLOOP) -> int:
    """Bytes: those of the product, then one 32-bit counter for each panel."""
    p = _product(site)
    tile = loop.tile(config, p)
    panels = 0 if config["FINISH"] == "launch" else -(-p.m // tile.bm)
    return loop.counters(p, tile) + 4 * p.batch * panels


def kernels_over(loop: Mainloop) -> tuple[Kernel, ...]:
    """Finished rows of a mainloop's products."""
    return tuple(
        Kernel(
            name=f"{loop.header}_{name}",
            op=op,
            family=loop.family,
            refuse=partial(refuse, loop=loop),
            configs=partial(configs, loop=loop),
            cost=partial(cost, loop=loop),
            stages=partial(stages, loop=loop),
            scratch=partial(scratch, loop=loop),
            counters=partial(counters, loop=loop),
        )
        for op, name in NAMES.items()
    )


KERNELS = kernels_over(smxx_gemm.MAINLOOP)
