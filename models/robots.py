"""What openpi's data configurations declare about robots: cameras, sizes, units. Data; no checkpoint file states it.

Order of work as openpi's: state steps, normalise, model, un-normalise, relative actions become absolute by the state as
it was normalised, action steps. Sources: openpi's policies and training configurations (June 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from frtc.runtime.policy import Linkage, Rescale, Scale, VectorSteps


@dataclass(frozen=True, slots=True)
class Robot:
    """
    cameras       (role in the observation, slot of the model) in model order; slots that are absent are masked
    state         numbers of the observed state, in robot units
    actions       numbers of an action
    relative      family -> the option --actions that openpi's configuration of this robot amounts to
    state_steps   from robot units to the units that the statistics are of; action_steps: back
    """

    name: str
    cameras: tuple[tuple[str, str], ...]
    state: int
    actions: int
    relative: Mapping[str, str]
    state_steps: VectorSteps = ()
    action_steps: VectorSteps = ()


# Two arms of six joints and a gripper. The robot says how far its gripper's slider is (0 closed, 1 open) and takes the
# angle of the crank; the model knows the gripper by encoder counts 2405 to 3110 of 4096 about 2048, in radians.
_SIGNS = Scale((1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0))
_GRIPPERS = (6, 13)
_OBSERVED = Linkage(_GRIPPERS, low=0.01844, high=0.05800, arm=0.036, crank=0.022, zero=0.5476, full=1.6296)
_COMMANDED = Rescale(_GRIPPERS, shift=0.5476, low=-0.6213, high=1.4910)
_BY_ARM = "delta:6,-1,6,-1"

ROBOTS = {
    robot.name: robot
    for robot in (
        Robot(
            name="aloha",
            cameras=(
                ("cam_high", "base_0_rgb"),
                ("cam_left_wrist", "left_wrist_0_rgb"),
                ("cam_right_wrist", "right_wrist_0_rgb"),
            ),
            state=14,
            actions=14,
            relative={"pi0": _BY_ARM, "pi05": _BY_ARM},
            state_steps=(_SIGNS, _OBSERVED),
            action_steps=(_SIGNS, _COMMANDED),
        ),
        Robot(
            name="aloha-sim",
            cameras=(("cam_high", "base_0_rgb"),),
            state=14,
            actions=14,
            relative={"pi0": "absolute", "pi05": "absolute"},
            state_steps=(_SIGNS, _OBSERVED),
            action_steps=(_SIGNS, _COMMANDED),
        ),
        Robot(  # actions are joint velocities
            name="droid",
            cameras=(("exterior_image_1_left", "base_0_rgb"), ("wrist_image_left", "left_wrist_0_rgb")),
            state=8,
            actions=8,
            relative={"pi0": "absolute", "pi05": "absolute"},
        ),
        Robot(  # Pi0's configurations make actions relative on top of the data's own deltas
            name="libero",
            cameras=(("image", "base_0_rgb"), ("wrist_image", "left_wrist_0_rgb")),
            state=8,
            actions=7,
            relative={"pi0": "delta:6,-1", "pi05": "absolute"},
        ),
    )
}
