"""Small foreign models, unmodified, with random weights; and our own Pi0.5 stages. What the lowering tests trace.

`python -m tests.lowering.tiny` writes their raw IR to tests/lowering/data, which tests without torch read. Run with
transformers 5.5 it writes what that version's spelling of the same models becomes.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    GemmaConfig,
    GemmaModel,
    Qwen3Config,
    Qwen3Model,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from frtc.lowering.from_torch import lower
from frtc.lowering.ir import Graph
from frtc.lowering.text import show
from frtc.models import pi05
from frtc.models.pi import PiConfig
from tests.lowering.tiny_data import DATA, OTHER

LAYERS = 2
TOKENS = 12


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A module on the CPU with real weights, what it is called with, and names for that and for what it returns.

    padding    so many entries of axis 1 of the results belong to padding tokens, which see no key: garbage, never read
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    padding: int = 0

    def graph(self) -> Graph:
        return lower(self.module, self.args, self.inputs, self.outputs, self.name)

    def eager(self) -> dict[str, np.ndarray]:
        """What the module itself returns, as float32 (integers as they are)."""
        with torch.no_grad():
            leaves = torch.utils._pytree.tree_leaves(self.module(*self.args))
        return {k: array(v) for k, v in zip(self.outputs, leaves, strict=True)}

    def feeds(self) -> dict[str, np.ndarray]:
        leaves = torch.utils._pytree.tree_leaves(self.args)
        return {k: array(v) for k, v in zip(self.inputs, leaves, strict=True)}

    def weights(self, name: str) -> np.ndarray:
        return array(self.module.get_parameter(name))


def array(x: Tensor) -> np.ndarray:
    x = x.detach()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy()


def _randomized(module: nn.Module, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Fan-in scaled matrices, vectors around what they start as: a norm's weight must not be all ones or zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise / p[0].numel() ** 0.5 if p.dim() > 1 else p + 0.2 * noise)
    return module.to(dtype).eval()


def _ids(vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def gemma(attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Tiny:
    """Token ids alone: positions, the causal mask and the search for packed sequences are made inside."""
    config = GemmaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        attn_implementation=attention,
        use_cache=False,
    )
    module = _randomized(GemmaModel(config), dtype)
    return Tiny(f"gemma_{attention}", module, (_ids(128),), ("ids",), ("hidden",))


def qwen3(attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Tiny:
    """Token ids and a padding mask (the first three tokens are padding)."""
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation=attention,
        use_cache=False,
    )
    module = _randomized(Qwen3Model(config), dtype)
    valid = torch.ones(1, TOKENS, dtype=torch.long)
    valid[:, :3] = 0
    return Tiny(f"qwen3_{attention}", module, (_ids(128), valid), ("ids", "valid"), ("hidden",), padding=3)


def siglip(attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Tiny:
    """Pixels through the tower and its pooling head (an nn.MultiheadAttention)."""
    config = SiglipVisionConfig(
        hidden_size=144,
        intermediate_size=272,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        attn_implementation=attention,
    )
    module = _randomized(SiglipVisionModel(config), dtype)
    pixels = torch.rand(2, 3, 56, 56, generator=torch.Generator().manual_seed(2)).to(dtype) * 2 - 1
    return Tiny(f"siglip_{attention}", module, (pixels,), ("pixels",), ("hidden", "pooled"))


def _pi05_args(stage: str, c: PiConfig, dtype: torch.dtype) -> tuple[Any, ...]:
    """Inputs in the ranges that the stage gets them: prompts of 40 valid tokens, noise, time 0.7."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    n, shape = torch.tensor(40, dtype=torch.int32), (c.prefix.kv_heads, c.image_tokens + c.prompt, c.prefix.head_dim)
    if stage == "vision":
        return (torch.randint(0, 256, (c.views, 224, 224, 3), generator=generator, dtype=torch.uint8),)
    if stage == "prefix":
        ids = torch.randint(0, c.vocab, (c.prompt,), generator=generator, dtype=torch.int32)
        return normal(c.image_tokens, c.prefix.width), ids, n
    kv = [(normal(*shape), normal(*shape)) for _ in range(c.prefix.layers)]
    return normal(c.horizon, c.action_width).float(), torch.tensor(0.7), n, kv


def pi05_stage(stage: str, dtype: torch.dtype = torch.float32) -> Tiny:
    c = dataclasses.replace(pi05.tiny(), prompt=48)
    record = pi05.stages(c, dtype, velocity=True)[stage]
    whole = pi05.Pi05(c, dtype)
    module = getattr(whole, stage).eval()
    kept = {name: p.dtype for name, p in module.named_parameters()}
    _randomized(module, torch.float32)
    for name, p in module.named_parameters():
        p.data = p.data.to(kept[name])
    if stage == "denoise":
        module.returns_velocity = True
    return Tiny(f"pi05_{stage}", module, _pi05_args(stage, c, dtype), record.inputs, record.outputs)


MAKERS: dict[str, Callable[[], Tiny]] = {
    **{f"gemma_{a}": lambda a=a: gemma(a) for a in ("sdpa", "eager")},
    **{f"qwen3_{a}": lambda a=a: qwen3(a) for a in ("sdpa", "eager")},
    **{f"siglip_{a}": lambda a=a: siglip(a) for a in ("sdpa", "eager")},
    "gemma_bf16": lambda: gemma(dtype=torch.bfloat16),
    "qwen3_bf16": lambda: qwen3(dtype=torch.bfloat16),
    **{f"pi05_{s}": lambda s=s: pi05_stage(s, torch.bfloat16) for s in ("vision", "prefix", "denoise")},
}


def write_data() -> None:
    """Into the folder of the installed transformers; Pi0.5 does not depend on it."""
    other = transformers.__version__.startswith("5.5.")
    folder = OTHER if other else DATA
    folder.mkdir(exist_ok=True)
    for name, make in MAKERS.items():
        if not (other and name.startswith("pi05")):
            (folder / f"{name}.ir").write_text(show(make().graph()))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    write_data()
