"""Session set-up of the kernel tests: one device, all cubins compiled in parallel first, the table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The device, once every case of the session is compiled. Tests skip where there is none."""
    from frtc.codegen.nvrtc import compile_all
    from tests.kernels.device import Gpu
    from tests.kernels.harness import TARGET, Case

    try:
        device = Gpu()
    except Exception as fault:  # no libcuda, no device: whatever the driver or the bindings say
        pytest.skip(f"no CUDA device: {fault}")
    if device.sm != TARGET.sm:
        pytest.skip(f"{device.name} is sm_{device.sm}, target {TARGET.name} is sm_{TARGET.sm}")
    parameters = [
        v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()
    ]
    compile_all([job for value in parameters if isinstance(value, Case) for job in value.jobs()])
    request.config.stash[DEVICE] = str(device)
    yield device


DEVICE = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from tests.kernels.harness import ROWS, write_rows

    if not ROWS:
        return
    write = terminalreporter.write_line
    write(f"kernels on {config.stash[DEVICE]}: time per op in a graph, over rotating buffers")
    write(f"{'kernel':<20} {'us':>8} {'GB/s':>8} {'TFLOP/s':>8} {'roof':>5} {'error':>8} {'regs':>4}  shapes | config")
    for r in ROWS:
        figures = f"{r.us:8.2f} {r.gbs:8.0f} {r.tflops:8.1f} {r.share:5.0%} {r.error:8.1e} {r.registers:4d}"
        write(f"{r.kernel:<20} {figures}  {r.shapes} | {r.config}")
    write(f"written to {write_rows('kernels.json', list(map(asdict, ROWS)), config, config.stash[DEVICE])}")
