"""What a policy family publishes about its inputs and no checkpoint file states. Data; needs neither torch nor weights.

Where a value here changes motion and nothing else confirms it, the compiler takes it and records it as assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PolicyFamily:
    """
    cameras            image slots in model order: (role in the observation, name in openpi); openpi masks absent ones
    openpi_norm        which statistics openpi reads for this family
    state_in_prompt    published default: is the state written into the prompt?
    with_state         prompt where it is, {prompt} and {state} are replaced
    plain              prompt where it is not
    lerobot_state_step the step of lerobot's pipeline that writes the state into the prompt
    state_input        the model takes the state as numbers, padded to the width of an action
    bos, pad           pieces of the tokenizer
    """

    name: str
    cameras: tuple[tuple[str, str], ...]
    openpi_norm: Literal["openpi_mean_std", "openpi_range"]
    state_in_prompt: bool
    with_state: str
    plain: str
    lerobot_state_step: str
    state_input: bool = False
    bos: str = "<bos>"
    pad: str = "<pad>"


# Sources: openpi (June 2026: model and tokenizer classes), lerobot 0.4.4 to 0.6.1 (Pi0.5 processor)
PI05 = PolicyFamily(
    name="pi05",
    cameras=(("base", "base_0_rgb"), ("left_wrist", "left_wrist_0_rgb"), ("right_wrist", "right_wrist_0_rgb")),
    openpi_norm="openpi_range",
    state_in_prompt=True,
    with_state="Task: {prompt}, State: {state};\nAction: ",
    plain="{prompt}\n",
    lerobot_state_step="pi05_prepare_state_tokenizer_processor_step",
)
