"""A mainloop: a way to multiply x and w, whatever becomes of the accumulators; kernels differ by what builds on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from frtc.kernels.product import Argument, Product
from frtc.kernels.spec import Config, Stage
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
    scratch: Callable[[Product, Any], int]
    counters: Callable[[Product, Any], int]
    together: Callable[[Product, Any, Target], bool] = lambda p, tile, target: False
    moments: bool = False
