"""Strict maps between the tensors of a checkpoint and the parameters of a module.

A map is data: pairs of name patterns. `#` stands for a layer number, `*` for `weight` or `bias`; both sides carry the
same placeholders, so the map reads in both directions. A tensor that matches nothing, a parameter that nothing fills,
two tensors for one parameter, a wrong shape or type: each is an error, unless the map declares it with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import nn

from frtc.errors import FrtcError, nearest
from frtc.models.checkpoint import Checkpoint

Names = tuple[tuple[str, str], ...]  # (pattern in the file, pattern in the module)
Shape = tuple[int, ...]
FLOATS = ("f64", "f32", "f16", "bf16")
SHOWN = 6  # rows of one error


@dataclass(frozen=True, slots=True)
class WeightMap:
    """
    names      current file names to parameter names
    prefixes   a prefix that writers put before every name, stripped where present
    renames    (older spelling, current spelling) of the beginning of a name
    tied       parameter -> second file name of the same table, read only where the first name is absent
    unused     file pattern -> why no output depends on it
    refused    file pattern -> which feature it belongs to; the model would be another one with it
    """

    names: Names
    prefixes: tuple[str, ...] = ()
    renames: Names = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def canonical(self, name: str) -> str:
        """A file's name in the current spelling, without the writer's prefix."""
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        for old, new in self.renames:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def parameter(self, canonical: str) -> str | None:
        """The parameter that a canonical file name fills."""
        for file, parameter in self.names:
            if match := _pattern(file).fullmatch(canonical):
                return _fill(parameter, match)
        return None

    def file_name(self, parameter: str) -> str:
        """The canonical file name of a parameter: the map read backwards."""
        for file, pattern in self.names:
            if match := _pattern(pattern).fullmatch(parameter):
                return _fill(file, match)
        raise KeyError(parameter)

    def resolve(self, checkpoint: Checkpoint, parameters: Mapping[str, Shape], kind: str) -> dict[str, str]:
        """Parameter -> tensor of the checkpoint, for every parameter; strict both ways."""
        found: dict[str, str] = {}
        spare: dict[str, str] = {}
        unexpected: list[str] = []
        for name in checkpoint.tensors:
            canonical = self.canonical(name)
            _refuse(self.refused, canonical, name, checkpoint)
            parameter = self.parameter(canonical)
            second = next((p for p, other in self.tied.items() if other == canonical), None)
            if parameter is not None and parameter in parameters:
                _keep(found, parameter, name)
            elif second is not None:
                _keep(spare, second, name)
            elif not any(_pattern(p).fullmatch(canonical) for p in self.unused):
                unexpected.append(name)
        found = spare | found
        self._require_complete(checkpoint, parameters, found, unexpected, kind)
        _require_types(checkpoint, parameters, found, kind)
        return {parameter: found[parameter] for parameter in parameters}

    def _require_complete(
        self,
        ckpt: Checkpoint,
        parameters: Mapping[str, Shape],
        found: Mapping[str, str],
        unexpected: list[str],
        kind: str,
    ) -> None:
        missing = [p for p in parameters if p not in found]
        tail = [("checkpoint", str(ckpt))]
        if missing:
            wanted = [(self.file_name(p), f"wants {_show(parameters[p])}") for p in missing]
            near = nearest(wanted[0][0], (self.canonical(n) for n in unexpected or ckpt.tensors)) or "none"
            what = f"{len(missing)} of {len(parameters)} tensors of {kind} are not in the checkpoint"
            raise FrtcError("weights.missing", what, [*_first(wanted), *tail, ("nearest", near)])
        if unexpected:
            rows = [(name, str(ckpt.tensors[name])) for name in unexpected]
            near = nearest(self.canonical(unexpected[0]), (self.file_name(p) for p in parameters)) or "none"
            what = f"{len(unexpected)} tensors of the checkpoint have no place in {kind}"
            hint = "frtc drops no tensor silently: the file may belong to another model or a variant of it"
            raise FrtcError("weights.unexpected", what, [*_first(rows), *tail, ("nearest", near)], hint)


def _keep(found: dict[str, str], parameter: str, name: str) -> None:
    if parameter in found:
        rows = [("first", found[parameter]), ("second", name)]
        raise FrtcError("weights.duplicate", f"two tensors of the checkpoint fill {parameter}", rows)
    found[parameter] = name


def _refuse(refused: Mapping[str, str], canonical: str, name: str, checkpoint: Checkpoint) -> None:
    for pattern, feature in refused.items():
        if _pattern(pattern).fullmatch(canonical):
            rows = [("tensor", f"{name} {checkpoint.tensors[name]}"), ("checkpoint", str(checkpoint))]
            raise FrtcError("weights.refused", f"the checkpoint uses {feature}, which frtc does not compile", rows)


def _require_types(ckpt: Checkpoint, parameters: Mapping[str, Shape], found: Mapping[str, str], kind: str) -> None:
    infos = [(ckpt.tensors[found[p]], shape) for p, shape in parameters.items()]
    tail = [("checkpoint", str(ckpt))]
    if wrong := [(i.name, f"wants {_show(s)}, is {_show(i.shape)}") for i, s in infos if i.shape != s]:
        what = f"{len(wrong)} tensors of {kind} have the wrong shape"
        raise FrtcError("weights.shape", what, [*_first(wrong), *tail])
    if wrong := [(i.name, f"is {i}") for i, _ in infos if i.dtype not in FLOATS]:
        what = f"{len(wrong)} tensors of {kind} have an element type that is not {', '.join(FLOATS)}"
        raise FrtcError("weights.dtype", what, [*_first(wrong), *tail], "pass the unquantised checkpoint")


class Shapes(dict[str, Shape]):
    """Shapes of a checkpoint by canonical name; asking for what is not there is the user's error, not a KeyError."""

    def __init__(self, names: WeightMap, checkpoint: Checkpoint) -> None:
        super().__init__((names.canonical(name), info.shape) for name, info in checkpoint.tensors.items())
        self.checkpoint = checkpoint

    def __missing__(self, name: str) -> Shape:
        rows = [("checkpoint", str(self.checkpoint)), ("nearest", nearest(name, self) or "none")]
        raise FrtcError("weights.missing", f"the checkpoint has no {name}, from which sizes are read", rows)

    def ranked(self, name: str, rank: int) -> Shape:
        """The shape of a tensor that must have `rank` axes, none of them empty."""
        shape = self[name]
        if len(shape) != rank or 0 in shape:
            what = f"{name} is {_show(shape)}, but sizes are read from a tensor of {rank} axes"
            raise FrtcError("weights.shape", what, [("checkpoint", str(self.checkpoint))])
        return shape


def shapes_of(module: nn.Module) -> dict[str, Shape]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def load(module: nn.Module, checkpoint: Checkpoint, weights: Mapping[str, str]) -> None:
    """Copies the checkpoint's tensors into the module's parameters, each rounded once to its parameter's type."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(as_torch(checkpoint.read(weights[name])))


def as_torch(array: np.ndarray) -> torch.Tensor:
    """A copy of the array; torch reads bfloat16 by its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def depth(names: Iterable[str], pattern: str) -> int:
    """Number of layers: one more than the highest `#` among the names that match."""
    regex = _pattern(pattern)
    return max((int(m.group(1)) + 1 for m in map(regex.fullmatch, names) if m), default=0)


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\#", r"(\d+)").replace(r"\*", "(weight|bias)"))


def _fill(pattern: str, match: re.Match[str]) -> str:
    groups = iter(match.groups())
    return re.sub(r"[#*]", lambda _: next(groups), pattern)


def _show(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"


def _first(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    more = len(rows) - SHOWN
    return rows[:SHOWN] + ([("…", f"and {more} more")] if more > 0 else [])
