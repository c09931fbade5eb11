"""GPU targets: facts only. No choices, no code paths; nobody asks a target for its name to decide something."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from frtc import plugins

KiB, MiB, GB = 1024, 1024 * 1024, 10**9


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU.

    sm            compute capability as an integer (90); nvcc: the architecture that NVRTC compiles for ("sm_90a")
    sms           streaming multiprocessors
    smem_per_block, smem_per_sm, l2   bytes
    dram          bytes per second, nominal
    tflops        dense tensor-core rate by operand type, in 10^12 operations per second, fp32 accumulation
    has           features a kernel may need: "cp.async", "tma", "pdl" (programmatic dependent launch), "wgmma",
                  "tcgen05", "block_scaled_mma", "fp8" (storage and conversion), "fp8_mma" (mma.sync e4m3 is native)
    min_driver    oldest driver branch that loads our cubins
    nvrtc_major   the NVRTC line that must produce the cubins
    family        kernels that are used where nobody asks for others: "baseline", or "native", the target's own, too
    overlaps      stages beside each other were measured to pay: long ones leave multiprocessors to short ones
    evidence      "run on hardware" or "compiles, not run": what we may claim
    source        where the figures come from
    """

    name: str
    title: str
    sm: int
    nvcc: str
    sms: int
    smem_per_block: int
    smem_per_sm: int
    l2: int
    dram: float
    tflops: dict[str, float] = field(hash=False)
    has: frozenset[str]
    min_driver: int
    nvrtc_major: int
    unified_memory: bool
    evidence: str
    source: str
    family: str = "baseline"
    overlaps: bool = False

    def multiplies_fp8(self, families: Iterable[str]) -> bool:
        """Whether kernels of these families multiply FP8 at a rate of its own."""
        return "fp8_mma" in self.has or ("wgmma" in self.has and self.nvcc in families)

    def families(self, asked: str | None = None) -> tuple[str, ...]:
        """The kernel families that "baseline", "native" or nothing in particular allows."""
        return ("baseline",) if (asked or self.family) == "baseline" else ("baseline", self.nvcc)


MODULES = ["thor", "rtx5090", "rtx4090", "orin", "a100", "hopper"]


def load_targets() -> dict[str, Target]:
    """All targets by name: ours in the order of MODULES, then those of plug-ins."""
    modules = plugins.table("targets", "frtc.kernels.targets", MODULES).values()
    return {module.TARGET.name: module.TARGET for module in modules}
