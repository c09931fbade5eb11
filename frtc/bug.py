"""The report of a bug: everything a maintainer needs, in a file of its own. It holds no file's contents."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import frtc


def write_report(error: BaseException, arguments: Sequence[str]) -> Path:
    """Writes traceback, command line and versions; returns the file."""
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("FRTC_")]
    text = "\n".join(
        [
            f"frtc {frtc.__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"command: frtc {' '.join(arguments)}",
            f"settings: {' '.join(settings) or 'none'}",
            f"modules: {', '.join(_versions())}",
            "",
            *traceback.format_exception(error),
        ]
    )
    handle, path = tempfile.mkstemp(prefix="frtc-bug-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    return Path(path)


def _versions() -> list[str]:
    """Of the foreign packages that are loaded."""
    loaded = ("numpy", "ml_dtypes", "torch", "tokenizers", "jinja2")
    return [f"{name} {getattr(sys.modules[name], '__version__', '?')}" for name in loaded if name in sys.modules]
