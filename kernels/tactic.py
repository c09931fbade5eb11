"""Tactics: which kernel and config serve a site, because somebody measured it. They decide before the cost model does.

A tactic belongs to a site, described by its text alone: op, element types, shapes, strides, attributes. Those of a
target that everybody gets stand in tactics/<target>.json; `frtc compile --tune` makes them and `--tactics FILE` takes
them. One that does not fit (the kernel is gone, refuses the site, or no longer has the config) is left out, and said.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from frtc.errors import FrtcError, nearest
from frtc.kernels.spec import Config, Operand, Site

SCHEMA = "frtc.tactics/1"
TABLES = Path(__file__).resolve().parent / "tactics"
FILE_MOST, US_MOST = 16 << 20, 1e9  # bytes; microseconds
DIGITS_MOST = 18  # of a whole number; with more it is taken for infinite, and no field may be that
BOM = b"\xef\xbb\xbf"
NAME = re.compile(r"\w{1,80}", re.ASCII)  # of kernels, of what is in a config, of targets
LINE = re.compile(r"[ -~]{1,16384}")  # a site's text: expressions of fused pointwise ops are the longest
HINT = "`frtc compile CHECKPOINT --arch GPU --tune --tactics NEW` writes one"


@dataclass(frozen=True, slots=True)
class Tactic:
    """`us`: microseconds of the site's launches when it was measured."""

    site: str
    kernel: str
    config: Config
    us: float

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.config.items())])

    def to_json(self) -> dict[str, Any]:
        return {"site": self.site, "kernel": self.kernel, "config": dict(self.config), "us": round(self.us, 3)}


@dataclass(frozen=True, slots=True)
class Tactics:
    """Tactics of one target by site.

    origin   where they come from, for people: "measured now", a file's name, "table of hopper"
    gpu      the device they were measured on
    """

    target: str
    origin: str
    gpu: str = ""
    by_site: Mapping[str, Tactic] = field(default_factory=dict)

    @staticmethod
    def of(target: str, origin: str, gpu: str, tactics: Iterable[Tactic]) -> Tactics:
        return Tactics(target, origin, gpu, {tactic.site: tactic for tactic in tactics})

    def text(self) -> str:
        """The file: one tactic a line, sorted by site, so that two of them can be compared and merged."""
        lines = [json.dumps(self.by_site[site].to_json()) for site in sorted(self.by_site)]
        head = {"schema": SCHEMA, "target": self.target, "gpu": self.gpu}
        body = ",\n  ".join(lines)
        return json.dumps(head)[:-1] + ', "tactics": [' + (f"\n  {body}\n" if body else "") + "]}\n"


@dataclass(frozen=True, slots=True)
class Pick:
    """What the tactics say of a site: the place of a candidate (None: nothing that fits), by which tactic, from where;
    and (tactic, reason) for those that do not fit."""

    index: int | None = None
    tactic: Tactic | None = None
    origin: str = ""
    ignored: tuple[tuple[str, str], ...] = ()


# ---- sites as text --------------------------------------------------------------------------------------------------


def key_of(site: Site) -> str:
    """'linear(bf16[50,1024], bf16[64,1024]; act="none") -> bf16[50,64]': equal texts are equal sites."""
    operands, results = (", ".join(map(_view, group)) for group in (site.operands, site.results))
    attrs = ", ".join(f"{name}={_value(site.attrs[name])}" for name in sorted(site.attrs))
    return f"{site.op}({operands}{'; ' if attrs else ''}{attrs}) -> {results}"


def _view(operand: Operand | None) -> str:
    """Element type and shape; strides where there are gaps or another order."""
    if operand is None:
        return "-"
    packed = Operand.packed(operand.dtype, *operand.shape).strides
    strides = "" if operand.strides == packed else f"/[{','.join(map(str, operand.strides))}]"
    return f"{operand.dtype}[{','.join(map(str, operand.shape))}]{strides}"


