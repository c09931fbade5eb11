"""Activations made of one tanh.approx: whose results may be, and that the kernels of no other have it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from frtc.codegen.nvrtc import Job, ptx_of
from frtc.kernels.catalog import CATALOG
from frtc.kernels.reference.pointwise import ACTIVATIONS
from frtc.kernels.spec import Site
from frtc.kernels.targets import load_targets
from tests.kernels import harness
from tests.kernels.sites_gemm import gated, inputs_of, linear, scaled

Array = np.ndarray[Any, Any]
HOPPER = load_targets()["hopper"]
LARGEST = 2.0**-11  # relative error of tanh.approx.f32, by PTX ISA
FC1 = linear(130, 1100, 1152, bias="bf16", act="gelu_tanh")


def rough(act: str, error: float) -> Callable[[Array], Array]:
    """The activation with a tanh that is off by `error` of itself, and at most 1."""

    def apply(x: Array) -> Array:
        wide = x.astype(np.float64)
        inner = wide / 2 if act == "silu" else math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
        return np.asarray(wide * np.clip(0.5 + 0.5 * np.tanh(inner) * (1 + error), 0, 1), x.dtype)

    return apply


def faults(site: Site, error: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    choice = CATALOG.select(site, HOPPER, ("baseline",))
    case = harness.Case(site, choice.kernel, choice.config, inputs=inputs_of)
    operands = inputs_of(site, np.random.default_rng(0))
    want = harness.referenced(case, operands)
    act = str(site.attrs["act"])
    monkeypatch.setitem(ACTIVATIONS, act, rough(act, error))
    return harness.faults(case, harness.referenced(case, operands), want)[0]


@pytest.mark.parametrize("error", [LARGEST, -LARGEST])
@pytest.mark.parametrize("site", [FC1, gated(50, 300, 520), gated(50, 300, 520, "f16", "silu")], ids=str)
def test_16_bits_do_not_show_the_largest_error(site: Site, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not faults(site, error, monkeypatch)
    assert faults(site, -64 * abs(error), monkeypatch)


@pytest.mark.parametrize("error", [LARGEST, -LARGEST])
def test_f32_shows_it(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(linear(33, 77, 131, "f32", bias="f32", act="silu"), error, monkeypatch)


@pytest.mark.parametrize("error", [1.2e-5, -1.2e-5, 0.0])
def test_e4m3_shows_no_error_that_was_measured(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not faults(scaled(FC1, out="e4m3"), error, monkeypatch)
    assert faults(scaled(FC1, out="e4m3"), error + 32 * LARGEST, monkeypatch)


@pytest.mark.parametrize(("out", "act", "tanh"), [("bf16", "gelu_tanh", True), ("f16", "silu", True),
                                                  ("e4m3", "gelu_tanh", True), ("f32", "gelu_tanh", False),
                                                  ("bf16", "gelu_erf", False)])  # fmt: skip
def test_narrow_results_alone_are_made_of_it(out: str, act: str, tanh: bool) -> None:
    site = scaled(linear(130, 264, 1152, act=act), out=out)
    choice = CATALOG.select(site, HOPPER, HOPPER.families())
    (stage,) = choice.kernel.stages(site, choice.config, HOPPER)
    assert ("tanh.approx.f32" in ptx_of(Job.of(stage, HOPPER))) == tanh
