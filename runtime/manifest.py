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
from collections.abc import Callable, Mapping, Sequence, Set
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
            int: _exactly(int), bool: _exactly(bool), str: _exactly(str), dict[str, Any]: _exactly(dict),
            int | float: _number, Mapping[str, Any]: _mapping, Run | Repeat: self._step,
        }  # fmt: skip

    def manifest(self, data: dict[str, Any]) -> Manifest:
        parts = {"refs": tuple[Ref, ...], "program": Program, "files": tuple[File, ...], "sha256": tuple[str, ...]}
        _check_fields(data, {"plan_id", "schema", *parts}, {*parts}, "a program entry")
        read: dict[str, Any] = {}
        for name, kind in parts.items():  # refs first: elsewhere a Ref is an index into them
            read |= _each({name: self.of(kind)}, {name: data[name]})
            if name == "refs":
                self.refs, self.made = read.pop(name), {**self.made, Ref: self._ref}
                self.made[kind] = self._make(kind)
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
        inner = self.of(next(k for k in get_args(kind) if k is not NoneType))
        return lambda value: None if value is None else inner(value)

    def _records(self, kind: Any) -> Callable[[Any], Any]:
        readers = {name: self.of(hint) for name, hint in get_type_hints(kind).items()}
        needed = {f.name for f in dataclasses.fields(kind) if f.default is MISSING and f.default_factory is MISSING}

        def read(value: Any) -> Any:
            _check_fields(value, readers.keys(), needed, kind.__name__)
            return kind(**_each(readers, value))

        return read

    def _tuples(self, kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
        repeated = kinds[-1] is Ellipsis
        readers = [self.of(k) for k in kinds if k is not Ellipsis]
        wants = "a list" if repeated else f"a list of {len(readers)}"

        def read(value: Any) -> Any:
            if type(value) is not list or not (repeated or len(value) == len(readers)):
                raise _Refused(wants, value)
            return _all(readers * len(value) if repeated else readers, value)

        return read

    def _ref(self, value: Any) -> Ref:
        if type(value) is not int or not 0 <= value < len(self.refs):
            raise _Refused(f"an index below {len(self.refs)} into refs", value)
        return self.refs[value]

    def _step(self, value: Any) -> Any:
        return self.of(Run if type(value) is dict and "stage" in value else Repeat)(value)


def _each(readers: Mapping[str, Callable[[Any], Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    name, read = "", {}
    try:
        for name, value in values.items():
            read[name] = readers[name](value)
    except _Refused as fault:
        fault.path = f".{name}{fault.path}"
        raise
    return read


def _all(readers: Sequence[Callable[[Any], Any]], values: list[Any]) -> tuple[Any, ...]:
    read: list[Any] = []
    try:
        for reader, value in zip(readers, values, strict=True):
            read.append(reader(value))
    except _Refused as fault:
        fault.path = f"[{len(read)}]{fault.path}"
        raise
    return tuple(read)


def _check_fields(value: Any, known: Set[str], needed: Set[str], kind: str) -> None:
    if type(value) is not dict:
        raise _Refused(f"a record: {kind}", value)
    if not needed <= value.keys() <= known:
        raise _Refused(f"{kind} with {', '.join(sorted(known))}", ", ".join(sorted(value)))


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            wants = {int: "a whole number", bool: "true or false", str: "a text", dict: "a record"}
            raise _Refused(wants[kind], value)
        return value

    return read


def _number(value: Any) -> Any:
    value = _free(value)
    if type(value) not in (int, float):
        raise _Refused("a number", value)
    return value


def _mapping(value: Any) -> Any:
    return {name: _free(item) for name, item in _exactly(dict)(value).items()}


def _free(value: Any) -> Any:
    """A value of an open mapping: lists become tuples, as the IR has them."""
    if type(value) is list:
        return tuple(map(_free, value))
    if type(value) is dict:
        if value.keys() == {"float"} and value["float"] in ("inf", "-inf", "nan"):
            return float(value["float"])
        return _mapping(value)
    return value
