"""Rows that may be read before a launch waits: as many as nothing writes, and none where nobody has waited."""

from __future__ import annotations

from dataclasses import replace

import pytest

from frtc.codegen.dependences import with_dependences
from frtc.codegen.settled import settled_rows
from frtc.runtime.plan import ARENA, Call, Ref

HEADS, KEYS, SIZE = 2, 100, 8
HEAD = KEYS * SIZE * 2  # bytes


def rows(space: str, first: int, count: int, heads: int = 1, offset: int = 0) -> Ref:
    """bf16 [heads, count, SIZE] from a row on of a cache [HEADS, KEYS, SIZE]."""
    shape, strides = (heads, count, SIZE), (KEYS * SIZE, SIZE, 1)
    return Ref(space, offset + first * SIZE * 2, "bf16", shape, strides, 0, "")


def call(name: str, reads: list[Ref], writes: list[Ref]) -> Call:
    return Call(name, name, {}, tuple(reads), tuple(writes), ())


X, Y, Q = (Ref(ARENA, 1024 * i, "bf16", (4, SIZE), (SIZE, 1), 0, "") for i in range(3))
K = rows("state", 0, KEYS)


def found(*writes: Ref, k: Ref = K, begun: tuple[bool, ...] = (False, False, False)) -> int:
    """norm, a projection that writes, attention."""
    calls = with_dependences([call("norm", [X], [Y]), call("qkv", [Y], [Q, *writes]), call("attention", [Q, k], [X])])
    return settled_rows(calls, 2, (1,), begun)


def test_rows_that_nothing_writes() -> None:
    assert found(rows("state", 60, 40)) == 60 and found(rows("state", 99, 1)) == 99
    assert found() == KEYS and found(rows("state", 0, 1)) == 0
    assert found(rows("state", 60, 40), rows("state", 30, 2)) == 30


def test_a_row_that_is_written_in_part() -> None:
    part = replace(rows("state", 60, 1), offset=60 * SIZE * 2 + 6, shape=(1, 1, 2))
    assert found(part) == 60


def test_every_head_counts() -> None:
    """A write to the second head alone; one to both is a span with a gap, which counts as written."""
    both = rows("state", 0, KEYS, HEADS)
    assert found(rows("state", 70, 5, offset=HEAD), k=both) == 70
    assert found(rows("state", 60, 40, HEADS), k=both) == 0


def test_another_space_is_none_of_its_business() -> None:
    assert found(rows("input", 10, 40)) == KEYS


@pytest.mark.parametrize(
    ("begun", "expected"),
    [((False, False, False), 60), ((False, True, False), 60), ((True, False, True), 60), ((True, True, False), 0)],
)
def test_somebody_has_waited(begun: tuple[bool, ...], expected: int) -> None:
    """A launch that lets the next one begin with itself says nothing of what came before."""
    assert found(rows("state", 60, 40), begun=begun) == expected


def test_the_first_launch_of_a_program_knows_nothing() -> None:
    assert settled_rows(with_dependences([call("attention", [Q, K], [X])]), 0, (1,), (False,)) == 0


def test_tables_that_step_with_the_round() -> None:
    assert found(k=replace(K, step=64)) == 0


def test_the_fewest_rows_of_all_operands() -> None:
    v = rows("state", 0, KEYS, offset=2 * HEAD)
    calls = with_dependences([
        call("norm", [X], [Y]), call("qkv", [Y], [Q, rows("state", 60, 40), rows("state", 50, 40, offset=2 * HEAD)]),
        call("attention", [Q, K, v], [X]),
    ])  # fmt: skip
    assert settled_rows(calls, 2, (1, 2), (False, False, False)) == 50
