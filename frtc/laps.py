"""How long the parts of a command took."""

from __future__ import annotations

import time


class Laps:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, passes: list[tuple[str, float]] | None = None) -> None:
        """`passes`: what of this lap the passes took, told apart."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        inner = sum(seconds for _, seconds in passes or ())
        self.seconds[name] = took - inner
        if passes is not None:
            self.seconds["passes"] = inner
