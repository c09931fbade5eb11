"""Typed records from JSON and back: exactly the declared fields, no coercion. A policy in a Plan is read by this.

A field that a later frtc added to a record of this schema is marked (`later`). It has a default that means what
policies without it meant, and is left out of the JSON where it has that value: those policies keep their bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from frtc.errors import FrtcError

SCHEMA = "frtc.policy/1"
MOST = 4096  # upper bound of every size and list, so that a forged policy cannot ask for memory


def later(default: Any) -> Any:
    """A record's field that is younger than the schema."""
    return dataclasses.field(default=default, metadata={"later": True})


def write(record: Any) -> dict[str, Any]:
    """The record as JSON holds it."""
    made = dataclasses.asdict(record)
    return {name: value for name, value in made.items() if value != _young(type(record)).get(name, ...)}


def _young(kind: Any) -> dict[str, Any]:
    """The record's later fields with their defaults."""
    return {f.name: f.default for f in dataclasses.fields(kind) if f.metadata.get("later")}


def read(kind: Any, value: Any, where: str) -> Any:
    """`value` (from JSON) as `kind`: a record, tuple, Literal, int, float, bool or str, without coercion."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise bad(where, "a record", value)
        hints, value = get_type_hints(kind), {**_young(kind), **value}
        no_others(value, tuple(hints), where)
        return kind(**{name: read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)) or len(value) > MOST:
            raise bad(where, f"a list of at most {MOST} items", value)
        return tuple(read(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise bad(where, " or ".join(get_args(kind)), value)
        return value
    if kind is float and type(value) in (int, float) and abs(value) <= 1e300:  # neither NaN nor infinity
        return float(value)
    if kind is float or type(value) is not kind:
        raise bad(where, "a finite number" if kind is float else kind.__name__, value)
    return value


def no_others(found: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    """Exactly the known fields: a missing or unknown one is an error."""
    missing, unknown = [k for k in known if k not in found], [str(k) for k in found if k not in known]
    if missing or unknown:
        rows = [("missing", ", ".join(missing)), ("unknown", ", ".join(unknown)), ("known", ", ".join(known))]
        raise FrtcError("policy.field", f"{where} does not have the fields of {SCHEMA}", [r for r in rows if r[1]])


def bad(where: str, want: str, found: object) -> FrtcError:
    return FrtcError("policy.field", f"{where} has no valid value", [("wants", want), ("found", repr(found)[:80])])
