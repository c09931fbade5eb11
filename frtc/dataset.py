"""Recorded observations, for calibration: a LeRobot dataset (v2.0, v2.1, v3.0) or an .npz file, a frame at a time.

data = open_data(path, Wanted.of(policy))         # policy: frtc.runtime.policy.Policy
for observation in data.samples(8):               # cameras by role, "state", "prompt": what `Policy.infer` takes
    ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from frtc.dataset_format import ROWS, Array, Asked, Format, Place, too_large
from frtc.errors import EnvironmentFault, FrtcError, UsageError, nearest
from frtc.observation import as_declared
from frtc.runtime.policy import Camera, Images, Policy, Prompt, State

TURN = 1 << 20  # a share of a whole, in integers: places are exact on every machine
GOLDEN = 648056  # TURN * (sqrt(5) - 1) / 2: its multiples, modulo TURN, are spread evenly at every count


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an observation must hold. state: how many numbers; None: no state."""

    cameras: tuple[Camera, ...]
    state: int | None
    prompt: bool

    @staticmethod
    def of(policy: Policy) -> Wanted:
        images, state = policy.find(Images), policy.find(State)
        cameras = images.cameras if images else ()
        return Wanted(cameras, state.dim if state else None, policy.find(Prompt) is not None)


@dataclass(frozen=True, slots=True)
class Data:
    """An opened dataset, and which of its cameras is which role."""

    path: Path
    wanted: Wanted
    keys: Mapping[str, str]  # role -> key in the data
    format: Format

    @property
    def kind(self) -> str:
        """For reports: "LeRobot v3.0" or "npz"."""
        return self.format.kind

    @property
    def frames(self) -> int:
        return sum(self.format.lengths)

    def places(self, n: int, seed: int = 0) -> list[Place]:
        """Which frames `samples` gives, in its order: n different ones, evenly over episodes, and over time in each."""
        if n > self.frames:
            rows = [("data", f"{self.path}: {self.frames} frames in {len(self.format.lengths)} episodes")]
            raise UsageError("dataset.samples", f"there are no {n} different frames", rows, "ask for fewer samples")
        return spread(self.format.lengths, n, seed)

    def samples(self, n: int, seed: int = 0) -> Iterator[dict[str, Any]]:
        """n observations. The same data, n and seed give the same ones; each is read when it is asked for."""
        places, asked = self.places(n, seed), self._asked()
        for place, frame in zip(places, self.format.read(places, asked), strict=True):
            made: dict[str, Any] = {}
            for camera in self.wanted.cameras:
                made[camera.role] = as_declared(frame.pictures[self.keys[camera.role]], camera)
            if self.wanted.state is not None:
                made["state"] = self._state(frame.state, place)
            if self.wanted.prompt:
                made["prompt"] = self._prompt(frame.prompt, place)
            yield made

    def _asked(self) -> Asked:
        cameras = tuple(self.keys[camera.role] for camera in self.wanted.cameras)
        return Asked(cameras, self.wanted.state is not None, self.wanted.prompt)

    def _state(self, state: Array | None, place: Place) -> Array:
        """f32 [dim]."""
        if state is None or state.dtype.kind not in "fiu" or state.shape != (self.wanted.state,):
            found = "absent" if state is None else f"{state.dtype}{list(state.shape)}"
            rows = [("data", f"{self.path}: {place}"), ("policy", f"{self.wanted.state} numbers")]
            hint = "data of the robot that the checkpoint was trained for; `--state-dim` if the checkpoint's is padded"
            raise FrtcError("dataset.shape", f"the state is {found}", rows, hint)
        with np.errstate(over="ignore"):  # becomes infinite, and is refused
            numbers = state.astype(np.float32)
        if not np.isfinite(numbers).all():
            wrong = np.flatnonzero(~np.isfinite(numbers)).tolist()
            rows = [("data", f"{self.path}: {place}"), ("at", ", ".join(map(str, wrong)))]
            hint = "a sensor failed while this was recorded: take the episode out, or another --seed"
            raise FrtcError("dataset.value", "the state holds NaN, or what float32 cannot hold", rows, hint)
        return numbers

    def _prompt(self, prompt: str | None, place: Place) -> str:
        if not prompt or not prompt.strip():
            hint = "record the task's text: the policy is calibrated on the prompts that it will get"
            raise FrtcError("dataset.task", "a frame has no task text", [("data", f"{self.path}: {place}")], hint)
        return prompt


