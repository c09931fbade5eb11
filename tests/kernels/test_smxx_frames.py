"""The kernel of camera frames: cubins of all targets, numbers that two files share, its arithmetic on the CPU at sizes
of real cameras. On a GPU: tests/runtime/test_frames_gpu.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from frtc.codegen.nvrtc import Job, compile_all
from frtc.kernels import smxx_frames
from frtc.kernels.cubin import parameters_of
from frtc.kernels.targets import load_targets
from frtc.policy import Policy
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan_file import open_plan
from frtc.runtime.policy import Camera
from tests.kernels import frames_cpu
from tests.runtime.frames_plan import images, write
from tests.runtime.test_frames import RULES, as_form, opened
from tests.runtime.test_policy_images import picture

TARGETS = load_targets()
REGISTERS = 65536  # of an SM
# tests/runtime/test_frames.py has small ones of all forms
CAMERAS = [
    (480, 640),
    (1080, 1920),
    (1920, 1080),
    (224, 224),
    (448, 448),
    (720, 1280),
    (37, 224),
    (225, 223),
    (96, 128),
]


@pytest.mark.parametrize("name", TARGETS)
def test_cubins(name: str) -> None:
    target = TARGETS[name]
    (cubin,) = compile_all([Job.of(smxx_frames.stage(2, 224), target)])
    used = cubin.resources
    assert cubin.sm == target.sm and used.local == 0
    assert used.smem <= target.smem_per_block and used.registers * smxx_frames.THREADS <= REGISTERS
    assert parameters_of(cubin.image, cubin.symbol) == smxx_frames.PARAMETERS
    other = compile_all([Job.of(smxx_frames.stage(3, 512), target)])[0]
    assert other.image == cubin.image, "one cubin for all policies of a target"


def test_both_files_have_the_same_numbers() -> None:
    sizes = frames_cpu.library().frames_sizes
    known = (smxx_frames.CAMERA.itemsize, smxx_frames.TAP.itemsize, smxx_frames.ELEMENTS, smxx_frames.GROUPS)
    assert tuple(sizes(i) for i in range(5)) == (*known, smxx_frames.ROWS)
    assert [sizes(i) for i in (5, 6)] == [smxx_frames.RULES["pil_bilinear"], smxx_frames.RULES["torch_bilinear"]]


@pytest.mark.parametrize("size", CAMERAS, ids=str)
def test_cameras(size: tuple[int, int], tmp_path: Path) -> None:
    """Every rule at the size of a model's square; bytes, and floats as planes in BGR."""
    for resize, border in RULES.items():
        for layout, pixel in (("hwc", "rgb8"), ("chw", "bgr01")):
            camera = Camera("base", "x", layout, pixel)  # type: ignore[arg-type]
            path = write(tmp_path / f"{resize}-{pixel}.plan", images([camera], 224, resize, border))
            seen, plan = {"base": as_form(picture(*size), layout, pixel)}, open_plan(path)
            policy, _ = opened(path)
            with policy, Policy(plan, Emulator(plan)) as host:
                found, wanted = policy.infer(seen).output, host.infer(seen).output
            assert found.tobytes() == wanted.tobytes(), (resize, pixel)


@pytest.mark.parametrize("size", [1, 2, 31, 33, 96, 97, 384])
def test_squares(size: int, tmp_path: Path) -> None:
    """Of any side: whole blocks and parts of them. What lies behind `images` stays as it was."""
    camera = Camera("base", "x")
    path = write(tmp_path / "s.plan", images([camera, Camera("wrist", "y")], size, border=9))
    policy, api = opened(path)
    plan = open_plan(path)
    with policy, Policy(plan, Emulator(plan)) as host:
        nbytes, session = 2 * size * size * 3, policy.executor
        behind = api.device(session.slots + nbytes, session.mirror.behind - nbytes)  # type: ignore[attr-defined]
        behind[:] = b"\x55" * len(behind)
        for shape in ((size, size), (size * 3 // 2 + 1, size * 2), (max(size - 1, 1), size)):
            seen = {"base": picture(*shape), "wrist": picture(*shape[::-1])}
            assert np.array_equal(policy.infer(seen).output, host.infer(seen).output)
        assert bytes(behind) == b"\x55" * len(behind)
