"""What is made ahead is what would be made when asked; cases share the ring and never a byte of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from frtc.codegen import nvrtc
from frtc.kernels.spec import Site
from tests.kernels import ahead as module
from tests.kernels.ahead import Ahead, nbytes_of
from tests.kernels.harness import Array, Case, chosen, drawn, expected, operands_of, referenced
from tests.kernels.session import SOURCES
from tests.kernels.sites_gemm import FULL, inputs_of, linear, scaled
from tests.kernels.sites_pointwise import copy
from tests.kernels.sites_rows import embedding, inputs, rms_norm


def cannot(site: Site, generator: np.random.Generator) -> list[Array | None]:
    raise ValueError("no such inputs")


def dies(site: Site, generator: np.random.Generator) -> list[Array | None]:
    if generator.bit_generator.state and os.getpid() != PARENT:
        os._exit(1)
    return [np.zeros(site.operands[0].shape, np.float32)]  # type: ignore[union-attr]


PARENT = os.getpid()


def some() -> list[Case]:
    sites = [rms_norm(m, 64) for m in (5, 6, 7, 8)]
    return [
        *(chosen(site) for site in sites),
        chosen(scaled(linear(33, 40, 72, **FULL), "e4m3", "e4m3", x_scale=True), inputs=inputs_of),
        chosen(embedding(50, 13, 33), inputs=inputs),
        chosen(copy((8, 6), (0, 1), (16, 1))),
    ]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRTC_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def used() -> Iterator[list[Ahead]]:
    """Those that a test puts here are asked by the harness, and closed."""
    made: list[Ahead] = []
    yield made
    for ahead in made:
        ahead.close()


def same(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def agrees(ahead: Ahead, case: Case) -> None:
    operands = ahead.operands(case)
    assert operands is not None
    wanted, results = drawn(case), ahead.expected(case, operands)
    assert all(map(same, operands, wanted)) and len(operands) == len(wanted)
    assert results is not None and all(map(same, results, referenced(case, wanted)))
    assert ahead.expected(case, list(operands)) is None  # of other operands nothing is known


def test_values_are_those_of_the_harness(cache: Path, used: list[Ahead]) -> None:
    cases = some()
    used.append(Ahead(cases, 2, 1 << 20))
    for i, case in enumerate(cases):
        used[0].reach(i)
        agrees(used[0], case)


def test_the_harness_asks(cache: Path, used: list[Ahead], monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = cases = [chosen(rms_norm(5, 64))]
    used.append(Ahead(cases, 1, 1 << 20))
    monkeypatch.setattr("tests.kernels.harness.drawn", None)
    monkeypatch.setattr("tests.kernels.harness.referenced", None)
    SOURCES.append(used[0])
    try:
        operands = operands_of(case)
        assert operands is used[0].operands(case) and len(expected(case, operands)) == 1
        with pytest.raises(TypeError):
            operands_of(chosen(rms_norm(5, 64)))  # equal, but none of the session's
    finally:
        SOURCES.remove(used[0])


def test_cubins_are_in_the_cache(cache: Path, used: list[Ahead], monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = cases = [chosen(rms_norm(5, 64))]
    used.append(Ahead(cases, 1, 1 << 20))
    used[0].await_cubins(case.jobs())
    monkeypatch.setattr(nvrtc, "_compiled", None)
    assert nvrtc.compile_all(case.jobs())[0].image


def test_a_small_ring_is_used_again_and_again(cache: Path, used: list[Ahead]) -> None:
    cases = [chosen(rms_norm(m, 64)) for m in range(5, 25)]
    used.append(Ahead(cases, 2, 5 * max(map(nbytes_of, cases))))
    for i, case in enumerate(cases):
        used[0].reach(i)
        live = sorted((v.start, v.end) for v in used[0].values.values())
        assert live and all(a[1] <= b[0] for a, b in pairwise(live)), live
        agrees(used[0], case)
    assert len(used[0].values) < len(cases)


def test_what_does_not_fit_is_left_to_who_asks(cache: Path, used: list[Ahead]) -> None:
    cases = [chosen(rms_norm(m, 64)) for m in (5, 500, 6)]
    used.append(Ahead(cases, 1, 2 * nbytes_of(cases[1]) - 64))
    assert used[0].operands(cases[1]) is not None
    used.append(Ahead(cases, 1, nbytes_of(cases[1]) - 64))
    assert used[1].operands(cases[1]) is None
    agrees(used[1], cases[0])
    agrees(used[1], cases[2])


def test_a_fault_is_met_by_who_asks(cache: Path, used: list[Ahead]) -> None:
    cases = [chosen(rms_norm(5, 64), inputs=cannot), chosen(rms_norm(6, 64))]
    used.append(Ahead(cases, 1, 1 << 20))
    assert used[0].operands(cases[0]) is None
    agrees(used[0], cases[1])


def test_a_process_that_dies_costs_time_alone(cache: Path, used: list[Ahead]) -> None:
    cases = [chosen(copy((7,), (1,), dtype="f32"), inputs=dies), *some()]
    used.append(Ahead(cases, 1, 1 << 20))
    assert used[0].operands(cases[0]) is None
    used[0].await_cubins(cases[0].jobs())
    used[0].reach(3)
    assert used[0].operands(cases[4]) is None


def test_one_case_in_two_tests_has_two_turns(cache: Path, used: list[Ahead]) -> None:
    case, other = chosen(rms_norm(5, 64)), chosen(rms_norm(6, 64))
    used.append(Ahead([case, other, case], 1, 1 << 20))
    first = used[0].operands(case)
    used[0].reach(1)
    agrees(used[0], case)
    assert used[0].operands(case) is not first
    used[0].reach(3)
    assert used[0].operands(case) is None and not used[0].values


def test_not_more_than_a_window_is_begun(cache: Path, used: list[Ahead], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 2)
    used.append(Ahead(some(), 1, 1 << 20))
    assert used[0].begun == 2
    used[0].reach(3)
    assert used[0].begun == 5


def hangs(site: Site, generator: np.random.Generator) -> list[Array | None]:
    time.sleep(1)
    return [np.zeros(site.operands[0].shape, np.float32)]  # type: ignore[union-attr]


def test_a_process_that_hangs_is_not_waited_for(
    cache: Path, used: list[Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    (case,) = cases = [chosen(copy((7,), (1,), dtype="f32"), inputs=hangs)]
    used.append(Ahead(cases, 1, 1 << 20))
    begun = time.monotonic()
    assert used[0].operands(case) is None
    used[0].await_cubins(case.jobs())
    used.pop().close()
    assert time.monotonic() - begun < 0.9
