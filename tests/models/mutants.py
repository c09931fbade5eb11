"""Eight wrong Pi0.5s: each must fail the comparison with foreign data.

A mutant is a patch of the model's code, in force while its context lasts: it changes the eager module and whatever is
built or traced inside the context, so one table serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from frtc.models import gemma, pi05

RIGHT_TIMES = pi05.Pi05Config.times.fget
RIGHT_EMBED = pi05.Denoise.embed_time
RIGHT_VISIBLE = pi05.Denoise.visible
RIGHT_ADA = gemma.AdaRmsNorm.forward


def one_silu(self: pi05.Denoise, t: Tensor) -> Tensor:
    return self.time_out(F.silu(self.time_in(self.embed_time(t))))


def cos_first(self: pi05.Denoise, t: Tensor) -> Tensor:
    sin, cos = RIGHT_EMBED(self, t).chunk(2)
    return torch.cat([cos, sin])


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.to(torch.float32)[..., 0::2], x.to(torch.float32)[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(-2).to(x.dtype)


def plain_weight(self: gemma.RmsNorm, x: Tensor) -> Tensor:
    return (gemma.normalized(x) * self.weight).to(x.dtype)


def no_gate(self: gemma.AdaRmsNorm, x: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
    y, gate = RIGHT_ADA(self, x, cond)
    return y, torch.ones_like(gate)


def one_key_more(self: pi05.Denoise, length: Tensor, prefix: int, horizon: int) -> Tensor:
    return RIGHT_VISIBLE(self, length + 1, prefix, horizon)


def one_key_less(self: pi05.Denoise, length: Tensor, prefix: int, horizon: int) -> Tensor:
    return RIGHT_VISIBLE(self, length - 1, prefix, horizon)


def one_step_less(self: pi05.Pi05Config) -> tuple[float, ...]:
    return tuple(RIGHT_TIMES(self)[:-1])


MUTANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "eps": lambda: mock.patch.object(gemma, "EPS", 1e-5),
    "second_silu": lambda: mock.patch.object(pi05.Denoise, "condition", one_silu),
    "sin_cos_order": lambda: mock.patch.object(pi05.Denoise, "embed_time", cos_first),
    "rope_pairing": lambda: mock.patch.object(gemma, "rotate", neighbours),
    "missing_one": lambda: mock.patch.object(gemma.RmsNorm, "forward", plain_weight),
    "dropped_gate": lambda: mock.patch.object(gemma.AdaRmsNorm, "forward", no_gate),
    "mask_one_more": lambda: mock.patch.object(pi05.Denoise, "visible", one_key_more),
    "mask_one_less": lambda: mock.patch.object(pi05.Denoise, "visible", one_key_less),
    "step_count": lambda: mock.patch.object(pi05.Pi05Config, "times", property(one_step_less)),
}
