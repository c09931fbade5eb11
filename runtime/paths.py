"""Paths that a caller gives, before the system sees them."""

from __future__ import annotations

import os
from pathlib import Path

from frtc.errors import UsageError


def require_file(path: Path) -> None:
    """OSError for what is there and no file: nobody may ever write into a pipe, and a device may have no end."""
    if path.exists() and not path.is_file():
        raise OSError(None, "it is a folder" if path.is_dir() else "it is no regular file")


def path_of(what: str, given: object) -> Path:
    """An empty text is none: it would be the folder that the process is in."""
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(
            "option.path", f"the path of {what} is {given!r}", hint="a str or a pathlib.Path that names it"
        )
    return Path(text)
