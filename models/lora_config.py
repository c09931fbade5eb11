"""adapter_config.json of a LoRA adapter: what is read, what must be off, and which module has which rank and scale."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from frtc.errors import FrtcError
from frtc.models.checkpoint import read_json

CONFIG = "adapter_config.json"
# Fields that are read below, and those that change nothing about merged weights. Any other must be off.
READ = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern fan_in_fan_out target_modules modules_to_save "
    "exclude_modules layers_to_transform bias use_dora init_lora_weights base_model_name_or_path".split()
)
HARMLESS = frozenset(
    "auto_mapping corda_config eva_config inference_mode layers_pattern loftq_config lora_dropout lora_ga_config "
    "megatron_core peft_version qalora_group_size revision runtime_config task_type".split()
)
STARTS = (True, False, "gaussian", "eva", "orthogonal")  # these leave the base as it was; pissa, olora, … change it
ALL_LINEAR = "all-linear"
# Regular expressions come with the adapter and are tried on names that come with it, too: both are bounded, so that the
# tries of one match are.
LONGEST_PATTERN, LONGEST_NAME = 1000, 128  # characters; published models' longest name has 105
MOST_WAYS = 1 << 20  # in which a pattern may fit one name
WAYS = 64  # of one repeated character: half the longest name
OPAQUE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # an escape, a class of characters
UNKNOWN_GROUP = re.compile(r"\(\?(?![:=!]|<[=!]|P<)")  # flags, comments, conditions: they change how the rest is read
REPEATED_GROUP = re.compile(r"\)[*+{]")
REPEAT = re.compile(r"(?<!\()[*+{?]")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """targets: a regular expression, or names that end a module's; saved: ends of names of replaced modules."""

    r: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    fan_in_fan_out: bool
    targets: str | tuple[str, ...]
    saved: tuple[str, ...]
    whole: bool  # a list of targets selects every module that it names
    base: str

    def rank(self, module: str) -> int:
        return self.ranks.get(_pattern(self.ranks, module), self.r)

    def scale(self, module: str) -> float:
        alpha, rank = self.alphas.get(_pattern(self.alphas, module), self.alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def selects(self, module: str) -> bool:
        if len(module) > LONGEST_NAME:
            return False
        if isinstance(self.targets, str):
            return self.targets == ALL_LINEAR or re.fullmatch(self.targets, module) is not None
        return any(module == t or module.endswith(f".{t}") for t in self.targets)

    def lists(self, module: str) -> bool:
        """A list names the module, and nothing takes it out again."""
        return self.whole and not isinstance(self.targets, str) and self.selects(module) and not self.saves(module)

    def saves(self, module: str) -> bool:
        return any(module == s or module.endswith(f".{s}") for s in self.saved)

    def show_targets(self) -> str:
        return self.targets if isinstance(self.targets, str) else ", ".join(self.targets)


def read_config(folder: Path) -> LoraConfig:
    path = folder / CONFIG
    if not path.is_file():
        raise FrtcError("adapter.missing", f"{folder} holds no {CONFIG}", hint="copy the whole folder of the adapter")
    data = read_json(path)
    if data.get("peft_type") != "LORA":
        raise _wrong("peft_type", data.get("peft_type"), "LORA: no other kind of adapter is merged")
    _require_off(data)
    reader = _Reader(data)
    return LoraConfig(
        r=reader.count("r", data.get("r")),
        alpha=reader.number("lora_alpha", data.get("lora_alpha")),
        rslora=reader.flag("use_rslora"),
        ranks={k: reader.count("rank_pattern", v) for k, v in reader.table("rank_pattern").items()},
        alphas={k: reader.number("alpha_pattern", v) for k, v in reader.table("alpha_pattern").items()},
        fan_in_fan_out=reader.flag("fan_in_fan_out"),
        targets=reader.targets(),
        saved=reader.names("modules_to_save"),
        whole=not data.get("exclude_modules") and data.get("layers_to_transform") in (None, []),
        base=str(data.get("base_model_name_or_path") or ""),
    )


def _require_off(data: Mapping[str, Any]) -> None:
    if data.get("bias", "none") != "none":
        raise FrtcError("adapter.unsupported", "the adapter trains biases, which are not merged", _row(data, "bias"))
    if data.get("use_dora"):
        raise FrtcError("adapter.unsupported", "the adapter uses DoRA, which is not merged", _row(data, "use_dora"))
    start = data.get("init_lora_weights", True)
    if not any(start is known or (isinstance(known, str) and start == known) for known in STARTS):
        hint = "convert it: model.save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        what = f"the adapter began as {start}, which changes the base's weights, too"
        raise FrtcError("adapter.unsupported", what, _row(data, "init_lora_weights"), hint)
    for field, value in data.items():
        if field not in READ | HARMLESS and value not in (None, False, [], {}, ""):
            what = f"the adapter's configuration sets {field}, which is not merged"
            raise FrtcError("adapter.unsupported", what, _row(data, field))


class _Reader:
    """Typed access to the fields."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def count(self, field: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= 1 << 20:
            raise _wrong(field, value, "a positive integer")
        return value

    def number(self, field: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            raise _wrong(field, value, "a number, zero or more")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.data.get(field, False)
        if type(value) is not bool:
            raise _wrong(field, value, "true or false")
        return value

    def table(self, field: str) -> dict[str, Any]:
        value = self.data.get(field) or {}
        if not isinstance(value, dict):
            raise _wrong(field, value, "patterns and their values")
        for pattern in value:
            _compiled(field, rf"(.*\.)?({pattern})$")
        return value

    def names(self, field: str) -> tuple[str, ...]:
        value = self.data.get(field) or []
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise _wrong(field, value, "a list of names")
        return tuple(sorted(value))

    def targets(self) -> str | tuple[str, ...]:
        value = self.data.get("target_modules")
        if isinstance(value, str):
            _compiled("target_modules", value)
            return value
        return self.names("target_modules")


def _compiled(field: str, pattern: str) -> None:
    """A regular expression whose match ends soon, whatever the name."""
    if len(pattern) > LONGEST_PATTERN:
        raise _wrong(field, pattern, f"a regular expression of at most {LONGEST_PATTERN} characters")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as fault:
        raise _wrong(field, pattern, f"a regular expression ({fault})") from None
    plain = OPAQUE.sub(lambda found: "-" if found[0] == r"\." else "\0", pattern)
    if UNKNOWN_GROUP.search(plain) or REPEATED_GROUP.search(plain) or _ways(plain) > MOST_WAYS:
        wanted = "a regular expression without repeated groups or flags, and with few repeats: others may never end"
        raise _wrong(field, pattern, wanted)


def _ways(plain: str) -> int:
    """In how many ways it may fit one name, at most: the product over repeats and alternatives."""
    ways = math.prod(2 if sign == "?" else WAYS for sign in REPEAT.findall(plain))
    parts = ["(", *re.split(r"([()])", plain), ")"]
    for before, part, after in zip(parts[::2], parts[1::2], parts[2::2], strict=False):
        words = sorted(part.removeprefix("?:").split("|"))
        # a group of plain words of which none begins another: one of them fits
        alone = (before, after) == ("(", ")") and all(re.fullmatch(r"[\w-]+", word) for word in words)
        alone &= not any(longer.startswith(word) for word, longer in pairwise(words))
        ways *= 1 if alone else len(words)
    return ways


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that is the module's name, or ends it behind a dot; else the name."""
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), module)


def _wrong(field: str, value: Any, wanted: str) -> FrtcError:
    rows = [("wants", wanted), ("found", repr(value)[:80]), ("file", CONFIG)]
    return FrtcError("adapter.config", f"{field} of the adapter has no valid value", rows)


def _row(data: Mapping[str, Any], field: str) -> list[tuple[str, str]]:
    return [(field, repr(data[field])[:80]), ("file", CONFIG)]