def _value(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


# ---- the choice -----------------------------------------------------------------------------------------------------


def pick(
    sources: Sequence[Tactics],
    site: Site,
    target: str,
    found: Sequence[tuple[str, Config]],
    refused: Iterable[tuple[str, str]],
) -> Pick:
    """The candidate of `found` that the first fitting tactic names. refused: (kernel, reason) of the catalog."""
    sources = [source for source in (*sources, table_of(target)) if source.by_site]
    if not sources:
        return Pick()
    key, ignored, reasons = key_of(site), list[tuple[str, str]](), dict(refused)
    for source in sources:
        tactic = source.by_site.get(key)
        if tactic is None:
            continue
        for index, (kernel, config) in enumerate(found):
            if (kernel, _plain(config)) == (tactic.kernel, _plain(tactic.config)):
                return Pick(index, tactic, source.origin, tuple(ignored))
        ignored.append((f"{tactic} ({source.origin})", _misfit(tactic, found, reasons)))
    return Pick(ignored=tuple(ignored))


def _misfit(tactic: Tactic, found: Sequence[tuple[str, Config]], reasons: Mapping[str, str]) -> str:
    names = sorted({name for name, _ in found})
    if tactic.kernel in names:
        return f"not among the kernel's configs for the site; {reasons.get(str(tactic), 'its tiles have changed')}"
    if tactic.kernel in reasons:
        return reasons[tactic.kernel]
    return f"there is no such kernel for the op; nearest: {nearest(tactic.kernel, names) or 'none'}"


def _plain(config: Config) -> dict[str, Any]:
    """As it comes back from JSON, with numbers told from booleans."""
    return {name: (type(value).__name__, value) for name, value in json.loads(json.dumps(dict(config))).items()}


# ---- files ----------------------------------------------------------------------------------------------------------


@cache
def table_of(target: str) -> Tactics:
    """What every compilation for the target uses; empty where nobody has measured yet."""
    path = TABLES / f"{target}.json"
    return read_tactics(path, target, f"table of {target}") if path.is_file() else Tactics(target, "")


def read_tactics(path: Path, target: str, origin: str = "") -> Tactics:
    """A file of tactics for the target, checked in every field: it may come from anybody."""
    data = _json(path)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise _wrong(path, f"its schema is not {SCHEMA}")
    if data.keys() != {"schema", "target", "gpu", "tactics"} or not isinstance(data["tactics"], list):
        raise _wrong(path, "it needs exactly the fields schema, target, gpu (texts) and tactics (a list)")
    if not _is(NAME, data["target"]) or not (data["gpu"] == "" or _is(LINE, data["gpu"])):
        raise _wrong(path, "target and gpu are not names in plain ASCII")
    if data["target"] != target:
        rows = [("file", str(path)), ("measured for", data["target"]), ("target", target)]
        raise FrtcError("tactics.target", "the tactics were measured for another GPU", rows, HINT)
    return Tactics.of(target, origin or path.name, data["gpu"], _tactics(path, data["tactics"]))


def _json(path: Path) -> Any:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device may have no end
            raise _wrong(path, "it is not a regular file")
        with path.open("rb") as file:
            data = file.read(FILE_MOST + 1)
    except OSError as fault:
        raise _wrong(path, f"it cannot be read: {fault.strerror or fault}") from None
    if len(data) > FILE_MOST:
        raise _wrong(path, f"it has more than {FILE_MOST >> 20} MiB")
    if data.startswith(BOM):
        raise _wrong(path, "it starts with a byte-order mark; save it as UTF-8 without one")
    try:
        return json.loads(data.decode(), parse_int=_whole)
    except UnicodeDecodeError as fault:
        raise _wrong(path, f"it is not JSON: byte {fault.start} is not UTF-8") from None
    except json.JSONDecodeError as fault:
        raise _wrong(path, f"it is not JSON: line {fault.lineno}, column {fault.colno}: {fault.msg}") from None
    except RecursionError:
        raise _wrong(path, "it is not JSON: lists or records too deep in one another") from None


def _whole(text: str) -> float:
    return int(text) if len(text) <= DIGITS_MOST else math.inf


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _tactics(path: Path, lines: list[Any]) -> Iterator[Tactic]:
    seen: set[str] = set()
    for i, line in enumerate(lines):
        if why := _malformed(line):
            raise _wrong(path, f"tactic {i}: {why}")
        if line["site"] in seen:
            raise _wrong(path, f"tactic {i}: its site stands twice, {line['site'][:80]}")
        seen.add(line["site"])
        yield Tactic(line["site"], line["kernel"], line["config"], float(line["us"]))


def _malformed(line: Any) -> str:
    """Why this is no tactic, or ""."""
    if not isinstance(line, dict) or line.keys() != {"site", "kernel", "config", "us"}:
        return "it needs exactly the fields site, kernel, config, us"
    if not _is(LINE, line["site"]):
        return f"site {_shown(line['site'])} is not a text of 1 to 16384 printable ASCII characters"
    if not _is(NAME, line["kernel"]):
        return f"kernel {_shown(line['kernel'])} is no name: 1 to 80 letters, digits and _"
    config = line["config"]
    if not isinstance(config, dict):
        return "config is not a record of numbers, booleans and names"
    for name, value in config.items():
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if not _is(NAME, name) or not (number or _is(NAME, value)):
            return f"config has {_shown(name)}: {_shown(value)}; wanted are names with numbers, booleans or names"
    us = line["us"]
    if type(us) not in (int, float) or not 0 < us <= US_MOST:
        return "us is not a positive number"
    return ""


def _shown(value: Any) -> str:
    """Safe on a terminal, and short."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _wrong(path: Path, why: str) -> FrtcError:
    return FrtcError("tactics.file", f"{path} is no file of tactics: {why}", [("file", str(path))], HINT)
