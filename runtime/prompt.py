"""Prompt step: cleaned instruction, and the normalised state as numbers, in the template of the model family."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError
from frtc.runtime.policy import Prompt

EDGES = np.linspace(-1, 1, 257)[:-1]  # multiples of 1/128: exact
NAMES = tuple(map(str, range(-1, 256)))  # of bins, by how many edges are at x or below
MIDDLE = "128"  # bin of 0, with which states are padded
STATE = "{state}"


def bins(state: NDArray[Any]) -> list[str]:
    """i with EDGES[i] <= x < EDGES[i+1]: -1 below -1, 255 from 127/128 on."""
    return [NAMES[i] for i in EDGES.searchsorted(state, "right").tolist()]


def clean(text: str, rule: str) -> str:
    if rule == "spaces":
        return text.strip().replace("_", " ").replace("\n", " ")
    if rule == "newline":
        return text if text.endswith("\n") else text + "\n"
    return text


class PromptStep:
    """The text to tokenise. What depends on the instruction alone is made when it changes."""

    def __init__(self, step: Prompt) -> None:
        self.step = step
        self.prompt, self.parts = "", self._parts("")

    def text(self, prompt: object, state: NDArray[Any] | None) -> str:
        """state: normalised, [dim]; needed iff the template shows it."""
        if type(prompt) is not str or prompt != self.prompt:
            text = str(_checked(prompt))
            self.prompt, self.parts = text, self._parts(text)  # both or, where this is interrupted, none
        if len(self.parts) == 1 or state is None:
            return STATE.join(self.parts)
        numbers = bins(state)
        numbers += [MIDDLE] * (self.step.state_numbers - len(numbers))
        return " ".join(numbers).join(self.parts)

    def _parts(self, prompt: str) -> tuple[str, ...]:
        """What stands around the state's numbers; the instruction may hold "{state}" itself."""
        parts = self.step.template.split(STATE) if self.step.state_numbers else [self.step.template]
        return tuple(part.replace("{prompt}", clean(prompt, self.step.clean)) for part in parts)


def prompt_text(step: Prompt, prompt: object, state: NDArray[Any] | None) -> str:
    """The same once."""
    return PromptStep(step).text(prompt, state)


def _checked(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise FrtcError("input.prompt_type", f"the prompt is a {type(prompt).__name__}, not a str")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        what = "the prompt is not valid Unicode: it holds half of a surrogate pair"
        raise FrtcError("input.prompt_type", what) from None
    return prompt
