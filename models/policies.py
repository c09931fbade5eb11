"""What a policy family publishes about its inputs and no checkpoint file states. Data; needs neither torch nor weights.

Where a value here changes motion and nothing else confirms it, the compiler takes it and records it as assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Pixels:
    """How a picture is resized, what surrounds it (in the unit of the images input) and where it lies in the square."""

    resize: Literal["pil_bilinear", "torch_bilinear01"]
    border: float
    place: Literal["center", "end"]  # end: at the bottom or on the right, all of the border above or on the left


@dataclass(frozen=True, slots=True)
class PolicyFamily:
    """
    cameras            image slots in model order: (role in the observation, name in openpi); openpi masks absent ones
    openpi_norm        which statistics openpi reads for this family; None: openpi does not have it
    state_in_prompt    published default: is the state written into the prompt?
    with_state         prompt where it is, {prompt} and {state} are replaced; "": the family never does
    plain              prompt where it is not
    lerobot_state_step the step of lerobot's pipeline that writes the state into the prompt; "": there is none
    state_input        the model takes the state as numbers, normalised and padded with zeros
    pixels             origin -> how pictures become the square that the model sees; an origin that is absent does
                       not have the family
    resolution         the field of lerobot's config.json with width and height of that square
    bos, pad           pieces of the tokenizer; bos "": the prompt begins with the text. `pad` stands where neither
                       tokenizer nor its configuration names one: padding is masked, so no action depends on it
    tokenizer          where it is published
    """

    name: str
    cameras: tuple[tuple[str, str], ...]
    openpi_norm: Literal["openpi_mean_std", "openpi_range"] | None
    state_in_prompt: bool
    with_state: str
    plain: str
    lerobot_state_step: str
    pixels: Mapping[str, Pixels]
    resolution: str = "image_resolution"
    state_input: bool = False
    bos: str = "<bos>"
    pad: str = "<pad>"
    tokenizer: str = "google/paligemma-3b-pt-224"


PI_CAMERAS = (("base", "base_0_rgb"), ("left_wrist", "left_wrist_0_rgb"), ("right_wrist", "right_wrist_0_rgb"))
# lerobot 0.4 fills the border with -1 before x*2-1, later versions with 0
PI_PIXELS = {
    "openpi": Pixels("pil_bilinear", 0.0, "center"),
    "lerobot-0.4": Pixels("torch_bilinear01", -1.0, "center"),
    "lerobot-0.6": Pixels("torch_bilinear01", 0.0, "center"),
}

# Sources: openpi (June 2026: model and tokenizer classes), lerobot 0.4.4 to 0.6.1 (the policies' processors and models)
PI05 = PolicyFamily(
    name="pi05",
    cameras=PI_CAMERAS,
    openpi_norm="openpi_range",
    state_in_prompt=True,
    with_state="Task: {prompt}, State: {state};\nAction: ",
    plain="{prompt}\n",
    lerobot_state_step="pi05_prepare_state_tokenizer_processor_step",
    pixels=PI_PIXELS,
)
PI0 = PolicyFamily(
    name="pi0",
    cameras=PI_CAMERAS,
    openpi_norm="openpi_mean_std",
    state_in_prompt=False,
    with_state="",
    plain="{prompt}\n",
    lerobot_state_step="",
    pixels=PI_PIXELS,
    state_input=True,
)
SMOLVLA = PolicyFamily(
    name="smolvla",
    cameras=(),  # each checkpoint's own: config.json lists them
    openpi_norm=None,
    state_in_prompt=False,
    with_state="",
    plain="{prompt}\n",
    lerobot_state_step="",
    pixels=dict.fromkeys(("lerobot-0.4", "lerobot-0.6"), Pixels("torch_bilinear01", 0.0, "end")),
    resolution="resize_imgs_with_padding",
    state_input=True,
    bos="",
    pad="<|im_end|>",
    tokenizer="HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
)
