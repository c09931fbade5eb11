"""What of a model runs in which precision: asked for, and, after all passes, what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from frtc.lowering.ir import Module
from frtc.passes.sites import PRODUCTS, loops_of, product_flops, sites_of

KINDS = ("bf16", "fp8", "w8a16")


@dataclass(frozen=True, slots=True)
class Precision:
    """kind of everything that is not named below.

    stages   program -> kind; a part that a pass split off ("denoise.once") follows its program
    keep     patterns (as of file names) of sites that stay in 16 bits
    static   activation scales come from a calibration, one for each site and round; else each row finds its own
    fallen   site -> why it stays in 16 bits although FP8 was asked for
    """

    kind: str = "bf16"
    stages: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    static: bool = False
    fallen: Mapping[str, str] = field(default_factory=dict)

    def of(self, site: str, program: str) -> str:
        """ "bf16", "fp8" or "w8a16"."""
        if site in self.fallen or any(fnmatchcase(site, pattern) for pattern in self.keep):
            return "bf16"
        return self.stages.get(program) or self.stages.get(program.split(".")[0], self.kind)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset({self.kind, *self.stages.values()})

    def unknown(self, module: Module) -> list[str]:
        """Stages and patterns that name nothing in the module."""
        programs = {g.name for g in module.graphs}
        names = [s.name for s in sites_of(module)]
        stages = [s for s in self.stages if s not in programs]
        return stages + [p for p in self.keep if not any(fnmatchcase(name, p) for name in names)]


@dataclass(frozen=True, slots=True)
class Share:
    """FLOPs of the products of a program, by what they multiply: "fp8" (both in 8 bits), "w8a16", "bf16", "f32"."""

    program: str
    flops: Mapping[str, float]

    @property
    def fp8(self) -> float:
        """Share of FP8 x FP8."""
        return self.flops.get("fp8", 0.0) / max(sum(self.flops.values()), 1.0)


def shares_of(module: Module) -> list[Share]:
    """Of each program with products, all rounds together; read from the operands as they are after all passes."""
    found: dict[str, dict[str, float]] = {}
    for program, kind, flops in _products(module):
        kinds = found.setdefault(program, {})
        kinds[kind] = kinds.get(kind, 0.0) + flops
    return [Share(program, kinds) for program, kinds in found.items()]


def _products(module: Module) -> list[tuple[str, str, float]]:
    loops, found = loops_of(module), []
    for graph in module.graphs:
        _, rounds = loops.get(graph.name, ("", 1))
        for node in graph.nodes:
            if node.op in PRODUCTS and not node.is_const:
                x, w = node.operands[:2]
                kind = "fp8" if x.dtype == "e4m3" else "w8a16" if w.dtype == "e4m3" else x.dtype
                found.append((graph.name, kind, product_flops(node) * rounds))
    return found
