"""A file of one's own to write before it gets its name: an atomic rename then shows a whole file or none."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def partial(path: Path) -> Path:
    """A name that no other writer takes, in the same folder: a rename stays within one file system."""
    return path.parent / f".{path.name[:48]}.{os.getpid()}.{secrets.token_hex(4)}.partial"
