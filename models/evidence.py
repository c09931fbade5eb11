"""What a checkpoint's side files prove, what the user chose, and what was assumed: each value with its source."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frtc.errors import FrtcError, UsageError
from frtc.models.checkpoint import Checkpoint

# Upper bounds of counts that no tensor confirms; of prompt and horizon those of a Plan's policy
MOST = {"prompt": 4096, "horizon": 4096, "steps": 1000, "views": 64}


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing about a checkpoint and how we know it.

    source     "tensors", "config.json: action_horizon", "option", or the published default that was taken
    assumed    it changes motion, and no file and no option says so: the family's published default was taken
    """

    name: str
    value: Any
    source: str
    assumed: bool = False


class Evidence:
    """Collects facts in the order in which they are asked for. An option wins over a file, a file over a default."""

    def __init__(self, checkpoint: Checkpoint, choices: Mapping[str, Any]) -> None:
        self.checkpoint, self.choices = checkpoint, choices
        self.facts: list[Fact] = []

    def add(self, name: str, value: Any, source: str, assumed: bool = False) -> Any:
        self.facts.append(Fact(name, value, source, assumed))
        return value

    def count(self, name: str, field: str, default: int, assumed: bool) -> int:
        """An integer in 1..MOST[name]: option `name`, else `field` of config.json, else the default."""
        value, most = self.choices.get(name), MOST[name]
        if value is not None:
            if type(value) is not int or not 1 <= value <= most:
                raise UsageError("option.value", f"{name} must be an integer from 1 to {most}, not {value!r}")
            self.add(name, value, "option")
            return value
        if field in self.checkpoint.config:
            value = self.checkpoint.config[field]
            if type(value) is not int or not 1 <= value <= most:
                raise self.contradiction(field, f"an integer from 1 to {most}")
            self.add(name, value, f"config.json: {field}")
            return value
        self.add(name, default, "published default", assumed)
        return default

    def number(self, name: str, field: str, default: float) -> float:
        """A positive number that only config.json can change. min_period, asked for first, is below max_period."""
        value = self.checkpoint.config.get(field, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.contradiction(field, "a positive number")
        least = next((fact.value for fact in self.facts if fact.name == "min_period"), 0.0)
        if name == "max_period" and least >= value:
            if field in self.checkpoint.config:
                raise self.contradiction(field, f"more than min_period, {least:g}")
            raise self.contradiction("min_period", f"less than max_period, {value:g}")
        self.add(
            name, float(value), f"config.json: {field}" if field in self.checkpoint.config else "published default"
        )
        return float(value)

    def origin(self, kind: str) -> str:
        """Who wrote the files, "openpi" or "lerobot"; an option may name the version too ("lerobot-0.4")."""
        self.agree("type", kind, "tensor names")  # whatever an option says of who wrote it
        if self.choices.get("origin") is not None:
            return str(self.add("origin", self.choices["origin"], "option"))
        if "type" in self.checkpoint.config:
            return str(self.add("origin", "lerobot", "config.json: type"))
        if any(name.startswith("model.") for name in self.checkpoint.tensors):
            return str(self.add("origin", "lerobot", "tensor names begin with model."))
        return str(self.add("origin", "openpi", "tensor names and config.json without type"))

    def views(self, default: int) -> int:
        """Cameras among lerobot's input features; its empty cameras are masked, so they are no views."""
        features = self.checkpoint.config.get("input_features")
        if self.choices.get("views") is not None or features is None:
            return self.count("views", "", default, assumed=True)
        entries = features.items() if isinstance(features, dict) else ()
        visual = [name for name, f in entries if isinstance(f, dict) and f.get("type") == "VISUAL"]
        cameras = [name for name in visual if ".empty_camera_" not in name]
        if not cameras:
            raise self.contradiction("input_features", "at least one camera (type VISUAL)")
        return int(self.add("views", len(cameras), "config.json: input_features"))

    def agree(self, field: str, wanted: Any, why: str) -> None:
        """Where config.json has the field, it says what we know from elsewhere."""
        if field in self.checkpoint.config and self.checkpoint.config[field] != wanted:
            raise self.contradiction(field, f"{wanted!r} ({why})")

    def contradiction(self, field: str, wanted: str) -> FrtcError:
        rows = [
            ("wants", wanted),
            ("found", repr(self.checkpoint.config[field])),
            ("file", str(self.checkpoint.folder / "config.json")),
        ]
        hint = "config.json belongs to another checkpoint, or was edited"
        return FrtcError("checkpoint.config", f"{field} in config.json contradicts the checkpoint", rows, hint)
