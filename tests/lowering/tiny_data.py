"""The raw IR of the tiny models as text (written by `python -m tests.lowering.tiny`): usable without torch."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
OTHER = DATA / "transformers-5.5"  # the same models as that version spells them


def texts(folder: Path = DATA) -> dict[str, str]:
    """Name of the tiny model -> its text."""
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.ir"))}
