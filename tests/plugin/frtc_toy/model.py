"""Toy: the mean colour of the pictures and the sum of the words, one step from the noise to the actions."""

from dataclasses import replace

import torch
from torch import nn

from frtc.models.policies import PI05
from frtc.models.stages import Model, Run, Schedule, Stage
from frtc.models.weights import WeightMap, shapes_of

NAMES = WeightMap(tuple((f"toy.{part}.*", f"{part}.*") for part in ("embed", "colour", "out")))
INPUTS = ("images", "tokens", "n", "noise")


class Toy(nn.Module):
    def __init__(self, c, dtype=torch.float32):
        super().__init__()
        self.embed, self.colour = nn.Embedding(1024, c["width"]), nn.Linear(3, c["width"])
        self.out = nn.Linear(c["width"], 32)

    def forward(self, images, tokens, n, noise):
        seen = self.colour(images.to(torch.float32).mean((0, 1, 2)) / 255)
        words = self.embed(tokens) * (torch.arange(len(tokens), device=n.device) < n)[:, None]
        return noise + self.out(seen + words.sum(0))


def stages(c, dtype, velocity):
    with torch.device("meta"):
        shapes = (
            ((c["views"], 64, 64, 3), torch.uint8),
            ((32,), torch.int32),
            ((), torch.int32),
            ((8, 32), torch.float32),
        )
        args = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)
        return {"act": Stage("act", Toy(c).eval(), "", args, INPUTS, ("x",))}


FAMILY = replace(PI05, name="toy", state_in_prompt=False)
MODEL = Model(
    "toy", "Toy", lambda names: "toy.out.weight" in names,
    lambda ck, choices: ({"views": choices["views"], "width": ck.tensors["toy.out.weight"].shape[1]}, ()),
    dict, Toy, stages, lambda c: Schedule(INPUTS, (Run("act"),), {"actions": "x"}),
    lambda checkpoint, c: NAMES.resolve(checkpoint, shapes_of(Toy(c)), "toy"),
)  # fmt: skip
