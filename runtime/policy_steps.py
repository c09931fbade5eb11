"""The interpreter of a policy: observation -> device inputs, model output -> actions.

steps = PolicySteps(policy, tokenizer_bytes)
prepared = steps.prepare({"base": img, "left_wrist": img, "state": q, "prompt": "…"})
actions = steps.finish(output, prepared)                 # f32 [horizon, dim], robot units
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import intern
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError, nearest
from frtc.runtime.masked import require_unmasked
from frtc.runtime.noise import normal
from frtc.runtime.policy import Absolute, Images, Noise, Policy, Prompt, Slice, State, Tokens, Unnormalise
from frtc.runtime.prompt import PromptStep
from frtc.runtime.steps_image import ImageStep
from frtc.runtime.steps_vector import Normaliser, StateStep, absolute, apply
from frtc.runtime.tokenize import TokenStep

Array = NDArray[Any]
NUMPY = {"u8": np.uint8, "i32": np.int32, "f32": np.float32}


class Prepared(NamedTuple):
    """inputs: by name, as in Policy.device_inputs; where raw frames were taken `images` are not made. The arrays are
    those that `prepare` was given, or belong to PolicySteps and live until its next prepare."""

    inputs: Mapping[str, Array]
    state: Array | None  # [dim], as it was normalised: what relative actions are added to
    draw: int | None  # which Philox draw the noise is; None: given by the caller


class PolicySteps:
    """Buffers are allocated here (for images at the first picture of each size), not per inference. Not thread-safe."""

    def __init__(self, policy: Policy, tokenizer: bytes | None = None, seed: int = 0) -> None:
        self.policy, self.seed, self.draw = policy, _number("seed", seed), 0
        self.inputs = {name: np.zeros(shape, NUMPY[dtype]) for name, (dtype, shape) in policy.device_inputs().items()}
        self.draws: dict[tuple[int, int], Array] = {}
        images, tokens, scale = policy.find(Images), policy.find(Tokens), policy.find(Unnormalise)
        state, prompt, self.noise = policy.find(State), policy.find(Prompt), policy.find(Noise)
        self.cut, self.absolute = policy.find(Slice), policy.find(Absolute)
        self.state, self.state_steps, self.action_steps = state, policy.state_steps, policy.action_steps
        self.prompt, self.text = prompt, PromptStep(prompt) if prompt else None
        self.images = ImageStep(images) if images else None
        self.tokens = TokenStep(tokens, tokenizer) if tokens else None
        read = bool((state and state.width) or (prompt and prompt.state_numbers))
        self.vector = StateStep(state, policy.state_steps, read) if state else None
        self.unnormalise = Normaliser(scale.norm).unnormalise if scale else None
        self.cameras = tuple(intern(camera.role) for camera in images.cameras) if images else ()
        given = (("state", state), ("prompt", prompt))
        self.required = (*self.cameras, *(name for name, step in given if step))
        self.optional = ("noise",) if self.noise else ()
        self.usual = frozenset(self.required)

    def prepare(
        self,
        observation: Mapping[str, Any],
        draw: int | None = None,
        take: Callable[[Mapping[str, Any]], object] | None = None,
        into: Mapping[str, Array] | None = None,
    ) -> Prepared:
        """Device inputs for one inference.

        draw   the number of the Philox draw; by default the next one, and none where the observation holds noise
        take   what the camera frames are given to as they are, instead of the image step here
        into   arrays for the inputs, by name and as in Policy.device_inputs, instead of those here; after an error some
               of them are new
        """
        self._check_keys(observation)
        inputs = self.inputs if into is None else into
        state = normalised = None
        if self.images and take:
            take(observation)
        elif self.images:
            self.images.run(observation, inputs["images"])
        if self.state and self.vector:
            state, normalised = self.vector.run(observation["state"])
            if self.state.width:
                inputs["state"][: self.state.dim] = normalised
                inputs["state"][self.state.dim :] = 0
        if self.text and self.tokens:
            text = self.text.text(observation["prompt"], normalised)
            inputs["n"][...] = self.tokens.run(text, inputs["tokens"])
        return Prepared(inputs, state, self._noise(observation.get("noise"), draw, inputs))

    def draw_ahead(self) -> None:
        """Make the noise that the next inference takes by default, while there is time."""
        if self.noise:
            self._drawn(self.draw)

    def rehearse(self) -> None:
        """Prepare the next inference, while there is time, as if it saw the last state and prompt: its noise is there
        when it comes, and what it runs and reads is in the host's caches, from which pixels have pushed it.

        After a `prepare` that has not failed. Frames are left alone: to read pixels again would do harm.
        """
        self.draw_ahead()  # first: it pushes out what the rest leaves in the caches
        draw, seen = self.draw, dict[str, Any].fromkeys(self.cameras)
        if self.vector:
            seen["state"] = self.vector.last
        if self.text:
            seen["prompt"] = self.text.prompt
        if self.tokens:
            self.tokens.forget()
        try:
            self.prepare(seen, take=lambda _: None)
        finally:
            self.draw = draw

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

    def _noise(self, given: object, draw: int | None, inputs: Mapping[str, Array]) -> int | None:
        if self.noise is None:
            return None
        if given is None:
            number = self.draw if draw is None else _number("draw", draw)
            self.draw = (number + 1) % (1 << 64)
            inputs["noise"][...] = self._drawn(number)
            return number
        if draw is not None:
            what = f"the observation holds noise, and draw {draw!r} asks for another"
            raise FrtcError("input.noise", what, hint="leave one of them out")
        require_unmasked("the noise", given)
        shape = (self.noise.horizon, self.noise.width)
        if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape != shape:
            found = f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray) else type(given).__name__
            raise FrtcError("input.noise", f"the noise is {found}, not float32{list(shape)}")
        if not np.isfinite(given).all():
            raise FrtcError("input.noise", "the noise holds NaN or infinity", hint="leave it out, and it is drawn here")
        inputs["noise"][...] = given
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
        if type(observation) is dict and observation.keys() == self.usual:
            return
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


def _number(what: str, given: object) -> int:
    """What a Philox key or counter has 64 bits for."""
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool) and 0 <= given < 1 << 64:
        return int(given)
    raise FrtcError("input.noise", f"the {what} of the noise is {given!r}, not a whole number from 0 to 2**64 - 1")


def _require_finite(actions: Array, what: str) -> None:
    if not np.isfinite(actions).all():
        raise FrtcError(
            "output.nonfinite",
            f"{what} are not finite: nothing is sent to the robot",
            hint="`frtc verify --bisect` names the first tensor that departs",
        )
