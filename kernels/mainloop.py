"""A mainloop: a way to multiply x and w, whatever becomes of the accumulators; kernels differ by what builds on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from frtc.kernels.product import Argument, Product, epilogue_refuses, product_of
from frtc.kernels.spec import Config, Kernel, Site, Stage
from frtc.kernels.targets import Target


class Tile(Protocol):
    """One instance of a mainloop's template.

    free     bytes of shared memory that the epilogue may use
    warps    that store
    shares   blocks that store parts of one tile
    """

    @property
    def bm(self) -> int: ...
    @property
    def bn(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def shares(self) -> int: ...
    @property
    def persistent(self) -> bool: ...
    def config(self) -> Config: ...


def nothing(p: Product, tile: Any) -> int:
    """Bytes of scratch, or of counters, of a mainloop that needs none: sums stay in its blocks."""
    return 0


@dataclass(frozen=True, slots=True)
class Mainloop:
    """What a kernel over this mainloop asks it.

    header     what the names of its device files begin with
    together   whether all blocks that store are on SMs at once, so that they can wait for each other
    moments    whether threads that store find factors of their rows first (row_factors.cuh)
    """

    family: str
    header: str
    refuse: Callable[[Product, Target], str]
    tiles: Callable[[Product, Target], Sequence[Any]]
    tile: Callable[[Config, Product], Any]
    cost_us: Callable[[Product, Any, Target], float]
    stage: Callable[[Product, Any, Target, str, Sequence[Argument]], Stage]
    scratch: Callable[[Product, Any], int] = nothing
    counters: Callable[[Product, Any], int] = nothing
    together: Callable[[Product, Any, Target], bool] = lambda p, tile, target: False
    moments: bool = False


# ---- products that are stored as they are ---------------------------------------------------------------------------


def kernels_over(loop: Mainloop, names: Mapping[str, str]) -> tuple[Kernel, ...]:
    """linear, gated_linear and matmul, as `names` has them (op -> kernel), by the products of a mainloop."""
    return tuple(
        Kernel(
            name=name,
            op=op,
            family=loop.family,
            refuse=partial(refuse, loop=loop),
            configs=partial(configs, loop=loop),
            cost=partial(cost, loop=loop),
            stages=partial(stages, loop=loop),
            scratch=partial(scratch, loop=loop),
            counters=partial(counters, loop=loop),
        )
        for op, name in names.items()
    )


def refuse(site: Site, target: Target, loop: Mainloop) -> str:
    p = product_of(site)
    return p if isinstance(p, str) else loop.refuse(p, target) or epilogue_refuses(p, moments=loop.moments)


def configs(site: Site, target: Target, loop: Mainloop) -> list[Config]:
    return [tile.config() for tile in loop.tiles(_product(site), target)]


def cost(site: Site, config: Config, target: Target, loop: Mainloop) -> float:
    p = _product(site)
    return loop.cost_us(p, loop.tile(config, p), target)


def stages(site: Site, config: Config, target: Target, loop: Mainloop) -> tuple[Stage, ...]:
    p = _product(site)
    return (loop.stage(p, loop.tile(config, p), target, p.epilogue(), p.arguments()),)


def scratch(site: Site, config: Config, loop: Mainloop) -> int:
    p = _product(site)
    return loop.scratch(p, loop.tile(config, p))


def counters(site: Site, config: Config, loop: Mainloop) -> int:
    p = _product(site)
    return loop.counters(p, loop.tile(config, p))


def _product(site: Site) -> Product:
    p = product_of(site)
    assert isinstance(p, Product)
    return p
