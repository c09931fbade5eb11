"""A tiny Hugging Face Gemma that keeps its static KV cache in buffers, so that torch.export sees it change.

The language model is unmodified; the wrapper hands its buffers to the cache's layers, picks the likeliest token, and
notes it. Two programs, prefill and decode, differ only in how many tokens they take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM, StaticCache

CONFIG = GemmaConfig(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=12,
)
CAPACITY = 32  # tokens the cache holds
PROMPT = 7
STEPS = 16


class Generator(nn.Module):
    """ids i64 [1, S] -> the next token i64 [1, 1] and the logits f32 [1, 96] it was picked from"""

    def __init__(self, model: GemmaForCausalLM) -> None:
        super().__init__()
        self.model = model
        for i in range(CONFIG.num_hidden_layers):
            for kind in ("keys", "values"):
                self.register_buffer(f"{kind}_{i}", torch.zeros(1, 1, CAPACITY, CONFIG.head_dim))
            self.register_buffer(f"length_{i}", torch.tensor(0))
        self.register_buffer("said", torch.zeros(1, STEPS + 1, dtype=torch.int64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        cache = StaticCache(config=CONFIG, max_cache_len=CAPACITY)
        for i, layer in enumerate(cache.layers):
            layer.keys, layer.values = getattr(self, f"keys_{i}"), getattr(self, f"values_{i}")
            layer.cumulative_length, layer.is_initialized = getattr(self, f"length_{i}"), True
            layer.device = ids.device
        logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
        token = logits.argmax(-1, keepdim=True)
        self.said.index_copy_(1, self.count, token)
        self.count.add_(1)
        return token, logits


@dataclass(frozen=True)
class Program:
    """What lowering asks of a program to trace."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("token", "logits")
    scope: str = ""


def language_model() -> GemmaForCausalLM:
    torch.manual_seed(0)
    model = GemmaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        for p in model.parameters():  # larger than the usual 0.02: the likeliest tokens must differ clearly and vary
            p.copy_(torch.randn_like(p) * (0.35 if p.dim() > 1 else 0.2))
    return model


def prompt() -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(5))


def programs(module: Generator) -> list[Program]:
    """Prefill reads `prompt`; decode reads the token that the run before it wrote."""
    module.eval()
    one = torch.zeros(1, 1, dtype=torch.int64)
    return [Program("prefill", module, (prompt(),), ("prompt",)), Program("decode", module, (one,), ("token",))]
