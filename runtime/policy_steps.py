"""The interpreter of a policy: observation -> device inputs, model output -> actions.

steps = PolicySteps(policy, tokenizer_bytes)
prepared = steps.prepare({"base": img, "left_wrist": img, "state": q, "prompt": "…"})
actions = steps.finish(output, prepared)                 # f32 [horizon, dim], robot units
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError, nearest
from frtc.runtime.noise import normal
from frtc.runtime.policy import Absolute, Images, Noise, Policy, Prompt, Slice, State, Tokens, Unnormalise
from frtc.runtime.prompt import prompt_text
from frtc.runtime.steps_image import ImageStep
from frtc.runtime.steps_vector import Normaliser, absolute, apply, read_state
from frtc.runtime.tokenize import TokenStep

Array = NDArray[Any]
FLOAT32_MOST = float(np.finfo(np.float32).max)
NUMPY = {"u8": np.uint8, "i32": np.int32, "f32": np.float32}


@dataclass(frozen=True, slots=True)
class Prepared:
    """inputs: by name, as in Policy.device_inputs, without `images` where raw frames were taken; the arrays belong to
    PolicySteps and live until its next prepare."""

    inputs: Mapping[str, Array]
    state: Array | None  # [dim], as it was normalised: what relative actions are added to
    draw: int | None  # which Philox draw the noise is; None: given by the caller


class PolicySteps:
    """Buffers are allocated here (for images at the first picture of each size), not per inference. Not thread-safe."""

    def __init__(self, policy: Policy, tokenizer: bytes | None = None, seed: int = 0) -> None:
        self.policy, self.seed, self.draw = policy, seed, 0
        self.inputs = {name: np.zeros(shape, NUMPY[dtype]) for name, (dtype, shape) in policy.device_inputs().items()}
        self.but_images = {name: array for name, array in self.inputs.items() if name != "images"}
        self.draws: dict[tuple[int, int], Array] = {}
        images, tokens, scale = policy.find(Images), policy.find(Tokens), policy.find(Unnormalise)
        self.state, self.prompt, self.noise = policy.find(State), policy.find(Prompt), policy.find(Noise)
        self.cut, self.absolute = policy.find(Slice), policy.find(Absolute)
        self.state_steps, self.action_steps = policy.state_steps, policy.action_steps
        self.images = ImageStep(images) if images else None
        self.tokens = TokenStep(tokens, tokenizer) if tokens else None
        self.normalise = Normaliser(self.state.norm).normalise if self.state else None
        self.unnormalise = Normaliser(scale.norm).unnormalise if scale else None
        self.cameras = tuple(camera.role for camera in images.cameras) if images else ()
        given = (("state", self.state), ("prompt", self.prompt))
        self.required = (*self.cameras, *(name for name, step in given if step))
        self.optional = ("noise",) if self.noise else ()

    def prepare(
        self,
        observation: Mapping[str, Any],
        draw: int | None = None,
        take: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> Prepared:
        """Device inputs for one inference.

        draw   the number of the Philox draw; by default the next one
        take   what the camera frames are given to as they are, instead of the image step here
        """
        self._check_keys(observation)
        state = normalised = None
        if self.images and take:
            take(observation)
        elif self.images:
            self.images.run(observation, self.inputs["images"])
        if self.state and self.normalise:
            with np.errstate(over="ignore", invalid="ignore"):  # said by the check below
                state = apply(self.state_steps, read_state(self.state, observation["state"]))
                normalised = self.normalise(state)
            _require_reachable(normalised)
            if self.state.width:
                self.inputs["state"][: self.state.dim] = normalised
        if self.prompt and self.tokens:
            text = prompt_text(self.prompt, observation["prompt"], normalised)
            self.inputs["n"][...] = self.tokens.run(text, self.inputs["tokens"])
        inputs = self.but_images if take else self.inputs
        return Prepared(inputs, state, self._noise(observation.get("noise"), draw))

    def draw_ahead(self) -> None:
        """Make the noise that the next inference takes by default, while there is time."""
        if self.noise:
            self._drawn(self.draw)

    def finish(self, output: Array, prepared: Prepared) -> NDArray[np.float32]:
        """output f32 [>= horizon, >= dim] of the model -> actions f32 [horizon, dim], a new array."""
        if self.cut is None:
            return np.array(output, np.float32)
        horizon, dim = self.cut.horizon, self.cut.dim
        if output.ndim != 2 or output.shape[0] < horizon or output.shape[1] < dim:
            raise FrtcError("output.shape", f"the model's output {list(output.shape)} does not hold [{horizon}, {dim}]")
        actions = np.array(output[:horizon, :dim])
        _require_finite(actions, "the model's actions")
        if self.unnormalise:
            actions = self.unnormalise(actions)
        if self.absolute and prepared.state is not None:
            absolute(actions, prepared.state, self.absolute.mask)
        with np.errstate(over="ignore", invalid="ignore"):  # said by the check below
            made = apply(self.action_steps, actions).astype(np.float32)
        _require_finite(made, "the actions in robot units")
        return made

    def _noise(self, given: object, draw: int | None) -> int | None:
        if self.noise is None:
            return None
        shape = (self.noise.horizon, self.noise.width)
        if given is None:
            number = self.draw if draw is None else draw
            self.draw = number + 1
            self.inputs["noise"][...] = self._drawn(number)
            return number
        if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape != shape:
            found = f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray) else type(given).__name__
            raise FrtcError("input.noise", f"the noise is {found}, not float32{list(shape)}")
        if not np.isfinite(given).all():
            raise FrtcError("input.noise", "the noise holds NaN or infinity", hint="leave it out, and it is drawn here")
        self.inputs["noise"][...] = given
        return None

    def _drawn(self, number: int) -> Array:
        """The noise of a draw; the last two are kept."""
        assert self.noise
        key = (self.seed, number)
        if key not in self.draws:
            kept = list(self.draws.items())[-1:]
            self.draws = dict([*kept, (key, normal(self.seed, number, (self.noise.horizon, self.noise.width)))])
        return self.draws[key]

    def _check_keys(self, observation: Mapping[str, Any]) -> None:
        if not isinstance(observation, Mapping):
            what = f"the observation is {type(observation).__name__}, not a mapping"
            raise FrtcError("input.observation", what, hint=f"a dict with {', '.join(self.required)}")
        known, found = (*self.required, *self.optional), [str(name) for name in observation]
        missing = [name for name in self.required if name not in observation]
        names = missing or [name for name in found if name not in known]
        if not names:
            return
        rows = [("wants", ", ".join(known)), ("found", ", ".join(found) or "nothing")]
        near = {name: nearest(name, found if missing else known) for name in names}
        rows += [("nearest", f"{name}: {candidates}") for name, candidates in near.items() if candidates]
        what = f"the observation lacks {', '.join(names)}" if missing else f"the Plan takes no {', '.join(names)}"
        code, hint = "input.unknown", "cameras get their names when compiling: --camera ROLE=KEY, --views N"
        if missing and missing[0] in self.cameras:
            code = "input.camera_missing"
        elif missing:
            code, hint = f"input.{missing[0]}_missing", ""
        raise FrtcError(code, what, rows, hint)


def _require_finite(actions: Array, what: str) -> None:
    if not np.isfinite(actions).all():
        raise FrtcError(
            "output.nonfinite",
            f"{what} are not finite: nothing is sent to the robot",
            hint="`frtc verify --bisect` names the first tensor that departs",
        )


def _require_reachable(normalised: Array) -> None:
    """A finite state may still leave float32 on its way to the model."""
    near = np.abs(normalised) <= FLOAT32_MOST
    if not near.all():
        what = f"state numbers {np.flatnonzero(~near).tolist()} are too large once normalised"
        raise FrtcError("input.state_value", what, hint="are they in the robot's units?")
