"""Whether blocks that wait for each other are on the GPU at once; where they are not they would wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frtc.errors import EnvironmentFault
from frtc.runtime.driver import Driver
from frtc.runtime.plan import Call, Launch
from frtc.runtime.plan_file import Plan


def require_room(driver: Driver, plan: Plan, functions: Sequence[Any]) -> None:
    """Refuse launches that `meets` says wait for all of their blocks, and clusters, that the device does not hold.

    The driver is asked once for each different launch, a microsecond or so each.
    """
    program = plan.program
    clusters = [driver.cluster_of(function) for function in functions]
    asked: set[tuple[Any, ...]] = set()
    for stage in program.stages:
        for call in stage.calls:
            for launch in call.launches:
                cluster = clusters[launch.kernel]
                key = (launch.kernel, launch.grid, launch.block, launch.smem, launch.meets)
                if key in asked or not (launch.meets or cluster):
                    continue
                asked.add(key)
                needed = launch.grid[0] * launch.grid[1] * launch.grid[2] if launch.meets else cluster
                held = driver.held(functions[launch.kernel], launch, cluster)
                if held < needed:
                    about = [("kernel", program.kernels[launch.kernel].symbol), ("call", f"{stage.name}: {_of(call)}")]
                    about += [("needs", f"{needed} blocks at once"), ("holds", f"{held} on {driver.device.name}")]
                    raise _refusal(launch, about, plan)


def _refusal(launch: Launch, about: Sequence[tuple[str, str]], plan: Plan) -> EnvironmentFault:
    of = "launch" if launch.meets else "cluster"
    what = f"the GPU does not hold all blocks of a {of} at once, and they wait for each other"
    again = f"frtc compile CHECKPOINT --arch {plan.program.target.name} --family baseline -o {plan.path}"
    return EnvironmentFault("plan.room", what, about, f"free the GPU of MIG slices and limits of MPS, or {again}")


def _of(call: Call) -> str:
    return f"{call.op} {call.name}".strip()
