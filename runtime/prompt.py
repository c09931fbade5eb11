"""Prompt step: cleaned instruction, and the normalised state as numbers, in the template of the model family."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frtc.errors import FrtcError
from frtc.runtime.policy import Prompt

EDGES = np.linspace(-1, 1, 257)[:-1]  # multiples of 1/128: exact


def bins(state: NDArray[Any]) -> NDArray[np.int64]:
    """i with EDGES[i] <= x < EDGES[i+1]: -1 below -1, 255 from 127/128 on."""
    return np.searchsorted(EDGES, state, side="right") - 1


def clean(text: str, rule: str) -> str:
    if rule == "spaces":
        return text.strip().replace("_", " ").replace("\n", " ")
    if rule == "newline":
        return text if text.endswith("\n") else text + "\n"
    return text


def prompt_text(step: Prompt, prompt: object, state: NDArray[Any] | None) -> str:
    """The text to tokenise. state: normalised, [dim]; needed iff the template shows it."""
    if not isinstance(prompt, str):
        raise FrtcError("input.prompt_type", f"the prompt is a {type(prompt).__name__}, not a str")
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise FrtcError("input.prompt_type", "the prompt is not valid Unicode: it holds half of a surrogate pair")
    text = step.template
    if step.state_numbers and state is not None:
        padded = np.zeros(step.state_numbers, state.dtype)
        padded[: len(state)] = state
        text = text.replace("{state}", " ".join(map(str, bins(padded).tolist())))
    return text.replace("{prompt}", clean(prompt, step.clean))  # last: the instruction may hold "{state}" itself
