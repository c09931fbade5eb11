"""What the kernel tests of one session share: who makes things ahead of their use, and where the time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from frtc.codegen.nvrtc import Job
    from tests.kernels.harness import Array, Case


class Source(Protocol):
    """What was made ahead of its use, or None (tests/kernels/ahead.py)."""

    def operands(self, case: Case) -> list[Array | None] | None: ...
    def expected(self, case: Case, operands: Sequence[Array | None]) -> list[Array] | None: ...
    def await_cubins(self, jobs: Sequence[Job]) -> None: ...


class Nothing:
    """Nobody makes anything ahead."""

    def operands(self, case: Case) -> list[Array | None] | None:
        return None

    def expected(self, case: Case, operands: Sequence[Array | None]) -> list[Array] | None:
        return None

    def await_cubins(self, jobs: Sequence[Job]) -> None:
        pass


SOURCES: list[Source] = [Nothing()]  # the last one counts: of a session on a GPU, conftest.py
SPENT: dict[str, float] = defaultdict(float)  # seconds of this process, by part


@contextmanager
def spent(part: str) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        SPENT[part] += time.perf_counter() - begun
