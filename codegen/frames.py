"""The kernel that resizes camera frames: a tensor of the Plan beside those that its calls launch."""

from __future__ import annotations

from frtc.codegen.nvrtc import Job, compile_one
from frtc.kernels.smxx_frames import CUBIN, stage
from frtc.kernels.targets import Target
from frtc.runtime.policy import Images, Policy


def frames_cubin(policy: Policy, target: Target) -> dict[str, bytes]:
    """By its name in the Plan; nothing for a policy without cameras."""
    images = policy.find(Images)
    if images is None:
        return {}
    return {CUBIN: compile_one(Job.of(stage(len(images.cameras), images.size), target)).image}