def open_data(path: Path, wanted: Wanted, keys: Sequence[tuple[str, str]] = ()) -> Data:
    """Find out the format, check what is declared, and match the cameras. No picture is read yet.

    keys   (role, key in the data) where the names alone do not decide: `--data-camera ROLE=KEY`
    """
    found = _format(path)
    lengths = found.lengths
    if not sum(lengths):
        raise FrtcError("dataset.empty", f"{path} holds no frames", [("episodes", str(len(lengths)))])
    if sum(lengths) > ROWS:
        raise too_large(str(path), f"{sum(lengths)} frames", str(ROWS))
    return Data(path, wanted, match(wanted.cameras, found.cameras, keys), found)


def _format(path: Path) -> Format:
    if path.is_dir():
        try:
            from frtc.dataset_lerobot import LeRobot
        except ImportError as fault:
            what = f"reading a LeRobot dataset needs pyarrow and av: {fault}"
            raise EnvironmentFault("env.package", what, hint="pip install 'frtc[data]'") from None
        return LeRobot.open(path)
    if path.suffix == ".npz" and path.is_file():
        from frtc.dataset_npz import Npz

        return Npz.open(path)
    there = "it is neither a folder nor an .npz file" if path.exists() else "there is no such file or folder"
    hint = "a LeRobot dataset's folder (it holds meta/info.json), or FILE.npz"
    raise FrtcError("dataset.not_found", f"{path} is no dataset: {there}", hint=hint)


def match(cameras: Sequence[Camera], known: Sequence[str], given: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Role -> key in the data: as given; else the one key that is the role, ends in it, or is the checkpoint's key."""
    chosen, roles = dict(given), [camera.role for camera in cameras]
    wrong = [f"{role}={key}" for role, key in given if role not in roles or key not in known]
    if wrong or len(chosen) != len(given):
        raise _cameras(f"--data-camera {', '.join(wrong)} fits nothing" if wrong else "a role twice", cameras, known)
    for camera in cameras:
        if camera.role in chosen:
            continue
        found = _candidates(camera, known)
        if not found:
            raise _cameras(f"the data have no camera {camera.role}", cameras, known, camera.role)
        if len(found) > 1:
            raise _cameras(f"camera {camera.role} could be {' or '.join(found)}", cameras, known)
        chosen[camera.role] = found[0]
    if shared := [role for role in roles if list(chosen.values()).count(chosen[role]) > 1]:
        raise _cameras(f"cameras {', '.join(shared)} would be one, {chosen[shared[0]]}", cameras, known)
    return chosen


def _candidates(camera: Camera, known: Sequence[str]) -> list[str]:
    """NOTE: a checkpoint may rename cameras, so its own key alone can name another picture than the role does."""
    by_role = [key for key in known if key == camera.role]
    by_role = by_role or [key for key in known if key.rpartition(".")[2] == camera.role]
    return list(dict.fromkeys([*by_role, *(key for key in known if key == camera.source)]))


def _cameras(what: str, cameras: Sequence[Camera], known: Sequence[str], name: str = "") -> UsageError:
    wants = (f"{c.role} ({c.source})" if c.source != c.role else c.role for c in cameras)
    rows = [("policy", ", ".join(wants)), ("data", ", ".join(known) or "no cameras")]
    rows += [("nearest", near)] if (near := nearest(name, known)) else []
    return UsageError("dataset.cameras", what, rows, "--data-camera ROLE=KEY says which of the data's is which")


def spread(lengths: Sequence[int], n: int, seed: int) -> list[Place]:
    """n different places in rising order; n is at most the sum of the lengths.

    Episodes get equal shares as far as they are long enough. Within one, frames stand at equal distances; where they
    begin moves from episode to episode by the golden ratio, so that one frame from each covers all of the time too.
    """
    phase = (2 * seed + 1) * GOLDEN // 2 % TURN
    found = []
    for rank, (episode, count) in enumerate((e, c) for e, c in enumerate(_shares(lengths, n, phase)) if c):
        start = (phase + rank * GOLDEN) % TURN
        frames = ((i * TURN + start) * lengths[episode] // (count * TURN) for i in range(count))
        found += [Place(episode, frame) for frame in frames]
    return found


def _shares(lengths: Sequence[int], n: int, phase: int) -> list[int]:
    """How many frames of each episode."""
    shares = [0] * len(lengths)
    while left := n - sum(shares):
        room = [e for e, length in enumerate(lengths) if shares[e] < length]
        each = left // len(room)
        if each:
            for e in room:
                shares[e] += min(each, lengths[e] - shares[e])
        else:
            for i in range(left):
                shares[room[(i * TURN + phase) * len(room) // (left * TURN)]] += 1
    return shares
