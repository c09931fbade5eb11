"""linear_moments: a product that also stores what its readers make up for a norm with.

Device code: moments.cuh behind a mainloop whose lanes store 32 neighbouring columns of a row together. To all but its
epilogue the site is a linear over the same operands at the same places, whose result is s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from frtc.kernels.dtypes import DTYPES
from frtc.kernels.mainloop import Mainloop
from frtc.kernels.product import NULL, PLACES, Argument, Product, epilogue_refuses, product_of
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target
from frtc.kernels.views import last_axis_is_dense, moves_as_vectors, row_steps

NORM_W, INV = 8, 9  # places
STORED, VECTORS = ("bf16", "f16"), ("f32", "bf16", "f16")
MOMENTS_US = 0.2  # about: s is squared and summed, z is stored beside it


def as_linear(site: Site) -> Site:
    """The linear whose result is s."""
    operands = site.operands[: PLACES["linear"]["inv"]]
    return Site("linear", operands, site.results[:1], {"act": site.attrs.get("act", "none")})


def _product(site: Site) -> Product:
    p = product_of(as_linear(site))
    assert isinstance(p, Product), p
    return p


def _at(site: Site, place: int) -> Operand | None:
    return site.operands[place] if place < len(site.operands) else None


def refuse(site: Site, target: Target, loop: Mainloop) -> str:
    p = product_of(as_linear(site))
    if isinstance(p, str):
        return p
    if reason := loop.refuse(p, target) or epilogue_refuses(p):
        return reason
    if p.batch > 1:
        return f"{p.batch} batches of rows; moments and z have one step from row to row"
    if p.y.dtype not in STORED:
        return f"s is {p.y.dtype}; needs one of {', '.join(STORED)}"
    return _refuse_norm(site) or _refuse_results(site) or _refuse_places(site, p)


def _refuse_norm(site: Site) -> str:
    norm_w, inv, width = _at(site, NORM_W), _at(site, INV), site.results[0].shape[-1]
    if norm_w is not None and norm_w.dtype not in VECTORS:
        return f"norm_w is {norm_w.dtype}; needs one of {', '.join(VECTORS)}"
    if norm_w is not None and not (math.prod(norm_w.shape[:-1]) == 1 and last_axis_is_dense(norm_w, width)):
        return "norm_w is not one dense row for all"
    return "" if inv is None or inv.dtype == "f32" else f"inv is {inv.dtype}; needs f32"


def _refuse_results(site: Site) -> str:
    s, moments, z = site.results
    if z.dtype not in ((*STORED,) if _at(site, INV) is None else ("e4m3",)):
        return f"z is {z.dtype} with{'' if _at(site, INV) else 'out'} inv"
    if moments.dtype != "f32" or not last_axis_is_dense(moments, moments.shape[-1]):
        return "moments are strided, or not f32"
    if not last_axis_is_dense(z, s.shape[-1]) or row_steps(s.shape, (z, moments)) is None:
        return "rows of z or moments are not evenly spaced"
    return ""


def _refuse_places(site: Site, p: Product) -> str:
    vectors = [site.results[2], *(o for o in (_at(site, NORM_W),) if o is not None)]
    if p.whole and all(map(moves_as_vectors, vectors)):
        return ""
    return f"rows of {p.n} columns or an operand beside them are no groups of 8 that move as vectors"


def configs(site: Site, target: Target, loop: Mainloop, without: Callable[[Any], bool]) -> list[Config]:
    return [tile.config() for tile in loop.tiles(_product(site), target) if not without(tile)]


def cost(site: Site, config: Config, target: Target, loop: Mainloop) -> float:
    """Estimated microseconds."""
    p = _product(site)
    return loop.cost_us(p, loop.tile(config, p), target) + MOMENTS_US


def stages(site: Site, config: Config, target: Target, loop: Mainloop) -> tuple[Stage, ...]:
    p = _product(site)
    s, _, z = site.results
    norm_w = _at(site, NORM_W)
    cuda = DTYPES[norm_w.dtype].cuda if norm_w else "frtc::None"
    types = f"{DTYPES[s.dtype].cuda}, {DTYPES[z.dtype].cuda}, {cuda}, {str(site.attrs['norm'] == 'layer').lower()}"
    epilogue = f"frtc::WithMoments<{p.epilogue()}, {types}>"
    stage = loop.stage(p, loop.tile(config, p), target, epilogue, (*_arguments(site, cuda), *p.arguments()))
    return (replace(stage, source=f"{loop.header}_moments_gemm.cuh"),)


def _arguments(site: Site, cuda: str) -> tuple[Argument, ...]:
    """In the order of WithMoments's constructor."""
    s, moments, z = site.results
    steps = row_steps(s.shape, (moments, z))
    assert steps is not None, "refused"
    vectors = ((f"const {cuda}*", NORM_W), ("const float*", INV))
    return (
        *(Argument(kind, Param("operand", i) if _at(site, i) else NULL) for kind, i in vectors),
        Argument("float*", Param("result", 1)),
        Argument(f"{DTYPES[z.dtype].cuda}*", Param("result", 2)),
        *(Argument("int", Param("i32", step)) for step in steps[1]),
        Argument("float", Param("f32", float(site.attrs.get("offset", 0.0)))),
    )


def scratch(site: Site, config: Config, loop: Mainloop) -> int:
    p = _product(site)
    return loop.scratch(p, loop.tile(config, p))


def counters(site: Site, config: Config, loop: Mainloop) -> int:
    p = _product(site)
    return loop.counters(p, loop.tile(config, p))


def kernels_over(loop: Mainloop, without: Callable[[Any], bool] = lambda tile: False) -> tuple[Kernel, ...]:
    """linear_moments by the products of a mainloop that stores as moments.cuh wants it; without: tiles to leave out."""
    return (
        Kernel(
            name=f"{loop.header}_moments_gemm",
            op="linear_moments",
            family=loop.family,
            refuse=partial(refuse, loop=loop),
            configs=partial(configs, loop=loop, without=without),
            cost=partial(cost, loop=loop),
            stages=partial(stages, loop=loop),
            scratch=partial(scratch, loop=loop),
            counters=partial(counters, loop=loop),
        ),
    )
