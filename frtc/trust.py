"""What a Plan proves of itself: that it was verified against its checkpoint, and the vectors of a self-test.

Both live in the evidence, which nobody validates and which decides no action: here is only whether they are there.
"""

from __future__ import annotations

from typing import Any

from frtc.runtime.plan_file import Plan

SHOWN = 2  # findings against the observations of a calibration, of as many as cameras times samples


def trust_of(plan: Plan) -> dict[str, Any]:
    """verified    what `frtc verify` recorded, None where it did not
    self_test   the Plan holds vectors
    synthetic   why the observations of its calibration are not a robot's; empty where nothing speaks against them
    """
    verified, calibration = plan.evidence.get("verified"), plan.evidence.get("calibration")
    why = calibration.get("synthetic") if isinstance(calibration, dict) else None
    return {
        "verified": verified if isinstance(verified, dict) else None,
        "self_test": isinstance(plan.evidence.get("self_test"), dict),
        "synthetic": list(map(str, why)) if isinstance(why, list) else [],
    }


def lacks(plan: Plan) -> tuple[str, ...]:
    """Said at every opening: a line on what is not proven, and one on scales that no robot's observations gave."""
    found = trust_of(plan)
    missing = []
    if found["verified"] is None:
        missing.append("was not verified against its checkpoint (`frtc verify PLAN CHECKPOINT` does it)")
    if not found["self_test"]:
        missing.append("holds no self-test (`frtc compile` makes one, `frtc update --self-test` too)")
    said = [f"unproven: this Plan {' and '.join(missing)}"] if missing else []
    if why := found["synthetic"]:
        more = f"; and {len(why) - SHOWN} more findings" if len(why) > SHOWN else ""
        what = "its activation scales are of observations no robot made"
        said.append(f"synthetic: {what}: {'; '.join(why[:SHOWN])}{more}")
    return tuple(said)


def proof_rows(plan: Plan) -> list[tuple[str, str]]:
    """What `frtc verify` recorded, in one row; none where it did not, or nobody can read it."""
    found: Any = plan.evidence.get("verified")
    try:
        against = found["against"]["checkpoint"]
        said = f"worst velocity {found['worst_velocity']:.2e} of {found['samples']} observations"
        return [("verified", f"against {against} on {found['device']}, {found['when']}: {said}")]
    except (TypeError, KeyError, ValueError):
        return []
