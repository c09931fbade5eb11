"""The CUDA C++ text of a launch: `.cuh` files are included as they are, `.cu.j2` files are rendered with jinja2."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

import jinja2

from frtc.kernels.spec import Stage

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def source_of(stage: Stage) -> str:
    """What the compiler gets for one stage; its entry is instantiated by name."""
    if stage.source.endswith(".j2"):
        return _environment().from_string(device_file(stage.source)).render(**stage.context)
    return f'#include "{stage.source}"\n'


def headers_of(source: str) -> dict[str, str]:
    """Our files that `source` includes, directly or through one another, by name in sorted order."""
    return dict(_headers(source))


@cache
def _headers(source: str) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    pending = INCLUDE.findall(source)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = device_file(name)
            pending += INCLUDE.findall(found[name])
    return tuple(sorted(found.items()))


@cache
def device_file(name: str) -> str:
    """The text of a file in kernels/, also from a zipped package."""
    return (resources.files("frtc.kernels") / name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
