"""Pi0.5 and Pi0 made small.

lerobot 0.6.1 reads the Gemma sizes from `get_gemma_config` and hard-codes those of the vision tower and of the
vocabulary in constructors; `small` replaces them while policies are built. All else of lerobot runs unmodified.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import lerobot.policies.pi0.modeling_pi0 as pi0
import lerobot.policies.pi05.modeling_pi05 as pi05
import lerobot.processor.tokenizer_processor as tokenizing
import oracle_tokenizer
import torch
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from oracle_policy import EMPTY_CAMERA, RELATIVE, TOP, WRIST, Case, Family, Scale
from tokenizers import Tokenizer
from transformers import PretrainedConfig
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

TOKENIZER_NAME = "google/paligemma-3b-pt-224"  # lerobot asks for it by this name; a local file answers
IMAGE = 112
SIGLIP = {"hidden_size": 144, "num_attention_heads": 2, "patch_size": 14}
Gemmas = Mapping[str, tuple[int, ...]]  # variant: width, depth, mlp_dim, num_heads, num_kv_heads, head_dim


@contextlib.contextmanager
def small(modeling: ModuleType, vision: Mapping[str, int], gemmas: Gemmas, tokenizer: Path) -> Iterator[None]:
    """Within this context lerobot builds the small model, and the hub's name of the tokenizer means a local file."""
    paligemma, expert = modeling.PaliGemmaForConditionalGenerationWithPiGemma, modeling.PiGemmaForCausalLM
    vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab_size()

    def small_paligemma(config: PretrainedConfig) -> torch.nn.Module:
        config._vocab_size = config.image_token_index = config.text_config.vocab_size = vocabulary
        for name, value in (SIGLIP | dict(vision) | {"projection_dim": config.text_config.hidden_size}).items():
            setattr(config.vision_config, name, value)
        return paligemma(config)

    def small_expert(config: PretrainedConfig) -> torch.nn.Module:
        config.vocab_size = vocabulary
        return expert(config)

    def load(name: str) -> GemmaTokenizer:
        assert name == TOKENIZER_NAME, name
        return GemmaTokenizer.from_pretrained(
            tokenizer.parent, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
        )

    with (
        mock.patch.object(modeling, "get_gemma_config", lambda variant: modeling.GemmaConfig(*gemmas[variant])),
        mock.patch.object(modeling, "PaliGemmaForConditionalGenerationWithPiGemma", small_paligemma),
        mock.patch.object(modeling, "PiGemmaForCausalLM", small_expert),
        mock.patch.object(tokenizing.AutoTokenizer, "from_pretrained", load),
    ):
        yield


# Residual streams start small (0.05 to 0.2), so that the eps of every norm shows in the result; queries and keys are
# large enough that attention is far from uniform; gates are of the order of one, so that no branch is lost.
SCALES: tuple[Scale, ...] = (
    ("position_embedding.weight", False, 0.02, 0.0),
    ("patch_embedding.weight", True, 0.05, 0.0),
    ("patch_embedding.bias", False, 0.02, 0.0),
    ("layer_norm1.weight", False, 0.2, 1.0),
    ("layer_norm2.weight", False, 0.2, 1.0),
    ("post_layernorm.weight", False, 0.2, 1.0),
    ("multi_modal_projector.linear.weight", True, 0.2, 0.0),
    ("multi_modal_projector.linear.bias", False, 0.05, 0.0),
    ("embed_tokens.weight", False, 0.012, 0.0),
    ("lm_head.weight", False, 0.02, 0.0),
    ("dense.weight", True, 0.5, 0.0),
    ("dense.bias", False, 0.3, 0.0),
    ("input_layernorm.weight", False, 0.3, 0.0),
    ("post_attention_layernorm.weight", False, 0.3, 0.0),
    ("model.norm.weight", False, 0.3, 0.0),
    ("q_proj.weight", True, 0.9, 0.0),
    ("k_proj.weight", True, 0.9, 0.0),
    ("action_in_proj.weight", True, 0.05, 0.0),
    ("action_in_proj.bias", False, 0.02, 0.0),
    (".time_mlp", True, 1.2, 0.0),
    (".weight", True, 1.0, 0.0),
    (".bias", False, 0.1, 0.0),
)
PI0_SCALES: tuple[Scale, ...] = (
    ("multi_modal_projector.linear.weight", True, 0.08, 0.0),
    ("multi_modal_projector.linear.bias", False, 0.02, 0.0),
    ("embed_tokens.weight", False, 0.006, 0.0),
    ("state_proj.weight", True, 0.05, 0.0),
    ("state_proj.bias", False, 0.01, 0.0),
    ("action_in_proj.weight", True, 1.0, 0.0),
    ("action_time_mlp_in.weight", True, 1.5, 0.0),
    ("action_time_mlp_out.weight", True, 0.1, 0.0),
    ("action_time_mlp_out.bias", False, 0.01, 0.0),
    *SCALES,
)
SETTINGS = {"image_resolution": (IMAGE, IMAGE), "tokenizer_max_length": 72}
SIDES = {"relative": RELATIVE, "empty_camera": EMPTY_CAMERA}
DEAD = ("language_model.norm", "lm_head", *(  # only keys and values of the last prefix layer are read
    f"language_model.layers.2.{part}" for part in ("mlp", "post_attention", "self_attn.q", "self_attn.o")
))  # fmt: skip

PI05 = Family(
    name="pi05",
    config=PI05Config,
    policy=pi05.PI05Policy,
    processors=make_pi05_pre_post_processors,
    settings=SETTINGS,
    serving={"dtype": "bfloat16"},
    sides=SIDES,
    cameras={TOP: (120, 160), WRIST: (96, 60)},
    cases=(
        Case("pick", "pick up the red cup", (-0.76, -0.51, -0.26, 0.003, 0.1, 0.3, 0.6, 0.9)),
        Case("edge", "  put_the blue_block\ninto the  bowl! ", (-1.6, -1.0, -0.999, 0.999, 1.0, 1.7, 0.004, -0.004)),
        Case("wrist_only", "fold the towel", (0.51, -0.2, 0.7, -0.9, 0.26, 0.003, -0.4, 0.15), cameras=(WRIST,)),
    ),
    scales=SCALES,
    tokenizer=oracle_tokenizer.save,
    small=partial(
        small,
        pi05,
        {"num_hidden_layers": 2, "intermediate_size": 80},
        {"gemma_2b": (64, 3, 96, 4, 1, 16), "gemma_300m": (48, 3, 80, 4, 1, 16)},
    ),
    dead=DEAD,
)

PI0 = Family(
    name="pi0",
    config=PI0Config,
    policy=pi0.PI0Policy,
    processors=make_pi0_pre_post_processors,
    settings=SETTINGS | {"tokenizer_max_length": 48},
    serving={"dtype": "bfloat16"},
    sides=SIDES,
    cameras={TOP: (90, 117), WRIST: (83, 50)},
    cases=(
        Case("pick", "pick up the red cup", (-0.76, -0.51, -0.26, 0.003, 1.1, 0.3, 1.6, 0.9)),
        Case("edge", "  put_the blue_block\ninto the  bowl!\n", (-3.6, -1.0, 0.0, 0.999, 2.4, -1.7, 0.004, -0.04)),
    ),
    scales=PI0_SCALES,
    tokenizer=oracle_tokenizer.save,
    small=partial(
        small,
        pi0,
        {"num_hidden_layers": 1, "intermediate_size": 48},
        {"gemma_2b": (64, 3, 64, 4, 1, 16), "gemma_300m": (48, 3, 64, 4, 1, 16)},
    ),
    dead=DEAD,
)
