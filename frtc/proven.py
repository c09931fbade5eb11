"""Which Plans have passed their self-test on which GPU: one small file for each pair, in the cache folder.

Kernels of one architecture that nobody has run must not be the first that move a robot (docs/design.md, section 5):
a Plan that holds such kernels acts on a GPU only after `frtc verify PLAN --self-test` has passed on that device.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from frtc.errors import EnvironmentFault
from frtc.runtime.driver import Driver
from frtc.runtime.own_file import partial
from frtc.runtime.plan import BuiltFor
from frtc.runtime.plan_file import Plan

RUN = "run on hardware"  # evidence of a target
BASELINE = "baseline"  # the family for all targets, which has run; kernels of one architecture are another


def unproven(target: BuiltFor) -> str:
    """Why these kernels need a self-test before they act; "" if they do not."""
    if target.family == BASELINE or target.evidence == RUN:
        return ""
    return f"kernels of the family {target.family} have not run on {target.name}"


def require_proof(plan: Plan, driver: Driver) -> None:
    """The Plan's kernels have run on hardware, or its self-test has passed on this GPU."""
    why = unproven(plan.program.target)
    note = _note(plan.plan_id, driver) if why else None
    if not why or (note is not None and note.is_file()):
        return
    rows = [("because", why), ("on", driver.device.name), ("looked for", str(note or "a home folder"))]
    hint = f"`frtc verify {plan.path} --self-test`, once on this machine; --untested acts without it"
    if "self_test" not in plan.evidence:
        rows.append(("vectors", "none: it was compiled with --no-self-test, or updated"))
        hint = "`frtc compile` makes a Plan with vectors for `frtc verify --self-test`; --untested acts without"
    raise EnvironmentFault("plan.untested", "this Plan has not passed its self-test on this GPU", rows, hint)


def remember(plan: Plan, driver: Driver, outcome: dict[str, Any]) -> Path | None:
    """Note that the self-test passed; None where no file can be written."""
    note = _note(plan.plan_id, driver)
    if note is None:
        return None
    temporary = partial(note)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"plan_id": plan.plan_id, "device": driver.device.name, **outcome}))
        temporary.replace(note)
    except OSError:
        return None
    return note


def forget(plan: Plan, driver: Driver) -> None:
    """The self-test failed: what an earlier one said no longer holds."""
    note = _note(plan.plan_id, driver)
    with suppress(OSError):
        if note is not None:
            note.unlink(missing_ok=True)


def _note(plan_id: str, driver: Driver) -> Path | None:
    uuid = bytes(driver.call("cuDeviceGetUuid", driver.handle).bytes).hex()
    root = os.environ.get("FRTC_CACHE")
    try:
        cache = Path(root) if root else Path.home() / ".cache" / "frtc"
    except RuntimeError:  # no home
        return None
    return cache / "self-tests" / f"{plan_id}-{uuid}.json"
