"""Pi0 as a strong baseline, tuned as its sibling in pi05_torch.py is: vision, prefix and layers are the same functions.

The state token sees no action, so its keys and values are computed once; the time half of the action-time MLP is a
bias per step, and the input projection is folded into the other half.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.rivals import pi05_torch
from bench.rivals.pi05_torch import (
    ACTION,
    BF16,
    EXPERT,
    Shape,
    Weight,
    attention,
    gated,
    linear,
    prefix_keys,
    projected,
    random,
    rms_norm,
    rope_tables,
)


def plain_layer(
    x: Tensor, n1: Tensor, n2: Tensor, qkv: tuple[Weight, ...], o: Weight, gate_up: tuple[Weight, ...], down: Weight,
    cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, first: int,
) -> Tensor:  # fmt: skip
    """Rows whose keys and values go to `first` and behind it; they see everything before, and each other."""
    q, k, v = projected(rms_norm(x, n1), qkv, cos, sin)
    end = first + x.shape[0]
    keys[first:end], values[first:end] = k, v
    x = x + linear(attention(q, keys[:end], values[:end]), o)
    return x + linear(gated(rms_norm(x, n2), gate_up), down)


def state_token(state: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(state.to(BF16), w, b)


def action_tokens(x: Tensor, w: Tensor, bias: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x.to(BF16), w, bias)), w_out, b_out)


def plain_out(x: Tensor, n: Tensor, w: Tensor, b: Tensor, actions: Tensor, dt: float) -> Tensor:
    return actions + dt * F.linear(rms_norm(x, n), w, b).float()


class Pi0(pi05_torch.Pi05):
    """`run` is one inference from `images`, `state` and `noise` to `out`."""

    BEFORE = 1  # the state token

    def __init__(self, shape: Shape) -> None:
        assert shape.tuned, "there is no natural variant"
        super().__init__(shape)
        self.call |= {f.__name__: f for f in (plain_layer, state_token, action_tokens, plain_out)}

    def _expert(self) -> None:
        s = self.shape
        self.norms = [random(s, EXPERT) for _ in range(2 * s.layers + 1)]
        self.state = torch.randn(1, ACTION, device=s.device)
        self.state_in = random(s, EXPERT, ACTION, std=0.2), random(s, EXPERT)
        self.state_rope = rope_tables(s.prefix, 1, s.device)
        w_in, b_in = self.action_in
        action_half, time_half = (random(s, EXPERT, EXPERT, std=0.03) for _ in range(2))
        self.folded = action_half @ w_in
        self.biases = F.linear(self.embedded, time_half) + F.linear(b_in, action_half)  # [steps, EXPERT]
        self.mlp_out = random(s, EXPERT, EXPERT, std=0.03), random(s, EXPERT)

    def run_state(self) -> None:
        """Keys and values of the state token; of the last layer nothing else is read."""
        s, x = self.shape, self.call["state_token"](self.state, *self.state_in)
        for i, layer in enumerate(self.expert_layers[:-1]):
            x = self._layer(x, i, layer, self.state_rope, s.prefix)
        k, v = prefix_keys(x, self.norms[2 * s.layers - 2], self.expert_layers[-1][0], *self.state_rope)
        self.keys[-1][s.prefix : s.prefix + 1], self.values[-1][s.prefix : s.prefix + 1] = k, v

    def _layer(self, x: Tensor, i: int, layer: tuple[Weight, ...], angles: tuple[Tensor, Tensor], first: int) -> Tensor:
        norms = self.norms[2 * i], self.norms[2 * i + 1]
        y: Tensor = self.call["plain_layer"](x, *norms, *layer, *angles, self.keys[i], self.values[i], first)
        return y

    def denoise(self) -> None:
        s, actions = self.shape, self.noise
        for step in range(s.steps):
            x = self.call["action_tokens"](actions, self.folded, self.biases[step], *self.mlp_out)
            for i, layer in enumerate(self.expert_layers):
                x = self._layer(x, i, layer, self.suffix_rope, s.prefix + 1)
            actions = self.call["plain_out"](x, self.norms[-1], *self.action_out, actions, -1.0 / s.steps)
        self.out.copy_(actions)

    def run(self) -> None:
        self.prefix(self.vision())
        self.run_state()
        self.denoise()
