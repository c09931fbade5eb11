"""Which cameras a policy sees, in the model's order, and what the observation calls them."""

from __future__ import annotations

from collections.abc import Sequence

from frtc.errors import UsageError, nearest
from frtc.lerobot_files import Pipeline, camera_keys
from frtc.models.robots import Robot
from frtc.policy_reader import Reader
from frtc.runtime.policy import Camera

Slots = Sequence[tuple[str, str]]  # (role, key)


def openpi_cameras(reader: Reader, robot: Robot | None) -> tuple[Camera, ...]:
    """A robot's, or all slots of the family; openpi masks absent ones."""
    if robot:
        return _chosen(reader, robot.cameras, f"robot {robot.name}", assumed=False)
    why = f"the slots that {reader.family.name} publishes; no file says which cameras the robot has"
    return _chosen(reader, reader.family.cameras, why, assumed=True)


def lerobot_cameras(reader: Reader, pre: Pipeline) -> tuple[Camera, ...]:
    """In the order of input_features; a role is the last part of the key that the robot uses."""
    renamed = pre.steps.get("rename_observations_processor", {}).get("rename_map") or {}
    robot = {new: old for old, new in renamed.items()} if isinstance(renamed, dict) else {}
    keys = camera_keys(reader.config)
    last = {key: str(robot.get(key, key)).rpartition(".")[2] for key in keys}
    slots = [(last[key] if list(last.values()).count(last[key]) == 1 else key, key) for key in keys]
    if not slots and not reader.options.camera:
        choices = ", ".join(key for _, key in reader.family.cameras)
        raise UsageError(
            "policy.cameras",
            "no file says which cameras the policy sees, nor their order",
            [("looked in", "config.json: input_features"), *([("published", choices)] if choices else [])],
            "pass --camera ROLE=KEY for each, in the order of training",
        )
    return _chosen(reader, slots, "config.json: input_features", assumed=False)


def _chosen(reader: Reader, slots: Slots, source: str, assumed: bool) -> tuple[Camera, ...]:
    """Those in `slots`, which are in model order, that the options keep."""
    options = reader.options
    given, views, keys = options.camera, options.views, [key for _, key in slots]
    if given and not slots:
        slots, keys = given, [key for _, key in given]  # no file gives the order: the option does
    chosen, source = list(slots), source if slots and not given else "option"
    if unknown := [key for _, key in given if key not in keys]:
        rows = [("given", ", ".join(f"{role}={key}" for role, key in given)), ("known", ", ".join(keys))]
        rows += [("nearest", near)] if (near := nearest(unknown[0], keys)) else []
        raise UsageError("policy.cameras", f"the checkpoint has no camera {', '.join(unknown)}", rows)
    roles = {key: role for role, key in given}
    if len(roles) != len(given) or len(set(roles.values())) != len(given):
        raise UsageError("policy.cameras", "--camera names a role or a key twice")
    if given:
        chosen = [(roles[key], key) for key in keys if key in roles]
    if views is not None and (views != len(given) if given else not 1 <= views <= len(slots)):
        have = f"{len(given)} cameras are given" if given else f"the checkpoint has {len(slots)}"
        raise UsageError("policy.cameras", f"--views {views}, but {have}", [("known", ", ".join(keys))])
    if views is not None and not given:
        chosen, source = chosen[:views], "option"
    roles_shown = [role for role, _ in chosen]
    if assumed and source != "option":
        reader.assume(
            "cameras", ", ".join(roles_shown), source, "--robot NAME, --views N, or --camera ROLE=KEY for each"
        )
    else:
        reader.fact("cameras", roles_shown, source)
    return tuple(Camera(role, key, options.layout, options.pixel) for role, key in chosen)
