"""Wrong models, by kind: each must fail the comparison with foreign data.

A mutant is a patch of the model's code, in force while its context lasts: it changes the eager module and whatever is
built or traced inside the context, so one table serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from frtc.models import gemma, pi, pi0, pi05

Mutant = Callable[[], AbstractContextManager[object]]
RIGHT_TIMES = pi.PiConfig.times.fget
RIGHT_EMBED = pi.Denoise.embed_time
RIGHT_VISIBLE = pi.Denoise.visible
RIGHT_ADA = gemma.AdaRmsNorm.forward
RIGHT_EXPERT = pi0.Denoise.expert


def one_silu(self: pi05.Denoise, t: Tensor) -> Tensor:
    return self.time_out(F.silu(self.time_in(self.embed_time(t))))


def cos_first(self: pi.Denoise, t: Tensor) -> Tensor:
    sin, cos = RIGHT_EMBED(self, t).chunk(2)
    return torch.cat([cos, sin])


def no_time(self: pi.Denoise, t: Tensor) -> Tensor:
    return torch.zeros_like(RIGHT_EMBED(self, t))


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.to(torch.float32)[..., 0::2], x.to(torch.float32)[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(-2).to(x.dtype)


def plain_weight(self: gemma.RmsNorm, x: Tensor) -> Tensor:
    return (gemma.normalized(x) * self.weight).to(x.dtype)


def no_gate(self: gemma.AdaRmsNorm, x: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
    y, gate = RIGHT_ADA(self, x, cond)
    return y, torch.ones_like(gate)


def one_key_more(self: pi.Denoise, length: Tensor, prefix: int, suffix: int) -> Tensor:
    return RIGHT_VISIBLE(self, length + 1, prefix, suffix)


def one_key_less(self: pi.Denoise, length: Tensor, prefix: int, suffix: int) -> Tensor:
    return RIGHT_VISIBLE(self, length - 1, prefix, suffix)


def one_step_less(self: pi.PiConfig) -> tuple[float, ...]:
    return tuple(RIGHT_TIMES(self)[:-1])


def state_unseen(self: pi.Denoise, length: Tensor, prefix: int, suffix: int) -> Tensor:
    """Only the state's own row sees the state."""
    return RIGHT_VISIBLE(self, length, prefix + (suffix > 1), suffix - (suffix > 1))


def state_later(self: pi0.Denoise, tokens: Tensor, position: Tensor, visible: Tensor, kv: gemma.KV) -> Any:
    """The state stands where the first action does."""
    return RIGHT_EXPERT(self, tokens, position + (len(tokens) == 1), visible, kv)


def patch(owner: object, name: str, wrong: object) -> Mutant:
    return lambda: mock.patch.object(owner, name, wrong)


SHARED = {
    "eps": patch(gemma, "EPS", 1e-5),
    "sin_cos_order": patch(pi.Denoise, "embed_time", cos_first),
    "rope_pairing": patch(gemma, "rotate", neighbours),
    "missing_one": patch(gemma.RmsNorm, "forward", plain_weight),
    "mask_one_more": patch(pi.Denoise, "visible", one_key_more),
    "mask_one_less": patch(pi.Denoise, "visible", one_key_less),
    "step_count": patch(pi.PiConfig, "times", property(one_step_less)),
}
MUTANTS: dict[str, dict[str, Mutant]] = {
    "pi05": {
        **SHARED,
        "second_silu": patch(pi05.Denoise, "condition", one_silu),
        "dropped_gate": patch(gemma.AdaRmsNorm, "forward", no_gate),
    },
    "pi0": {
        **SHARED,
        "time_dropped": patch(pi.Denoise, "embed_time", no_time),
        "state_unseen": patch(pi.Denoise, "visible", state_unseen),
        "state_position": patch(pi0.Denoise, "expert", state_later),
    },
}
