"""The kernels there are, and which one serves a site.

choice = CATALOG.select(site, target)        # choice.kernel, choice.config; print(choice) says why not the others
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from frtc import plugins
from frtc.errors import FrtcError
from frtc.kernels.spec import Config, Kernel, Site
from frtc.kernels.tactic import Pick, Tactics, pick
from frtc.kernels.targets import Target

# Each module holds a tuple KERNELS.
MODULES = [
    "sm90_gemm",
    "sm90_rope_gemm",
    "sm90_finish_gemm",
    "sm90_moments_gemm",
    "sm90_few_gemm",
    "sm90_turned_gemm",
    "sm90_attention",
    "sm90_attention_split",
    "smxx_gemm",
    "smxx_rope_gemm",
    "smxx_finish_gemm",
    "smxx_tf32_gemm",
    "smxx_linear_f32",
    "smxx_norm",
    "smxx_rope",
    "smxx_embedding",
    "smxx_attention",
    "smxx_reduce",
    "smxx_pointwise",
    "sm110_gemm",
    "sm120_mxfp8_gemm",
]


ELSEWHERE = "is another GPU's"  # of a kernel's family


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel and config for a site, its estimated time, (kernel [config], reason) for each one not taken, and what
    measured tactics said."""

    kernel: Kernel
    config: Config
    cost_us: float
    rejected: tuple[tuple[str, str], ...] = ()
    pick: Pick = field(default_factory=Pick)

    def __str__(self) -> str:
        tactic = self.pick.tactic
        measured = f", {tactic.us:.1f} us measured ({self.pick.origin})" if tactic else ""
        lines = [f"{label(self.kernel, self.config)}: {self.cost_us:.1f} us estimated{measured}"]
        return "\n".join([*lines, *(f"  not {name}: {reason}" for name, reason in self.rejected)])


class NoKernel(FrtcError):
    """No kernel of the catalog serves a site on a target."""

    def __init__(self, site: Site, target: Target, reasons: Sequence[tuple[str, str]]) -> None:
        what = f"no kernel runs {describe(site)} on {target.name}"
        super().__init__("kernel.none", what, reasons or [("kernels", f"none implements {site.op}")])


@dataclass(frozen=True, slots=True)
class Catalog:
    """An ordered set of kernels, and measured tactics that decide before the target's table and the cost model do."""

    kernels: tuple[Kernel, ...]
    tactics: tuple[Tactics, ...] = ()

    def kernels_for(self, op: str) -> tuple[Kernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.op == op)

    def implements(self, site: Site, target: Target, families: Sequence[str] = ("baseline",)) -> bool:
        """Whether some kernel serves the site: what a fusing pass asks before it fuses."""
        return any(True for _ in self.candidates(site, target, families))

    def candidates(self, site: Site, target: Target, families: Sequence[str] = ("baseline",)) -> Iterator[Choice]:
        """Every kernel and config that can run the site, in the order of the catalog."""
        for kernel in self.kernels_for(site.op):
            if kernel.family in families and not kernel.refuse(site, target):
                for config in kernel.configs(site, target):
                    if not _too_large(kernel, site, config, target):
                        yield Choice(kernel, config, kernel.cost(site, config, target))

    def select(self, site: Site, target: Target, families: Sequence[str] = ("baseline",)) -> Choice:
        """The candidate that was measured as fastest, else the one of least estimated time; the first of equals."""
        found = list(self.candidates(site, target, families))
        reasons = list(self._refusals(site, target, families))
        if not found:
            raise NoKernel(site, target, reasons)
        said = pick(self.tactics, site, target.name, [(c.kernel.name, c.config) for c in found], reasons)
        best = min(found, key=lambda choice: choice.cost_us) if said.index is None else found[said.index]
        slower = [(label(c.kernel, c.config), f"{c.cost_us:.1f} us estimated") for c in found if c is not best]
        return Choice(best.kernel, best.config, best.cost_us, (*reasons, *slower, *said.ignored), said)

    def _refusals(self, site: Site, target: Target, families: Sequence[str]) -> Iterator[tuple[str, str]]:
        own = target.families("native")
        for kernel in self.kernels_for(site.op):
            if kernel.family not in families:
                why = "was not asked for" if kernel.family in own else ELSEWHERE
                yield kernel.name, f"its family {kernel.family} {why}"
                continue
            reason = kernel.refuse(site, target)
            if reason:
                yield kernel.name, reason
                continue
            for config in kernel.configs(site, target):
                if size := _too_large(kernel, site, config, target):
                    yield (
                        label(kernel, config),
                        f"{size} bytes of shared memory, {target.name} has {target.smem_per_block}",
                    )


def label(kernel: Kernel, config: Config) -> str:
    """ "smxx_norm LANES=128 ROWS=1"."""
    return " ".join([kernel.name, *(f"{name}={value}" for name, value in config.items())])


def describe(site: Site) -> str:
    """ "rms_norm(bf16[50,1024], f32[1024]) -> bf16[50,1024]"."""
    operands, results = (
        ", ".join("-" if o is None else f"{o.dtype}[{','.join(map(str, o.shape))}]" for o in group)
        for group in (site.operands, site.results)
    )
    return f"{site.op}({operands}) -> {results}"


def _too_large(kernel: Kernel, site: Site, config: Config, target: Target) -> int:
    """Bytes of dynamic shared memory of the largest stage where they exceed the target's, else 0."""
    size = max(stage.smem for stage in kernel.stages(site, config, target))
    return size if size > target.smem_per_block else 0


def _load() -> Catalog:
    modules = plugins.table("kernels", "frtc.kernels", MODULES).values()
    return Catalog(tuple(kernel for module in modules for kernel in module.KERNELS))


CATALOG = _load()
