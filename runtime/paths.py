"""Paths that a caller gives, before the system sees them."""

from __future__ import annotations

import os
from pathlib import Path

from frtc.errors import UsageError


def path_of(what: str, given: object) -> Path:
    """An empty text is none: it would be the folder that the process is in."""
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(
            "option.path", f"the path of {what} is {given!r}", hint="a str or a pathlib.Path that names it"
        )
    return Path(text)
