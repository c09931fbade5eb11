"""Observations to run a Plan on: from files, or made from a seed, the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from frtc.errors import EnvironmentFault, FrtcError, UsageError, nearest
from frtc.robot_units import to_robot_units
from frtc.runtime.paths import require_file
from frtc.runtime.policy import Camera, Images, Norm
from frtc.runtime.policy_steps import PolicySteps

Array = np.ndarray[Any, Any]
FRAME = (480, 640)  # height, width of made frames
BLOCK = 40  # pixels of one colour: what a resize keeps
PROMPT = "pick up the red block"


def seeded(steps: PolicySteps, seed: int = 0) -> dict[str, Any]:
    """Frames of coloured blocks, a state inside its statistics, a fixed prompt."""
    made: dict[str, Any] = {c.role: as_declared(_frame(seed, c.role), c) for c in cameras(steps)}
    if steps.state:
        state = _state(seed, steps.state.dim, steps.state.norm)
        made["state"] = to_robot_units(steps.state_steps, state).astype(np.float32) if steps.state_steps else state
    if steps.prompt:
        made["prompt"] = PROMPT
    return made


def from_files(
    steps: PolicySteps, images: Mapping[str, Path], state: Path | None, prompt: str | None, seed: int = 0
) -> dict[str, Any]:
    """What the files hold; what is not given is made from the seed.

    images   role -> picture (any format that Pillow reads, taken as RGB) or .npy, which must be as the Plan declares
    """
    made, known = seeded(steps, seed), {c.role: c for c in cameras(steps)}
    for role, path in images.items():
        if role not in known:
            rows = [("known", ", ".join(known))] + ([("nearest", near)] if (near := nearest(role, known)) else [])
            raise UsageError("option.image", f"the Plan has no camera {role}", rows)
        made[role] = _npy(path) if path.suffix == ".npy" else as_declared(_picture(path), known[role])
    if state is not None:
        made["state"] = _npy(state)
    if prompt is not None:
        made["prompt"] = prompt
    return made


def cameras(steps: PolicySteps) -> tuple[Camera, ...]:
    images = steps.policy.find(Images)
    return images.cameras if images else ()


def as_declared(frame: Array, camera: Camera) -> Array:
    """An RGB frame u8 [H, W, 3] in the layout and pixel type that the Plan declares for this camera."""
    if camera.pixel.startswith("bgr"):
        frame = frame[..., ::-1]
    if camera.pixel.endswith("01"):
        frame = frame.astype(np.float32) / np.float32(255)
    return np.ascontiguousarray(frame.transpose(2, 0, 1) if camera.layout == "chw" else frame)


def _bits(seed: int, name: str, count: int) -> Array:
    """u8 [count] of a random stream of its own; raw Philox words are the same in every NumPy."""
    key = hashlib.sha256(f"frtc observation {seed} {name}".encode()).digest()[:16]
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(-(-count // 8))
    return np.asarray(words, "<u8").view(np.uint8)[:count]


def _frame(seed: int, role: str) -> Array:
    height, width = FRAME[0] // BLOCK, FRAME[1] // BLOCK
    blocks = _bits(seed, role, height * width * 3).reshape(height, width, 3)
    return blocks.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)


def _state(seed: int, dim: int, norm: Norm) -> Array:
    """f32 [dim], between the quantiles or within one deviation."""
    share = _bits(seed, "state", dim).astype(np.float64) / 255
    if norm.rule == "identity":
        return (2 * share - 1).astype(np.float32)
    first, second = np.array(norm.mean_or_low), np.array(norm.std_or_high)
    low, high = (first - second, first + second) if norm.rule.endswith("mean_std") else (first, second)
    state: Array = (low + share * (high - low)).astype(np.float32)
    return state


def _npy(path: Path) -> Array:
    hint = "a .npy file of numbers, as np.save writes it"
    try:
        require_file(path)
        found = np.load(path, allow_pickle=False)
    except Exception as fault:  # NumPy fails on a damaged file in any way
        raise FrtcError("input.file", f"{path} cannot be read: {reason(fault)}", hint=hint) from None
    if not isinstance(found, np.ndarray):
        found.close()
        raise FrtcError("input.file", f"{path} holds several arrays, not one", hint=hint)
    return found


def reason(fault: Exception) -> str:
    """Why NumPy did not read a file; its advice to allow pickles, which can run code, is not passed on."""
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    said = str(fault) or type(fault).__name__
    return "it is no file of arrays, or holds Python objects" if "pickle" in said else said


def _picture(path: Path) -> Array:
    """u8 [H, W, 3], RGB."""
    try:
        from PIL import Image
    except ImportError:
        hint = "pip install pillow, or pass .npy files"
        raise EnvironmentFault(
            "env.package", f"reading {path.name} needs Pillow, which is not installed", hint=hint
        ) from None
    try:
        require_file(path)
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except OSError as fault:
        raise FrtcError("input.file", f"{path} cannot be read: {reason(fault)}") from None
