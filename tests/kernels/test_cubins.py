"""Every kernel that the catalog picks for Pi0.5's sites, compiled for every target: right SM, nothing spilled, fits.

The target that is run on hardware is compiled whole, of the others every seventh kernel; `-m full` compiles all of all.
"""

from __future__ import annotations

from functools import cache

import pytest

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels.catalog import CATALOG
from frtc.kernels.spec import Site, Stage
from frtc.kernels.targets import Target, load_targets
from tests.kernels import sites_attention, sites_gemm, sites_pointwise, sites_rope_gemm, sites_rows

TARGETS = load_targets()
WHOLE = ("hopper",)
SITES: list[Site] = [
    *(case.site for case in sites_gemm.real_sites()),
    *(case.site for case in sites_attention.real_sites()),
    *sites_rows.real_sites(),
    *sites_rope_gemm.real_sites(),
    *sites_pointwise.real_sites(),
]
REGISTERS = 65536  # of an SM (CUDA programming guide, technical specifications per compute capability)


@cache
def chosen_stages(target: Target) -> dict[Job, Stage]:
    """The stages that the target would run, each distinct kernel once, in a fixed order."""
    found: dict[Job, Stage] = {}
    for site in SITES:
        choice = CATALOG.select(site, target)
        for stage in choice.kernel.stages(site, choice.config, target):
            found.setdefault(Job.of(stage, target), stage)
    return dict(sorted(found.items(), key=lambda item: (item[0].entry, item[0].source)))


def examine(target: Target, jobs: list[Job]) -> None:
    assert jobs
    stages = chosen_stages(target)
    for job, cubin in zip(jobs, compile_all(jobs), strict=True):
        used, stage = cubin.resources, stages[job]
        assert cubin.sm == target.sm, f"{job.entry} is for sm_{cubin.sm}"
        assert used.local == 0, f"{job.entry} keeps {used.local} bytes a thread in local memory"
        assert used.smem + stage.smem <= target.smem_per_block, f"{job.entry} takes {used.smem} + {stage.smem} bytes"
        assert used.registers * stage.block <= REGISTERS, f"{job.entry} takes {used.registers} registers a thread"


@pytest.mark.parametrize("name", TARGETS)
def test_chosen_kernels(name: str) -> None:
    jobs = list(chosen_stages(TARGETS[name]))
    examine(TARGETS[name], jobs if name in WHOLE else jobs[::7])


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in TARGETS if name not in WHOLE])
def test_all_chosen_kernels(name: str) -> None:
    examine(TARGETS[name], list(chosen_stages(TARGETS[name])))
