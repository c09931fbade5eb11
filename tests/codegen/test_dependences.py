"""Dependences: the fewest edges that order all conflicts; the verifier catches every edge that is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from frtc.codegen.dependences import Race, verify_no_race, with_dependences
from frtc.runtime.plan import ARENA, Call, Launch, Ref


def at(offset: int, n: int = 64, space: str = ARENA, slot: str = "") -> Ref:
    return Ref(space, offset, "f32", (n,), (1,), 0, slot)


def call(name: str, reads: list[Ref], writes: list[Ref]) -> Call:
    return Call(name, "copy", {}, tuple(reads), tuple(writes), ())


A, B, C, D = (at(1024 * i) for i in range(4))


def after(*calls: Call) -> list[tuple[int, ...]]:
    return [c.after for c in with_dependences(calls)]


def test_a_chain_waits_for_its_predecessor_only() -> None:
    assert after(call("a", [], [A]), call("b", [A], [B]), call("c", [A, B], [C])) == [(), (0,), (1,)]


def test_branches_are_free_and_their_join_waits_for_both() -> None:
    calls = (call("a", [], [A]), call("b", [A], [B]), call("c", [A], [C]), call("d", [B, C], [D]))
    assert after(*calls) == [(), (0,), (0,), (1, 2)]


def test_reuse_of_memory_is_a_dependence() -> None:
    assert after(call("read", [A], [B]), call("overwrite", [C], [A])) == [(), (0,)]
    assert after(call("one", [], [A]), call("two", [], [at(128, 64)])) == [(), (0,)]


def test_slots_are_apart_and_weights_never_conflict() -> None:
    x, y = at(0, slot="x", space="slot"), at(0, slot="y", space="slot")
    w = at(0, space="weights")
    assert after(call("a", [w], [x]), call("b", [w], [y])) == [(), ()]


def test_scratch_conflicts_like_a_result() -> None:
    first, second = call("a", [], [B]), replace(call("b", [], [C]), scratch=(1024, 64))
    assert after(first, second) == [(), (0,)]


def test_the_verifier_misses_no_removed_edge() -> None:
    calls = with_dependences(
        (call("a", [], [A]), call("b", [A], [B]), call("c", [A], [C]), call("d", [B, C], [D]), call("e", [D], [A]))
    )
    verify_no_race(calls)
    for i, c in enumerate(calls):
        for edge in c.after:
            broken = list(calls)
            broken[i] = replace(c, after=tuple(j for j in c.after if j != edge))
            with pytest.raises(Race, match=f"{calls[edge].name}"):
                verify_no_race(broken)


def test_an_edge_to_a_later_call_is_refused() -> None:
    with pytest.raises(Race, match="does not come before"):
        verify_no_race([replace(call("a", [], [A]), after=(0,))])


def test_calls_that_meet_are_never_at_once() -> None:
    """Two whose blocks wait for each other follow each other although they touch nothing in common."""
    calls = (call("a", [], [A]), call("b", [], [B]), call("c", [], [C]))
    assert after(*calls) == [(), (), ()]
    first, second, third = calls
    meeting = (Launch(0, (1, 1, 1), 64, 0, (), meets=True),)
    assert after(replace(first, launches=meeting), second, replace(third, launches=meeting)) == [(), (), (0,)]
