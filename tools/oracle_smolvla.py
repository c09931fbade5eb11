"""SmolVLA made small.

lerobot 0.6.1 loads the vision-language model that it starts from by name, and sizes the expert after it; here a small
SmolVLM answers to that name, saved to a folder and read by transformers as a download would be. Of the processor
lerobot reads two token ids. All else of lerobot runs unmodified.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lerobot.policies.smolvla.smolvlm_with_expert as building
import lerobot.processor.tokenizer_processor as tokenizing
import oracle_tokenizer
import torch
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from oracle_policy import EMPTY_CAMERA, TOP, WRIST, Case, Family, Scale
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

NAME = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"  # lerobot asks for it by this name; a local folder answers
IMAGE, LAYERS = 64, 4
VISION = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "image_size": IMAGE,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": LAYERS + 1,  # lerobot cuts the last layers off
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,  # the text model's; lerobot turns by 10,000
    "dtype": "bfloat16",
}


def vision_language_model(vocabulary: int, folder: Path) -> None:
    sizes = TEXT | {"vocab_size": vocabulary, "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = SmolVLMConfig(vision_config=dict(VISION), text_config=sizes, scale_factor=4, image_token_id=3)
    SmolVLMForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


@contextlib.contextmanager
def small(tokenizer: Path) -> Iterator[None]:
    """Within this context lerobot builds the small model, and the hub's name means local files."""

    def pieces(name: str) -> PreTrainedTokenizerFast:
        assert name == NAME, name
        return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), pad_token=oracle_tokenizer.CHAT_PAD)

    def processor(name: str) -> SimpleNamespace:
        assert name == NAME, name
        return SimpleNamespace(tokenizer=SimpleNamespace(fake_image_token_id=4, global_image_token_id=5))

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        vision_language_model(Tokenizer.from_file(str(tokenizer)).get_vocab_size(), Path(folder))

        def local(kind: type) -> SimpleNamespace:
            return SimpleNamespace(from_pretrained=lambda name, **options: kind.from_pretrained(folder, **options))

        for owner, name, stand_in in (
            (building, "AutoConfig", local(AutoConfig)),
            (building, "AutoModelForImageTextToText", local(AutoModelForImageTextToText)),
            (building, "AutoProcessor", SimpleNamespace(from_pretrained=processor)),
            (tokenizing.AutoTokenizer, "from_pretrained", pieces),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


# As for the Pi family: small residual streams, attention far from uniform, no branch lost.
SCALES: tuple[Scale, ...] = (
    ("position_embedding.weight", False, 0.02, 0.0),
    ("patch_embedding.weight", True, 0.05, 0.0),
    ("patch_embedding.bias", False, 0.02, 0.0),
    ("layer_norm1.weight", False, 0.2, 1.0),
    ("layer_norm2.weight", False, 0.2, 1.0),
    ("post_layernorm.weight", False, 0.2, 1.0),
    ("modality_projection.proj.weight", True, 0.02, 0.0),
    ("embed_tokens.weight", False, 0.012, 0.0),
    ("lm_head.weight", False, 0.02, 0.0),
    ("input_layernorm.weight", False, 0.2, 1.0),
    ("post_attention_layernorm.weight", False, 0.2, 1.0),
    ("norm.weight", False, 0.2, 1.0),
    ("q_proj.weight", True, 0.9, 0.0),
    ("k_proj.weight", True, 0.9, 0.0),
    ("state_proj.weight", True, 0.1, 0.0),
    ("state_proj.bias", False, 0.02, 0.0),
    ("action_time_mlp_in.weight", True, 1.5, 0.0),
    ("action_time_mlp_out.weight", True, 0.08, 0.0),
    ("action_time_mlp_out.bias", False, 0.01, 0.0),
    (".weight", True, 1.0, 0.0),
    (".bias", False, 0.1, 0.0),
)

SMOLVLA = Family(
    name="smolvla",
    config=SmolVLAConfig,
    policy=SmolVLAPolicy,
    processors=make_smolvla_pre_post_processors,
    settings={"resize_imgs_with_padding": (IMAGE, IMAGE), "num_vlm_layers": LAYERS, "load_vlm_weights": True},
    sides={"empty_camera": EMPTY_CAMERA},
    cameras={TOP: (75, 101), WRIST: (41, 30)},
    cases=(
        Case("pick", "pick up the red cup", (-0.76, -0.51, -0.26, 0.003, 1.1, 0.3, 1.6, 0.9)),
        Case("edge", "  put_the blue_block\ninto the  bowl no. 12!\n", (-3.6, -1.0, 0, 1, 2.4, -1.7, 0.004, -0.04)),
    ),
    scales=SCALES,
    tokenizer=oracle_tokenizer.save_byte_level,
    small=small,
    dead=(
        "text_model.norm",
        "lm_head",
        *(f"text_model.layers.{LAYERS - 1}.{part}" for part in ("mlp", "post_attention", "self_attn.q", "self_attn.o")),
    ),
)
