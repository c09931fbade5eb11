"""What a product loses to e4m3 behind its norm, and where it makes up for the norm: passes/defer_norms.py.

Both on some rows and columns of what a calibration sees, with the scales that absmax would give at that moment:

    behind   || q(y) W^T - y W^T ||^2 / || y W^T ||^2            q(v): what e4m3 holds of v
    before   || r (q(z) W'^T - z W'^T) ||^2 / || y W^T ||^2      y = r z + t, W' as the pass makes it

summed over rows, each of which counts alike: a norm makes rows alike, and without it quiet ones may be lost. Columns
count alike, too: the rows of W are divided by their length. Where W' is W, neither is rounded; with a layer_norm q(W)
and q(W') multiply, each row with a scale.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from frtc.histogram import LARGEST
from frtc.lowering.ir import Node
from frtc.passes.norm_readers import Unnormed

ROWS, COLUMNS = 64, 512  # of a value and of a product, evenly spread
LOST = 1e30  # what is not finite


def before_norm(found: Unnormed, values: Mapping[Node, Tensor]) -> Tensor:
    """z: what the product reads where it makes up for the norm."""
    s = values[found.s].float()
    return s if found.w is None else s * (found.offset + values[found.w].float())


def noise_of(
    norm: Node, seen: Sequence[Tensor], values: Mapping[Node, Tensor], weights: Sequence[Tensor], scales: Tensor
) -> Tensor:
    """f64 [2]: (behind, before) of a product by weights [N, K]. seen: y = norm(s), s and z; scales [2] of y and z."""
    y, s, z = (_some(x, ROWS).float() for x in seen)
    if not len(y):
        return torch.zeros(2, dtype=torch.float64, device=y.device)
    w = torch.cat([_some(part, COLUMNS).float() for part in weights])
    w = w / w.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    out = y @ w.t()
    size = out.square().sum(-1).clamp_min(1e-30)
    if norm.op == "layer_norm":
        centre, other = s.var(-1, keepdim=True, correction=0), _centred(w, norm.args[1], values)
        stored, others = _held(w, _of_rows(w)), _held(other, _of_rows(other))
    else:
        centre, other = s.square().mean(-1, keepdim=True), w
        stored = others = w
    behind = _held(y, scales[0]) @ stored.t() - out
    before = (_held(z, scales[1]) @ others.t() - z @ other.t()) * torch.rsqrt(centre + float(norm["eps"]))
    sums = [(gap.square().sum(-1) / size).double().sum() for gap in (behind, before)]
    return torch.stack(sums).nan_to_num(nan=LOST, posinf=LOST)


def _centred(w: Tensor, scale: Node | None, values: Mapping[Node, Tensor]) -> Tensor:
    scaled = w if scale is None else w * values[scale].float()
    return scaled - scaled.mean(-1, keepdim=True)


def _of_rows(w: Tensor) -> Tensor:
    return w.abs().amax(-1, keepdim=True) / LARGEST


def _some(x: Tensor, count: int) -> Tensor:
    """That many rows, or all."""
    rows = x.reshape(-1, x.shape[-1])
    at = torch.linspace(0, len(rows) - 1, min(len(rows), count), device=x.device).long()
    return rows[at]


def _held(x: Tensor, scale: Tensor) -> Tensor:
    scale = scale.clamp_min(1e-30)
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
