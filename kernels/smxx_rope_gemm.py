"""linear_rope_qkv: q, k and v of attention by one launch, a mainloop's product with rotation in its epilogue.

Device code: epilogue_rope.cuh, and smxx_gemm.cuh or another mainloop. To everything but its epilogue the site is a
linear over the same operands at the same places, with one result [S, N].
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from frtc.kernels import smxx_gemm
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.mainloop import Mainloop
from frtc.kernels.product import NULL, Argument, Product, epilogue_refuses, product_of
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target
from frtc.kernels.views import last_axis_is_dense, moves_as_vectors

RESULTS, ANGLES = ("bf16", "f16"), ("f32", "bf16", "f16")
GROUP = 16  # a head is a multiple of it, so that eight columns of the product lie in one head
COS, SIN = 3, 4  # places of the tables, where a linear has residual and gate


def as_linear(site: Site) -> Site:
    """The linear whose product is that of `site`."""
    operands = (*site.operands[:COS], None, None, *site.operands[SIN + 1 :])
    w = site.operands[1]
    assert w is not None
    dtype, (rows, _) = site.results[1].dtype, site.results[1].shape[-2:]
    return Site("linear", operands, (Operand.packed(dtype, rows, w.shape[0]),), {**site.attrs, "act": "none"})


def _tables(site: Site) -> tuple[Operand, Operand]:
    cos, sin = site.operands[COS], site.operands[SIN]
    assert cos is not None and sin is not None
    return cos, sin


def refuse(site: Site, target: Target, loop: Mainloop = smxx_gemm.MAINLOOP) -> str:
    (cos, sin), size = _tables(site), site.results[1].shape[-1]
    if size % GROUP:
        return f"heads of {size} elements, not a multiple of {GROUP}"
    if len({result.dtype for result in site.results}) > 1 or site.results[1].dtype not in RESULTS:
        return f"results are {', '.join(result.dtype for result in site.results)}; needs one of {', '.join(RESULTS)}"
    if cos.dtype != sin.dtype or cos.dtype not in ANGLES:
        return f"cos is {cos.dtype} and sin is {sin.dtype}; needs one of {', '.join(ANGLES)}"
    if not all(last_axis_is_dense(view, view.shape[-1]) for view in (cos, sin, *site.results)):
        return "the last axis of a table or result is strided"
    p = product_of(as_linear(site))
    return p if isinstance(p, str) else loop.refuse(p, target) or epilogue_refuses(p, loop.moments)


def _product(site: Site) -> Product:
    p = product_of(as_linear(site))
    assert isinstance(p, Product), p
    return p


def configs(site: Site, target: Target, loop: Mainloop = smxx_gemm.MAINLOOP) -> list[Config]:
    return [tile.config() for tile in loop.tiles(_product(site), target)]


def cost(site: Site, config: Config, target: Target, loop: Mainloop = smxx_gemm.MAINLOOP) -> float:
    p = _product(site)
    return loop.cost_us(p, loop.tile(config, p), target)


def scratch(site: Site, config: Config, loop: Mainloop = smxx_gemm.MAINLOOP) -> int:
    p = _product(site)
    return loop.scratch(p, loop.tile(config, p))


def counters(site: Site, config: Config, loop: Mainloop = smxx_gemm.MAINLOOP) -> int:
    p = _product(site)
    return loop.counters(p, loop.tile(config, p))


def stages(site: Site, config: Config, target: Target, loop: Mainloop = smxx_gemm.MAINLOOP) -> tuple[Stage, ...]:
    p = _product(site)
    stage = loop.stage(p, loop.tile(config, p), target, _epilogue(site, p), _arguments(site, p))
    return (replace(stage, source=f"{loop.header}_rope_gemm.cuh"),)


def _epilogue(site: Site, p: Product) -> str:
    """The C++ type."""
    bias = p.bias.cuda if p.bias else "frtc::None"
    alpha = "none" if p.alpha is None else "each" if p.alpha.ld else "one"
    types = f"{p.y.cuda}, {bias}, {DTYPES[_tables(site)[0].dtype].cuda}"
    whole = str(p.whole and all(map(moves_as_vectors, (*_tables(site), *site.results)))).lower()
    return f"frtc::RopeEpilogue<{types}, {site.results[1].shape[-1]}, frtc::Alpha::{alpha}, {p.factors()}, {whole}>"


def _arguments(site: Site, p: Product) -> tuple[Argument, ...]:
    """In the order of RopeEpilogue's constructor."""
    angle = DTYPES[_tables(site)[0].dtype].cuda
    optional = ((p.bias, p.bias.cuda if p.bias else "frtc::None"), (p.alpha, "float"), (p.x_scale, "float"))
    bias, *scales = (Argument(f"const {cuda}*", Param("operand", m.index) if m else NULL) for m, cuda in optional)
    numbers = (
        int(site.attrs["heads"]), int(site.attrs["kv_heads"]), *(table.strides[0] for table in _tables(site)),
        p.x_scale.ld if p.x_scale else 0, *(step for result in site.results for step in result.strides[:2]),
    )  # fmt: skip
    return (
        bias,
        *(Argument(f"const {angle}*", Param("operand", place)) for place in (COS, SIN)),
        *scales,
        *(Argument(f"{p.y.cuda}*", Param("result", i)) for i in range(3)),
        *(Argument("int", Param("i32", number)) for number in numbers),
        *p.eps_argument(),
    )


def kernels_over(loop: Mainloop) -> tuple[Kernel, ...]:
    """linear_rope_qkv by the products of a mainloop."""
    kernel = Kernel(
        name=f"{loop.header}_rope_gemm",
        op="linear_rope_qkv",
        family=loop.family,
        refuse=partial(refuse, loop=loop),
        configs=partial(configs, loop=loop),
        cost=partial(cost, loop=loop),
        stages=partial(stages, loop=loop),
        scratch=partial(scratch, loop=loop),
        counters=partial(counters, loop=loop),
    )
    return (kernel,)


KERNELS = kernels_over(smxx_gemm.MAINLOOP)
