"""Session set-up of the kernel tests: one device, what coming cases need made ahead of them, the table at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

DEVICE = pytest.StashKey[str]()
AHEAD = pytest.StashKey[tuple[Any, dict[str, int]]]()  # what makes things ahead, and where each test's cases begin
BEGUN = time.perf_counter()
FEWEST_CORES = 4


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The device. Tests skip where there is none."""
    from tests.kernels.device import Gpu
    from tests.kernels.harness import TARGET

    _begin(request.session)  # forks: before there is a context
    try:
        device = Gpu()
    except Exception as fault:  # no libcuda, no device: whatever the driver or the bindings say
        _end(request.session)
        pytest.skip(f"no CUDA device: {fault}")
    if device.sm != TARGET.sm:
        _end(request.session)
        pytest.skip(f"{device.name} is sm_{device.sm}, target {TARGET.name} is sm_{TARGET.sm}")
    request.config.stash[DEVICE] = str(device)
    yield device
    _end(request.session)


def _begin(session: pytest.Session) -> None:
    """Cases of the tests that are still to come, in order."""
    from tests.kernels.harness import Case
    from tests.kernels.session import SOURCES, SPENT

    SPENT["before the first"] += time.perf_counter() - BEGUN
    if (os.cpu_count() or 1) < FEWEST_CORES:
        return
    from tests.kernels.ahead import Ahead

    cases, places = list[Case](), dict[str, int]()
    for item in session.items:
        if item.get_closest_marker("gpu") and hasattr(item, "callspec"):
            places[item.nodeid] = len(cases)
            cases += [value for value in item.callspec.params.values() if isinstance(value, Case)]
    ahead = Ahead(cases)
    SOURCES.append(ahead)
    session.config.stash[AHEAD] = (ahead, places)


def _end(session: pytest.Session) -> None:
    from tests.kernels.session import SOURCES

    if AHEAD in session.config.stash:
        ahead, _ = session.config.stash[AHEAD]
        SOURCES.remove(ahead)
        ahead.close()
        del session.config.stash[AHEAD]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if AHEAD in item.config.stash:
        ahead, places = item.config.stash[AHEAD]
        if item.nodeid in places:
            ahead.reach(places[item.nodeid])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from tests.kernels.harness import ROWS, write_rows
    from tests.kernels.session import SPENT

    if not ROWS:
        return
    write = terminalreporter.write_line
    write(f"kernels on {config.stash[DEVICE]}: time per op in a graph, over rotating buffers")
    write(f"{'kernel':<20} {'us':>8} {'GB/s':>8} {'TFLOP/s':>8} {'roof':>5} {'error':>8} {'regs':>4}  shapes | config")
    for r in ROWS:
        figures = f"{r.us:8.2f} {r.gbs:8.0f} {r.tflops:8.1f} {r.share:5.0%} {r.error:8.1e} {r.registers:4d}"
        write(f"{r.kernel:<20} {figures}  {r.shapes} | {r.config}")
    write(f"written to {write_rows('kernels.json', list(map(asdict, ROWS)), config, config.stash[DEVICE])}")
    write("seconds: " + ", ".join(f"{part} {seconds:.1f}" for part, seconds in SPENT.items()))
