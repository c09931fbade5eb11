"""The manifest: a Program, and what the container says of its bytes, as one compact JSON text.

    {"plan_id": "…", "schema": "frtc.plan/1", "program": {…}, "refs": [{…}, …], "files": [{…}], "sha256": ["…", …]}

Records are objects with the field names of runtime/plan.py; a field that has its default is left out. Equal Refs are
written once, in `refs`, and elsewhere as an index into it. `plan_id` is the SHA-256 of the text in which plan_id itself
is 64 zeros; as the text holds the hashes of all tensors, it stands for every byte that decides actions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from frtc.errors import FrtcError
from frtc.runtime.plan import SCHEMA, Program, Ref, Repeat, Run

ZEROS = "0" * 64
ID = re.compile(r'\{"plan_id":"([0-9a-f]{64})",')


@dataclass(frozen=True, slots=True)
class File:
    """A tensor of bytes behind the weights: a cubin, or a blob such as the tokenizer."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """sha256   of each weight and then each file, in hex (docs/plan-format.md says how it is made)"""

    program: Program
    files: tuple[File, ...]
    sha256: tuple[str, ...]


class _Refused(Exception):
    """A value that is not of its field's kind. `path` grows while the exception passes the records around it."""

    def __init__(self, wants: str, found: object) -> None:
        super().__init__(wants)
        self.wants, self.found, self.path = wants, found, ""


def read_manifest(text: str) -> tuple[Manifest, str]:
    """(the manifest, its plan_id). Types and fields are checked here, numbers in runtime/validate.py."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise FrtcError("plan.damaged", f"the program entry is not JSON: {fault}") from None
    _check_schema(data)
    found = ID.match(text)
    if not found or hashlib.sha256(text.replace(found[1], ZEROS, 1).encode()).hexdigest() != found[1]:
        raise FrtcError("plan.damaged", "the program entry does not have the hash that it states")
    try:
        return _Reader().manifest(data), found[1]
    except _Refused as fault:
        rows = [("record", fault.path.lstrip(".")), ("wants", fault.wants), ("found", repr(fault.found)[:80])]
        what = f"{fault.path.lstrip('.') or 'the program entry'} has no valid value"
        raise FrtcError("plan.invalid", what, rows) from None
    except RecursionError:
        raise FrtcError("plan.invalid", "the program entry is nested too deeply") from None


def _check_schema(data: object) -> None:
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == SCHEMA:
        return
    ours, _, known = SCHEMA.partition("/")
    name, _, version = schema.partition("/") if isinstance(schema, str) else ("", "", "")
    if name == ours and version.isascii() and version.isdigit():
        what = f"this Plan is written in version {version[:9]} of the format, this frtc reads version {known}"
        raise FrtcError("plan.version", what, hint="update frtc, or compile the Plan again")
    raise FrtcError("plan.invalid", "the program entry does not say which format it is in", [("wants", SCHEMA)])


class _Reader:
    """Builds records from JSON, one small function per kind of field, without coercion."""

    def __init__(self) -> None:
        self.refs: tuple[Ref, ...] = ()
        self.made: dict[Any, Callable[[Any], Any]] = {
            int: _exactly(int), str: _exactly(str), int | float: _number, dict[str, Any]: _exactly(dict),
            Mapping[str, Any]: _mapping, Run | Repeat: self._step,
        }  # fmt: skip

    def manifest(self, data: dict[str, Any]) -> Manifest:
        _no_others(data, {"plan_id", "schema", "program", "refs", "files", "sha256"})
        parts = {"refs": tuple[Ref, ...], "program": Program, "files": tuple[File, ...], "sha256": tuple[str, ...]}
        read = {}
        for name, kind in parts.items():
            if name not in data:
                raise _Refused("a field of this name", f"no {name}")
            read[name] = _inside(name, self.of(kind), data[name])
            if name == "refs":
                self.refs, self.made[Ref] = read.pop(name), self._ref
        return Manifest(**read)

    def of(self, kind: Any) -> Callable[[Any], Any]:
        if kind not in self.made:
            self.made[kind] = self._make(kind)
        return self.made[kind]

    def _make(self, kind: Any) -> Callable[[Any], Any]:
        if dataclasses.is_dataclass(kind):
            return self._records(kind)
        if get_origin(kind) is tuple:
            return self._tuples(get_args(kind))
        assert get_origin(kind) in (Union, UnionType), f"no reader for {kind}"
        (inner,) = (k for k in get_args(kind) if k is not NoneType)
        return lambda value: None if value is None else self.of(inner)(value)

    def _records(self, kind: Any) -> Callable[[Any], Any]:
        hints = get_type_hints(kind)
        needed = {f.name for f in dataclasses.fields(kind) if f.default is MISSING and f.default_factory is MISSING}

        def read(value: Any) -> Any:
            if type(value) is not dict:
                raise _Refused(f"a record of {kind.__name__}", value)
            _no_others(value, hints.keys())
            if missing := sorted(needed - value.keys()):
                raise _Refused(f"{kind.__name__} with {', '.join(missing)}", value)
            return kind(**{name: _inside(name, self.of(hints[name]), found) for name, found in value.items()})

        return read

    def _tuples(self, kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
        repeated = kinds[-1] is Ellipsis

        def read(value: Any) -> Any:
            if type(value) is not list or not (repeated or len(value) == len(kinds)):
                raise _Refused("a list" if repeated else f"a list of {len(kinds)}", value)
            readers = [self.of(kinds[0])] * len(value) if repeated else [self.of(kind) for kind in kinds]
            return tuple(_inside(i, reader, item) for i, (reader, item) in enumerate(zip(readers, value, strict=True)))

        return read

    def _ref(self, value: Any) -> Ref:
        if type(value) is not int or not 0 <= value < len(self.refs):
            raise _Refused(f"an index below {len(self.refs)} into refs", value)
        return self.refs[value]

    def _step(self, value: Any) -> Any:
        return self.of(Run if type(value) is dict and "stage" in value else Repeat)(value)


def _inside(name: str | int, reader: Callable[[Any], Any], value: Any) -> Any:
    try:
        return reader(value)
    except _Refused as fault:
        fault.path = (f"[{name}]" if isinstance(name, int) else f".{name}") + fault.path
        raise


def _no_others(value: Mapping[str, Any], known: Any) -> None:
    if unknown := sorted(value.keys() - known):
        raise _Refused(f"only {', '.join(sorted(known))}", ", ".join(unknown))


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _Refused({int: "a whole number", str: "a text", dict: "a record"}[kind], value)
        return value

    return read


def _number(value: Any) -> Any:
    value = _free(value)
    if type(value) not in (int, float):
        raise _Refused("a number", value)
    return value


def _mapping(value: Any) -> Any:
    return {name: _inside(name, _free, item) for name, item in _exactly(dict)(value).items()}


def _free(value: Any) -> Any:
    """A value of an open mapping: lists become tuples, as the IR has them."""
    if type(value) is list:
        return tuple(_inside(i, _free, item) for i, item in enumerate(value))
    if type(value) is dict:
        if value.keys() == {"float"} and value["float"] in ("inf", "-inf", "nan"):
            return float(value["float"])
        return _mapping(value)
    return value
