"""Wrong SmolVLAs: each must fail the comparison with lerobot's answers.

A mutant is a patch of the model's code, in force while its context lasts: it changes the eager module and whatever is
traced inside the context, so one table serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from frtc.models import flow, llama, siglip, smolvla
from frtc.models.gemma import rope_tables
from frtc.models.llama import KV, Tables
from frtc.models.smolvla_config import SmolVlaConfig

Mutant = Callable[[], AbstractContextManager[object]]
RIGHT_TIMES = SmolVlaConfig.times.fget
RIGHT_TIME = flow.embedded_time
RIGHT_SEEN = smolvla.Prefix.visible
RIGHT_VISIBLE = smolvla.Denoise.visible
RIGHT_TABLES = smolvla.Denoise.tables
RIGHT_CROSS = llama.CrossLayer.forward
RIGHT_SQUARES = siglip.squares


def cos_first(t: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    sin, cos = RIGHT_TIME(t, width, min_period, max_period).chunk(2)
    return torch.cat([cos, sin])


def no_time(t: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    return torch.zeros_like(RIGHT_TIME(t, width, min_period, max_period))


def own_keys(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Another rule for which action sees which: (row [H, 1], key [1, H]) -> bool."""

    def visible(self: smolvla.Denoise, length: Tensor, row: Tensor) -> Tensor:
        right = RIGHT_VISIBLE(self, length, row)
        own = change(row[:, None], row[None, :])
        return torch.cat([right[:, : self.config.rows], own], dim=1)

    return visible


def one_prefix_key_more(self: smolvla.Denoise, length: Tensor, row: Tensor) -> Tensor:
    return RIGHT_VISIBLE(self, length + 1, row)


def state_seen_by_all(self: smolvla.Prefix, row: Tensor, seen: Tensor) -> Tensor:
    return (row < 1 + seen)[None, :].expand(len(row), -1)


def state_sees_itself_only(self: smolvla.Prefix, row: Tensor, seen: Tensor) -> Tensor:
    return RIGHT_SEEN(self, row, seen) & ((row > 0)[:, None] | (row == 0)[None, :])


def not_restarting(self: smolvla.Denoise, length: Tensor, row: Tensor) -> tuple[Tables, Tables]:
    behind, _ = RIGHT_TABLES(self, length, row)
    return behind, behind


def always_restarting(self: smolvla.Denoise, length: Tensor, row: Tensor) -> tuple[Tables, Tables]:
    _, restarted = RIGHT_TABLES(self, length, row)
    return restarted, restarted


def rotated_again(self: llama.CrossLayer, x: Tensor, tables: Tables, visible: Tensor, source: KV) -> Tensor:
    """The keys that the prefix has rotated already are rotated once more after the projection."""
    rows = torch.arange(source[0].shape[1], dtype=torch.int32)
    again = rope_tables(rows, self.attn.head_dim)
    right = llama.Attention.forward

    def attended(attn: llama.Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return right(attn, q, llama.rotate(k, *again), v, seen)

    with mock.patch.object(llama.Attention, "forward", attended):
        return RIGHT_CROSS(self, x, tables, visible, source)


def not_projected(self: llama.CrossLayer, x: Tensor, tables: Tables, visible: Tensor, source: KV) -> Tensor:
    """The prefix's keys and values as they are."""
    attn = self.attn
    q = llama.rotate(attn.heads(attn.q(self.norm1(x))), *tables)
    return self.close(x, attn(q, *source, visible))


def unscaled(self: smolvla.Vision, images: Tensor) -> Tensor:
    """Image tokens without sqrt(width)."""
    tokens: Tensor = self.projector(self.tower(images * 2.0 - 1.0).reshape(-1, self.projector.in_features))
    return tokens


def columns_first(x: Tensor, edge: int) -> Tensor:
    """The patches of a square in column-major order."""
    return RIGHT_SQUARES(x, edge).transpose(-2, -3)


def channels_first(self: smolvla.Vision, images: Tensor) -> Tensor:
    """Channels before patches, as torch's pixel_unshuffle has them."""
    x = self.tower(images * 2.0 - 1.0)
    patches = self.projector.in_features // x.shape[-1]
    tokens: Tensor = self.projector(x.reshape(-1, patches, x.shape[-1]).transpose(1, 2).flatten(1))
    return tokens * math.sqrt(tokens.shape[1])


def gelu(self: llama.Mlp, x: Tensor) -> Tensor:
    out: Tensor = self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))
    return out


def one_step_less(self: SmolVlaConfig) -> tuple[float, ...]:
    return tuple(RIGHT_TIMES(self)[:-1])


def patch(owner: object, name: str, wrong: object) -> Mutant:
    return lambda: mock.patch.object(owner, name, wrong)


MUTANTS: dict[str, Mutant] = {
    "sin_cos_order": patch(smolvla, "embedded_time", cos_first),
    "time_half_dropped": patch(smolvla, "embedded_time", no_time),
    "causal_one_more": patch(smolvla.Denoise, "visible", own_keys(lambda row, key: key <= row + 1)),
    "causal_one_less": patch(smolvla.Denoise, "visible", own_keys(lambda row, key: (key < row) | (key == 0))),
    "not_causal": patch(smolvla.Denoise, "visible", own_keys(lambda row, key: key <= key + 0 * row)),
    "mask_one_more": patch(smolvla.Denoise, "visible", one_prefix_key_more),
    "state_seen_by_all": patch(smolvla.Prefix, "visible", state_seen_by_all),
    "state_sees_itself_only": patch(smolvla.Prefix, "visible", state_sees_itself_only),
    "cross_not_restarting": patch(smolvla.Denoise, "tables", not_restarting),
    "self_restarting": patch(smolvla.Denoise, "tables", always_restarting),
    "cross_keys_rotated_again": patch(llama.CrossLayer, "forward", rotated_again),
    "cross_not_projected": patch(llama.CrossLayer, "forward", not_projected),
    "missing_sqrt_width": patch(smolvla.Vision, "forward", unscaled),
    "shuffle_columns_first": patch(siglip, "squares", columns_first),
    "shuffle_channels_first": patch(smolvla.Vision, "forward", channels_first),
    "gelu_for_silu": patch(llama.Mlp, "forward", gelu),
    "eps": patch(llama, "EPS", 1e-6),
    "step_count": patch(SmolVlaConfig, "times", property(one_step_less)),
}
