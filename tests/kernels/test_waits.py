"""Kernels that may begin early wait before they touch memory: seen in the PTX of one of each kind, and in the machine
code of all that Pi0.5 runs on Hopper and Thor."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from frtc.codegen.nvrtc import Job, compile_all, ptx_of
from frtc.kernels.cubin import GRID_WAIT, operations_of
from frtc.kernels.spec import Stage
from frtc.kernels.targets import Target, load_targets
from tests.kernels.test_cubins import WHOLE, chosen_stages

TARGETS = load_targets()
WAIT = "griddepcontrol.wait;"
# What reads or writes memory that others see, and what could jump over the wait or hide an access.
TOUCHES = re.compile(
    r"^\s*(@!?%p\d+\s+)?(ldu?|st|atom|red|multimem|cp|prefetch\w*|discard|call|bra|brx|ret|exit)\b.*", re.M
)
HARMLESS = re.compile(r"\s*(ld\.param|(ld|st)\.local|(ld|st)\.shared)\b")
# Operations of machine code, immediate and register forms, found as those that PTX's global accesses become: loads and
# stores (global, generic), copies to shared memory, atomics and reductions.
MACHINE = {0x380, 0x980, 0x381, 0x981, 0x385, 0x985, 0x386, 0x986, 0xFAE, 0x3A8, 0x9A8, 0x3A9, 0x9A9, 0x38E, 0x98E}


def kind(stage: Stage) -> str:
    """Which device function: what the entry is called without its arguments."""
    return f"{stage.source} {stage.entry.partition('<')[0]}"


def representatives(target: Target) -> dict[str, Job]:
    """The first stage of each kind; more of those whose flags put other memory into play."""
    found: dict[str, Job] = {}
    for job, stage in chosen_stages(target).items():
        flags = ", true, false," in stage.entry, "Finished" in stage.entry, "Absent" in stage.entry
        found.setdefault(f"{kind(stage)} {flags}", job)
    return found


def touched_before_wait(ptx: str) -> list[str]:
    """Accesses, calls and jumps in the entry before its only wait."""
    (body,) = re.findall(r"\.entry.*", ptx, re.S)
    assert body.count(WAIT) == 1, f"{body.count(WAIT)} waits"
    before = body[body.index("{\n") : body.index(WAIT)]
    return [line.group().strip() for line in TOUCHES.finditer(before) if not HARMLESS.match(line.group())]


HOPPER = representatives(TARGETS["hopper"])


@pytest.mark.parametrize("name", HOPPER)
def test_ptx_waits_first(name: str) -> None:
    ptx = ptx_of(HOPPER[name])
    assert touched_before_wait(ptx) == []
    assert ptx.index("griddepcontrol.launch_dependents;") > ptx.index(WAIT)


@pytest.mark.parametrize("name", HOPPER)
def test_older_gpus_know_no_wait(name: str) -> None:
    assert "griddepcontrol" not in ptx_of(replace(HOPPER[name], target=TARGETS["rtx4090"]))


@pytest.mark.parametrize("name", WHOLE)
def test_machine_code_waits_first(name: str) -> None:
    """The assembler has moved nothing ahead of the wait."""
    stages = {job: stage for job, stage in chosen_stages(TARGETS[name]).items() if stage.source.startswith("smxx_")}
    assert stages and all(stage.waits for stage in stages.values())
    for job, cubin in zip(stages, compile_all(list(stages)), strict=True):
        operations = operations_of(cubin.image, cubin.symbol)
        assert operations.count(GRID_WAIT) == 1, job.entry
        assert not MACHINE & set(operations[: operations.index(GRID_WAIT)]), job.entry


CARELESS = """
#include "ptx.cuh"
namespace frtc {
template <int HOW>
__global__ void careless(const float* __restrict__ x, float* y, unsigned int* n) {
    const float early = HOW == 0 ? static_cast<const volatile float*>(x)[threadIdx.x] : 0.0f;
    if (HOW == 1) y[threadIdx.x] = 0.0f;
    if (HOW == 2) atomicAdd(n, 1);
    if (HOW == 3 && threadIdx.x > 3) return;
    __shared__ float tile[32];
    if (HOW == 4) cp_async_4(shared_address(tile), x);
    grid_wait();
    y[threadIdx.x] = early + x[threadIdx.x];
}
}
"""


@pytest.mark.parametrize("how", [0, 1, 2, 3, 4])
def test_what_comes_too_early_is_seen(how: int) -> None:
    """A load, a store, an atomic, a thread that leaves without waiting, a copy."""
    job = Job(CARELESS, f"frtc::careless<{how}>", TARGETS["hopper"])
    assert touched_before_wait(ptx_of(job))
    (cubin,) = compile_all([job])
    operations = operations_of(cubin.image, cubin.symbol)
    assert how == 3 or MACHINE & set(operations[: operations.index(GRID_WAIT)])
