"""The fp32 linear: when it serves, what it picks, and that its cubins do not spill. Results: test_smxx_gemm.py."""

from __future__ import annotations

import pytest

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import smxx_linear_f32
from frtc.kernels.spec import Site
from frtc.kernels.targets import Target, load_targets
from tests.kernels.sites_gemm import FULL, gated, linear, patch_embedding
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
            rows, columns = (config["ROWS"], 128) if config["ROWS"] else (1, 32)
            assert stage.grid[0] * rows >= m and stage.grid[1] * columns >= n and stage.grid[2] == batch


@pytest.mark.parametrize("target", COMPILED)
def test_cubins_do_not_spill(target: Target) -> None:
    jobs = [
        Job.of(stage, target)
        for site in (linear(200, 200, 64, "f32", **FULL), linear(200, 200, 64, "f32"), patch_embedding(2))
        for config in smxx_linear_f32.configs(site, target)
        for stage in smxx_linear_f32.stages(site, config, target)
    ]
    assert not [job.entry for job, cubin in zip(jobs, compile_all(jobs), strict=True) if cubin.resources.local]
