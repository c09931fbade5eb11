"""The fp32 linear: when it serves, what it picks, and that its cubins do not spill. More results: test_smxx_gemm.py."""

from __future__ import annotations

import pytest

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import smxx_linear_f32
from frtc.kernels.spec import Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels import harness
from tests.kernels.device import Gpu
from tests.kernels.sites_gemm import FULL, gated, inputs_of, linear, patch_embedding
from tests.kernels.tier import COMPILED

TARGETS = load_targets()
HOPPER = TARGETS["hopper"]


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (linear(5, 16, 64), "tensor cores can do it"),
        (linear(5, 16, 64, "f32"), ""),
        (linear(5, 16, 64, gap=3), ""),
        (linear(5, 16, 64, "f32", out="f64"), "the epilogue has no f64"),
    ],
)
def test_serves_what_tensor_cores_cannot(site: Site, reason: str) -> None:
    assert smxx_linear_f32.refuse(site, HOPPER) == reason


def rows_of(site: Site) -> int:
    """The config with the least estimate."""
    configs = smxx_linear_f32.configs(site, HOPPER)
    return int(min(configs, key=lambda config: smxx_linear_f32.cost(site, config, HOPPER))["ROWS"])


def test_few_outputs_of_long_rows_take_a_warp_each_and_many_take_tiles() -> None:
    assert rows_of(linear(50, 32, 1024, "f32")) == 0
    assert rows_of(patch_embedding(2)) >= 32


def test_every_output_has_a_block() -> None:
    for site in (linear(50, 33, 1024, "f32"), patch_embedding(3), gated(20, 31, 65, "f32")):
        (y,) = site.results
        batch, m = (y.shape[0], y.shape[1]) if len(y.shape) == 3 else (1, y.shape[0])
        n = y.shape[-1] * (2 if site.op == "gated_linear" else 1)
        for config in smxx_linear_f32.configs(site, HOPPER):
            (stage,) = smxx_linear_f32.stages(site, config, HOPPER)
            rows, columns = (config["ROWS"], 128) if config["ROWS"] else (1, 8 if ", 4, frtc" in stage.entry else 32)
            assert stage.grid[0] * rows >= m and stage.grid[1] * columns >= n and stage.grid[2] == batch


def test_warps_share_long_rows_where_sms_are_idle() -> None:
    """(50, 1024) to 32 columns are 50 blocks of four warps for 132 SMs, and 200 with a row for all four."""
    for site, grid in (
        (linear(50, 32, 1024, "f32"), (50, 4, 1)),
        (linear(50, 32, 511, "f32"), (50, 1, 1)),
        (linear(50, 96, 1024, "f32"), (50, 3, 1)),
    ):
        (stage,) = smxx_linear_f32.stages(site, {"ROWS": 0}, HOPPER)
        assert stage.grid == grid


@pytest.mark.parametrize("target", COMPILED)
def test_cubins_do_not_spill(target: Target) -> None:
    jobs = [
        Job.of(stage, target)
        for site in (
            linear(200, 200, 64, "f32", **FULL),
            linear(200, 200, 64, "f32"),
            linear(13, 8, 1024, "f32", **FULL),
            patch_embedding(2),
        )
        for config in smxx_linear_f32.configs(site, target)
        for stage in smxx_linear_f32.stages(site, config, target)
    ]
    assert not [job.entry for job, cubin in zip(jobs, compile_all(jobs), strict=True) if cubin.resources.local]


SHARED = [
    harness.Case(site, smxx_linear_f32.KERNELS[0], {"ROWS": 0}, inputs=inputs_of)
    for site in (linear(50, 32, 1024, "f32"), linear(3, 33, 1021, "f32", **FULL), linear(9, 95, 600, gap=3))
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_rows_of_four_warps(gpu: Gpu, case: harness.Case) -> None:
    harness.check(gpu, case)
    harness.check_fails(gpu, harness.sabotaged(case, "FRTC_SABOTAGE=last_k_tile"))
