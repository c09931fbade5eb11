"""What `frtc verify` found becomes evidence of the Plan: `verified`, and when, against what, where, how far apart.

Evidence decides no action and is no part of the plan_id; `frtc update` drops it with the weights it was about.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import frtc
from frtc.codegen.plan_evidence import change_evidence
from frtc.compiler import Opened, source_of
from frtc.device import about
from frtc.policy import Policy
from frtc.scales_key import weight_files, weights_digest
from frtc.selftest import precision_of
from frtc.verified import Verified


def record(policy: Policy, opened: Opened, found: Verified) -> str:
    """Keep what passed; where it failed, drop what an earlier comparison with the same weights on this device said.

    Returns why the Plan was left as it is: "" where it was not.
    """
    against = {"checkpoint": opened.checkpoint.path.name, "headers": source_of(opened)["headers"]}
    against["weights"] = weights_digest(weight_files(opened))
    device = about(policy)["name"]

    def change(evidence: dict[str, Any]) -> dict[str, Any]:
        if found.failure() is None:
            return {**evidence, "verified": _verified(policy, found, against, device)}
        old = evidence.get("verified")
        if isinstance(old, Mapping) and old.get("device") == device and _weights(old) == against["weights"]:
            return {name: value for name, value in evidence.items() if name != "verified"}
        return evidence

    return change_evidence(policy.plan.path, policy.plan.plan_id, change)


def _verified(policy: Policy, found: Verified, against: Mapping[str, Any], device: str) -> dict[str, Any]:
    data = found.data()
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "frtc": frtc.__version__,
        "against": dict(against),
        "device": device,
        "precision": precision_of(policy.plan.program),
        "samples": data["samples"],
        "worst_velocity": data["worst_velocity"],
        "actions": data["whole"],
        "bar": data["bar"],
        "dimensions": data["dimensions"],
    }


def _weights(verified: Mapping[str, Any]) -> Any:
    against = verified.get("against")
    return against.get("weights") if isinstance(against, Mapping) else None
