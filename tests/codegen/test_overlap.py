"""Stages that overlap: which ones, what their calls wait for, and that each has memory of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from frtc.codegen.overlap import leading, overlap_of
from frtc.kernels.targets import load_targets
from frtc.lowering.text import parse_module
from frtc.runtime.plan import ARENA, Call, Launch, Overlap, Ref, Repeat, Run, Stage
from tests.codegen.emulated import agree, built
from tests.runtime import overlap_plan

A, B, C = (Ref(ARENA, 1024 * i, "f32", (64,), (1,)) for i in range(3))
MEETS = (Launch(0, (1, 1, 1), 64, 0, (), meets=True),)


def call(reads: tuple[Ref, ...], writes: tuple[Ref, ...], after: tuple[int, ...] = ()) -> Call:
    return Call("", "copy", {}, reads, writes, (), after)


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        ((Run("a"), Run("b"), Repeat(3, (Run("c"), Run("d"))), Run("e")), ("a", "b", "c", "d")),
        ((Run("a"), Run("b"), Run("a"), Run("c")), ("a", "b")),
        ((Run("a"), Repeat(2, (Run("b"), Repeat(3, (Run("c"),))))), ("a", "b")),
        ((Repeat(2, (Run("a"),)),), ("a",)),
    ],
)
def test_stages_that_come_first(schedule: tuple[Run | Repeat, ...], names: tuple[str, ...]) -> None:
    assert leading(schedule) == names


def test_calls_wait_for_calls_of_other_stages() -> None:
    """c needs what a writes first, and its memory is that of b's last call."""
    a = Stage("a", (call((), (A,)), call((A,), (B,), (0,))))
    c = Stage("c", (call((), (C,)), call((A, C), (C,), (0,)), call((C,), (B,), (1,))))
    assert overlap_of(("a", "c"), {"a": a, "c": c}, {}) == Overlap(("a", "c"), ((), (0,), (), (0, 2), (1, 3)))
    assert overlap_of(("a",), {"a": a}, {}) is None


def test_calls_that_meet_are_never_at_once() -> None:
    first, second = call((), (A,)), call((), (B,))
    stages = {name: Stage(name, (replace(one, launches=MEETS),)) for name, one in (("a", first), ("b", second))}
    assert overlap_of(("a", "b"), stages, {}) == Overlap(("a", "b"), ((), (0,)))


def test_the_first_round_runs_beside_the_long_stage() -> None:
    """Each of its layers waits for the keys of one layer there, and for nothing else of that stage."""
    program = built(parse_module(overlap_plan.text())).program
    assert program.overlap and program.overlap.stages == ("long", "let.z", "short")
    calls = program.stage("long").calls
    keys = [i for i, one in enumerate(calls) if one.op == "linear" and one.results[0].space == "state"]
    behind = len(calls) + len(program.stage("let.z").calls)
    waits = [[j for j in after if j < len(calls)] for after in program.overlap.after[behind:]]
    assert len(keys) == overlap_plan.LAYERS and [j for after in waits for j in after] == keys


def test_they_share_no_memory_and_others_do() -> None:
    assert not load_targets()["a100"].overlaps

    def ends(target: str) -> list[tuple[int, int]]:
        program = built(parse_module(overlap_plan.text()), target).program
        assert (program.overlap is None) == (target == "a100")
        spans = []
        for stage in program.stages:
            refs = [ref for one in stage.calls for ref in (*one.operands, *one.results) if ref and ref.space == ARENA]
            if refs:
                spans.append((min(ref.offset for ref in refs), max(ref.offset for ref in refs)))
        return sorted(spans)

    apart, together = ends("hopper"), ends("a100")
    assert len(apart) == 2 and apart[0][1] < apart[1][0]
    assert together[0][0] == together[1][0] == 0


def test_it_computes_what_the_interpreter_computes() -> None:
    agree(parse_module(overlap_plan.text()), exact=False)
