"""Histograms of tensors as a run hands them out: counted on the device, one row for each site and round.

Imports torch: only the compile side loads this file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frtc.histogram import BINS, FINITE, Histogram


def bins_of(x: Tensor) -> Tensor:
    """i32 [n]: the bin of each magnitude; of a bf16 its own bits, of other floats those of the f32 it is."""
    flat = x.reshape(-1)
    if flat.dtype == torch.bfloat16:
        return (flat.view(torch.int16).int() & 0x7FFF) >> 3
    return (flat.float().view(torch.int32) & 0x7FFFFFFF) >> 19


class SiteCounts:
    """`rows` histograms that grow."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.counts = torch.zeros(rows, BINS, dtype=torch.int64, device=device)
        self.zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        self.absmax = torch.zeros(rows, dtype=torch.float32, device=device)

    def add(self, row: int, x: Tensor) -> None:
        """All values of x to a row's."""
        if not x.numel():
            return
        self.counts[row] += torch.bincount(bins_of(x), minlength=BINS)
        self.zeros[row] += (x == 0).sum()
        largest = x.abs().amax().float().nan_to_num(posinf=0.0)  # what is not finite is counted, not measured
        self.absmax[row] = torch.maximum(self.absmax[row], largest)

    def histograms(self) -> list[Histogram]:
        counts, zeros, absmax = (t.cpu() for t in (self.counts, self.zeros, self.absmax))
        beyond = counts[:, FINITE:].sum(1).tolist()
        finite = counts[:, :FINITE].numpy()
        return [
            Histogram(finite[i].copy(), absmax[i].item(), int(zeros[i]), int(beyond[i])) for i in range(len(finite))
        ]
