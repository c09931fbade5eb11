"""Flow matching: one Euler step of a noisy chunk of actions, and how it learns the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def iota(count: int, like: Tensor) -> Tensor:
    """0, 1, … count - 1: i32 on the device of `like`."""
    return torch.arange(count, dtype=torch.int32, device=like.device)


def embedded_time(t: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """[sin(a), cos(a)], a = 2 pi t / period, periods in geometric progression; in float64, rounded to f32 [width]."""
    fraction = torch.arange(width // 2, dtype=torch.float64, device=t.device) / (width // 2 - 1)
    period = min_period * (max_period / min_period) ** fraction
    angle = t.to(torch.float64) * (2.0 * math.pi / period)
    return torch.cat([torch.sin(angle), torch.cos(angle)]).to(torch.float32)


def times(steps: int) -> tuple[float, ...]:
    """Time of each step as float32, from 1 (noise) towards 0 (data): 1 - k / steps, as lerobot rounds it."""
    return tuple(float(np.float32(1.0 + k * (-1.0 / steps))) for k in range(steps))


class EulerStep(nn.Module):
    """x_t one step later; a model says what the velocity is at time t, given its context."""

    velocity: Callable[..., Tensor]  # (x_t f32 [H, A], t f32 [], context) -> f32 [H, A]

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.dt = -1.0 / steps
        self.returns_velocity = True

    def forward(self, x_t: Tensor, t: Tensor, *context: Any) -> Tensor | tuple[Tensor, Tensor]:
        """x_t f32 [H, A], t f32 [] -> x_t one step later (and the velocity, f32 [H, A])"""
        v_t = self.velocity(x_t, t, *context)
        x_next = x_t + self.dt * v_t
        return (x_next, v_t) if self.returns_velocity else x_next
