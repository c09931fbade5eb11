"""Are observations a robot's? Calibration on blank or random ones gives scales that clip real ones.

constant   a picture of one colour: the deviation over its pixels, in steps of 0..255
noise      a picture whose neighbouring pixels have nothing to do with each other: their correlation
identical  all observations are one
state      never moves over all samples, or is zero
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frtc.dataset import Wanted
from frtc.dataset_format import Array
from frtc.errors import FrtcError
from frtc.runtime.steps_image import read_image

# Photographs and renderings measure 20 to 80 and 0.85 to 0.99; a covered lens 1 to 3 of its sensor's noise.
FLAT = 1.0  # a picture deviates by more, of 255
ALIKE = 0.5  # neighbouring pixels correlate by more
SHOWN = 8  # findings in one message


@dataclass(frozen=True, slots=True)
class Finding:
    """Why an observation is not a robot's. camera: a role, "state", or "" for all; sample: None for all of them."""

    camera: str
    sample: int | None
    what: str
    measured: float
    bound: float

    @property
    def where(self) -> str:
        subject = self.camera if self.camera == "state" else f"camera {self.camera}" if self.camera else "observations"
        return subject if self.sample is None else f"{subject}, sample {self.sample}"

    @property
    def said(self) -> str:
        return f"{self.what}: {self.measured:.3g}, a robot's are above {self.bound:g}"

    def __str__(self) -> str:
        return f"{self.where}: {self.said}"


def trust(observations: Iterable[Mapping[str, Any]], wanted: Wanted) -> list[Finding]:
    """What speaks against them; observations as `Policy.infer` takes them."""
    found: list[Finding] = []
    states: list[Array] = []
    hashes: list[bytes] = []
    for sample, seen in enumerate(observations):
        digest = hashlib.sha256(str(seen.get("prompt")).encode(errors="replace"))
        for camera in wanted.cameras:
            picture = pixels(read_image(camera, seen[camera.role]))
            found += _picture(picture, camera.role, sample)
            digest.update(picture.tobytes())
        if wanted.state is not None:
            states.append(np.asarray(seen["state"], np.float32))
            digest.update(states[-1].tobytes())
        hashes.append(digest.digest())
    if len(hashes) > 1 and len(set(hashes)) == 1:
        found.append(Finding("", None, f"all {len(hashes)} are identical; different ones", 1, 1))
    return [*found, *_states(states)]


def require_trust(
    observations: Iterable[Mapping[str, Any]], wanted: Wanted, allow_synthetic: bool = False
) -> list[Finding]:
    """As `trust`; unless they are allowed, findings are an error."""
    found = trust(observations, wanted)
    if not found or allow_synthetic:
        return found
    rows = [(finding.where, finding.said) for finding in found[:SHOWN]]
    rows += [("and", f"{len(found) - SHOWN} more")] if len(found) > SHOWN else []
    hint = "calibrate on recordings of the robot; --allow-synthetic accepts these, and the Plan says so"
    raise FrtcError("calibrate.synthetic", "the observations are constant or random, not a robot's", rows, hint)


def pixels(image: Array) -> Array:
    """f32 [H, W, 3] in 0..255, of a picture u8 or of floats in [0, 1]."""
    return image.astype(np.float32) * np.float32(1 if image.dtype == np.uint8 else 255)


def deviation(picture: Array) -> float:
    """Over the pixels of the channel that varies most."""
    return float(picture.std(axis=(0, 1), dtype=np.float64).max())


def correlation(picture: Array) -> float:
    """Pearson's, of each pixel with the next across and down, channels about their own mean."""
    x = picture - picture.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
    pairs = [(x[:, :-1], x[:, 1:]), (x[:-1], x[1:])]
    product = sum(float(np.vdot(a, b)) for a, b in pairs)
    power = sum(float(np.vdot(a, a)) + float(np.vdot(b, b)) for a, b in pairs) / 2
    return product / power if power else 1.0


def _picture(picture: Array, role: str, sample: int) -> Iterator[Finding]:
    deviates = deviation(picture)
    if deviates <= FLAT:
        yield Finding(role, sample, "a picture of one colour; its deviation", deviates, FLAT)
    elif (alike := correlation(picture)) <= ALIKE:
        yield Finding(role, sample, "a picture of noise; the correlation of neighbouring pixels", alike, ALIKE)


def _states(states: Sequence[Array]) -> Iterator[Finding]:
    if not states:
        return
    moves = float(np.ptp(np.stack(states), axis=0).max(initial=0.0))
    if len(states) > 1 and moves == 0:
        yield Finding("state", None, f"the same in all {len(states)} samples; the widest range of a number", 0.0, 0.0)
    elif not np.any(states):
        yield Finding("state", None, "zero; the largest number", 0.0, 0.0)
