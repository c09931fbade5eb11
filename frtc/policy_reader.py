"""One reading of a checkpoint's side files: what is asked of them, and the facts and assumptions that come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frtc.errors import FrtcError, UsageError, nearest
from frtc.lerobot_files import PRE
from frtc.models.evidence import Fact
from frtc.models.policies import PolicyFamily
from frtc.models.robots import ROBOTS, Robot
from frtc.policy_options import PolicyOptions, action_mask, mask_text
from frtc.runtime.policy import Assumption
from frtc.statistics import Statistics

ORIGINS = ("openpi", "lerobot-0.4", "lerobot-0.6")


@dataclass(slots=True)
class Reader:
    """Options and config.json at hand, facts collected on the way."""

    folder: Path
    family: PolicyFamily
    options: PolicyOptions
    config: dict[str, Any]
    facts: list[Fact] = field(default_factory=list)
    assumed: list[Assumption] = field(default_factory=list)

    def fact(self, name: str, value: Any, source: str) -> Any:
        self.facts.append(Fact(name, value, source))
        return value

    def assume(self, name: str, value: Any, why: str, option: str) -> Any:
        self.facts.append(Fact(name, value, why, assumed=True))
        self.assumed.append(Assumption(name, value if isinstance(value, str) else repr(value), why, option))
        return value

    def origin(self) -> str:
        """openpi or lerobot is proved by the side files; lerobot's version only by a field that came with 0.5.1."""
        wanted, family = self.options.origin, self.family
        choices = [origin for origin in ORIGINS if origin in family.pixels]
        if wanted is not None and wanted not in choices:
            raise UsageError("policy.origin", f"unknown origin {wanted}", [("choices", ", ".join(choices))])
        lerobot = (self.folder / PRE).is_file() or "type" in self.config
        proof = PRE if (self.folder / PRE).is_file() else "config.json: type" if lerobot else f"no {PRE}"
        if wanted is not None:
            if wanted.startswith("lerobot") != lerobot:
                found = "lerobot" if lerobot else "openpi"
                what = f"--origin {wanted}, but the files are {found}'s"
                raise UsageError("policy.origin", what, [("because", proof)])
            return str(self.fact("origin", wanted, "option"))
        if not lerobot:
            if "openpi" not in family.pixels:
                hint = "copy config.json and the processors' files next to the weights"
                raise UsageError(
                    "policy.origin", f"{family.name} is lerobot's, its files are not", [("is", proof)], hint
                )
            return str(self.fact("origin", "openpi", proof))
        if "use_relative_actions" in self.config:
            return str(self.fact("origin", "lerobot-0.6", "config.json: use_relative_actions"))
        if family.pixels["lerobot-0.4"] == family.pixels["lerobot-0.6"]:
            return str(self.fact("origin", "lerobot-0.6", f"{proof}; {family.name} is the same since 0.4"))
        also = " and the prompt" if family.with_state else ""
        why = f"config.json has no field newer than lerobot 0.5.0; borders of pictures{also} differ since 0.5"
        return str(self.assume("origin", "lerobot-0.4", why, "--origin lerobot-0.4 or lerobot-0.6"))

    def robot(self) -> Robot | None:
        """The declared robot. Only openpi leaves to it what the pipelines of lerobot say."""
        name, origin = self.options.robot, next(f.value for f in self.facts if f.name == "origin")
        if name is None:
            return None
        if name not in ROBOTS:
            rows = [("choices", ", ".join(ROBOTS))] + ([("nearest", near)] if (near := nearest(name, ROBOTS)) else [])
            raise UsageError("policy.robot", f"there is no robot {name}", rows)
        if origin != "openpi":
            what = f"--robot {name} is openpi's declaration, but the files are lerobot's"
            raise UsageError("policy.robot", what, hint="lerobot's pipelines say how actions are made")
        robot = ROBOTS[name]
        if self.family.name not in robot.relative:
            what = f"openpi does not declare {name} for {self.family.name}"
            raise UsageError("policy.robot", what, [("declared", ", ".join(robot.relative))])
        self.fact("robot", name, "option")
        for what, steps in (("state_steps", robot.state_steps), ("action_steps", robot.action_steps)):
            if steps:
                self.fact(what, [type(step).__name__.lower() for step in steps], f"robot {name}")
        return robot

    def cut(self, stats: Statistics, said: int | None, robot: Robot | None) -> Statistics:
        """Statistics of the real dimensions. openpi pads some files to the model's width with zeros."""
        name = f"{stats.feature.rstrip('s')}_dim"
        declared = None if robot is None else robot.state if stats.feature == "state" else robot.actions
        if robot and declared is not None:
            if said not in (None, declared):
                what = f"{name} {said}, but {robot.name} has {declared}"
                raise UsageError("policy.dims", what, [("robot", robot.name)])
            if declared > stats.dim:
                what = f"{robot.name} has {declared} numbers in {stats.feature}, the statistics {stats.dim}"
                hint = "they are another robot's: --asset chooses, --robot declares"
                raise UsageError("policy.robot", what, [("file", stats.where)], hint)
            return stats.cut(self.fact(name, declared, f"robot {robot.name}"))
        if said is not None:
            if not 1 <= said <= stats.dim:
                rows = [("file", stats.where)]
                raise UsageError("policy.dims", f"{name} {said}, but the statistics have {stats.dim} dimensions", rows)
            return stats.cut(self.fact(name, said, "option"))
        if 0 < stats.real < stats.dim:
            why = f"the last {stats.dim - stats.real} of {stats.dim} statistics are all zero: taken for padding"
            return stats.cut(self.assume(name, stats.real, why, f"--{name.replace('_', '-')} N"))
        return stats.cut(self.fact(name, stats.dim, stats.where) or stats.dim)

    def mask(self, proved: tuple[bool, ...] | None, source: str, state_dim: int, action_dim: int) -> tuple[bool, ...]:
        """Which actions are relative to the state. proved: by files; None where no file says."""
        option = self.options.actions
        if option is not None:
            mask = action_mask(option, min(action_dim, state_dim))
            self.fact("actions", option, "option")
        elif proved is None:
            mask = ()
            self.assume("actions", "absolute", source, "--robot NAME, or --actions absolute, or delta[:MASK]")
        else:
            mask = proved
            self.fact("actions", mask_text(mask), source)
        if len(mask) > min(action_dim, state_dim):
            what = f"{len(mask)} actions are relative to a state of {state_dim} numbers, of {action_dim} actions in all"
            raise UsageError("policy.actions", what, hint="--actions delta:MASK names the relative dimensions")
        return mask

    def state_in_prompt(self) -> bool | None:
        """What the option says. A family that takes the state as numbers never writes it."""
        said = self.options.state_in_prompt
        if self.family.state_input and said:
            what = f"{self.family.name} takes the state as numbers, it is not in the prompt"
            raise UsageError("policy.prompt", what, hint="leave --state-in-prompt out")
        return said

    def resolution(self) -> int | None:
        """Side of the square pictures, where config.json names it."""
        name = self.family.resolution
        if name not in self.config:
            return None
        size = self.config[name]
        if size is None:
            what = f"config.json: {name} is null: pictures of any size would reach the model"
            raise FrtcError("policy.unsupported", what)
        if not isinstance(size, list) or len(size) != 2 or size[0] != size[1] or type(size[0]) is not int:
            raise FrtcError("policy.features", f"config.json: {name} {size!r} is not a square")
        return size[0]

    def count(self, name: str, default: int) -> int:
        value = self.config.get(name, default)
        if type(value) is not int or value < 1:
            raise FrtcError("policy.features", f"config.json: {name} is {value!r}, not a positive number")
        return value
