"""Placement: values lie where their readers want them, nothing is copied that need not be, and nothing is overwritten
that somebody still reads. Every module here is run by the emulator and compared with the interpreter to the bit."""

from __future__ import annotations

import pytest

from frtc.codegen.build import Built
from frtc.runtime.plan import ARENA, SLOT, STATE
from tests.codegen.emulated import agree, copies, module_of, ops


def results(built: Built, stage: str, op: str) -> list[tuple[str, str]]:
    """(space, slot) of the first result of each call of an op."""
    places = [call.results[0] for call in built.emitted[stage] if call.site.op == op]
    return [(p.buffer.space, p.buffer.slot) for p in places]


def test_inputs_and_results_are_slots_and_what_lies_between_is_arena() -> None:
    built = agree(
        module_of("""
        graph g(x: bf16[4,16]) {
          @v : bf16[24,16]
          @w : bf16[8,24]
          %0 = linear(%x, @v) : bf16[4,24]
          %1 = linear(%0, @w) : bf16[4,8]
          return y=%1
        }""")
    )
    assert results(built, "g", "linear") == [(ARENA, ""), (SLOT, "y")]
    assert copies(built, "g") == [] and built.program.state_nbytes == 0


CACHE = """
module m

graph weights() {{
  %0 = tensor(key=w) : bf16[16,16]
  return w=%0
}}

graph prefix(x: bf16[6,16]) {{
  @w : bf16[16,16]
  %0 = linear(%x, @w) : bf16[6,16]
  return k=%0
}}

graph step(z: bf16[2,16], k: bf16[6,16]) {{
  @w : bf16[16,16]
  %0 = linear(%z, @w) : bf16[2,16]
  %1 = concat({parts}, axis=-2) : bf16[{rows},16]
  %2 = linear(%1, @w) : bf16[{rows},16]
  return y=%2
}}

schedule {{
  run prefix
  repeat 3 i {{
    run step
  }}
  return y=y
}}
"""


def test_a_concat_is_written_by_the_programs_that_make_its_parts() -> None:
    built = agree(module_of(CACHE.format(parts="%k, %0", rows=8)))
    assert copies(built, "prefix") == copies(built, "step") == []
    (whole,) = {call.operands[0].buffer for call in built.emitted["step"][1:] if call.operands[0]}
    assert whole.space == STATE and whole.nbytes == 8 * 32
    first, second = built.emitted["prefix"][0].results[0], built.emitted["step"][0].results[0]
    assert first.buffer is whole and first.strided.offset == 0
    assert second.buffer is whole and second.strided.offset == 6 * 16


JOINT = """
module m

graph weights() {{
  %0 = tensor(key=w) : bf16[16,16]
  return w=%0
}}

graph prefix(x: bf16[6,16]) {{
  @w : bf16[16,16]
  %0 = linear(%x, @w) : bf16[6,16]
  return k=%0
}}

graph once(s: bf16[1,16], k: bf16[6,16]) {{
  @w : bf16[16,16]
  %0 = linear(%s, @w) : bf16[1,16]
  %1 = concat({parts}, axis=-2) : bf16[7,16]
  %2 = linear(%1, @w) : bf16[7,16]
  return own=%0, seen=%2
}}

graph step(z: bf16[2,16], k: bf16[6,16], own: bf16[1,16]) {{
  @w : bf16[16,16]
  %0 = linear(%z, @w) : bf16[2,16]
  %1 = concat(%k, %own, %0, axis=-2) : bf16[9,16]
  %2 = linear(%1, @w) : bf16[9,16]
  return y=%2
}}

schedule {{
  run prefix
  run once
  repeat 3 i {{
    run step
  }}
  return y=y, seen=seen
}}
"""


def test_a_concat_that_is_a_part_of_a_larger_one_lies_inside_it() -> None:
    """Whatever program reads more of it decides; nobody copies, also not in the loop."""
    built = agree(module_of(JOINT.format(parts="%k, %0")))
    assert [copies(built, stage) for stage in ("prefix", "once", "step")] == [[], [], []]
    whole = built.emitted["step"][1].operands[0]
    part = built.emitted["once"][1].operands[0]
    assert whole is not None and part is not None and part.buffer is whole.buffer
    assert (part.strided.shape, part.strided.offset) == ((7, 16), 0)


def test_a_concat_in_another_order_is_copied() -> None:
    assert len(copies(agree(module_of(JOINT.format(parts="%0, %k"))), "once")) == 2


def test_a_part_that_stands_twice_is_copied_once() -> None:
    assert copies(agree(module_of(CACHE.format(parts="%0, %k, %k", rows=14))), "step") == [""]
    assert copies(agree(module_of(CACHE.format(parts="%0, %0, %k", rows=10))), "step") == [""]


def test_a_value_of_two_concats_lies_in_one_and_is_copied_into_the_other() -> None:
    text = CACHE.format(parts="%k, %0", rows=8)
    text = text.replace(
        "  return y=%2", "  %3 = concat(%0, %k, axis=-2) : bf16[8,16]\n  %4 = add(%2, %3) : bf16[8,16]\n  return y=%4"
    )
    assert len(copies(agree(module_of(text)), "step")) == 2


def test_concats_of_columns_and_of_concats() -> None:
    built = agree(
        module_of("""
        graph g(x: bf16[4,8]) {
          @a : bf16[8,8]
          @b : bf16[16,8]
          %0 = linear(%x, @a) : bf16[4,8]
          %1 = linear(%x, @b) : bf16[4,16]
          %2 = concat(%0, %1, axis=-1) : bf16[4,24]
          %3 = concat(%2, %2, axis=-2) : bf16[8,24]
          return y=%3
        }""")
    )
    assert ops(built, "g") == ["linear", "linear"] and len(copies(built, "g")) == 1
    assert results(built, "g", "linear") == [(SLOT, "y"), (SLOT, "y")]


def test_heads_side_by_side_again_are_written_in_place() -> None:
    """A reshape that no view can express has no launch: its operand is written in the order it wants."""
    built = agree(module_of(HEADS.format(op="exp(%x)")))
    assert ops(built, "g") == ["pointwise", "linear"] and copies(built, "g") == []
    assert built.emitted["g"][0].results[0].strided.strides == (16, 32, 1)


def test_a_kernel_that_cannot_write_there_writes_rows_of_its_own() -> None:
    built = agree(module_of(HEADS.format(op="rms_norm(%x, eps=1e-06)")))
    assert ops(built, "g") == ["rms_norm", "linear"] and len(copies(built, "g")) == 1
    assert [call.site.op for call in built.emitted["g"]] == ["rms_norm", "pointwise", "linear"]


HEADS = """
graph g(x: bf16[2,4,16]) {{
  @w : bf16[32,32]
  %0 = {op} : bf16[2,4,16]
  %1 = view(%0, shape=[4,2,16], strides=[16,64,1]) : bf16[4,2,16]
  %2 = reshape(%1, shape=[4,32]) : bf16[4,32]
  %3 = linear(%2, @w) : bf16[4,32]
  return y=%3
}}
"""

BETWEEN = """
module m

graph weights() {{
  %0 = tensor(key=w) : bf16[32,16]
  %1 = tensor(key=o) : bf16[32,32]
  return w=%0, o=%1
}}

graph first(x: bf16[6,16]) {{
  @w : bf16[32,16]
  %0 = linear(%x, @w) : bf16[6,32]
  {made}
  return k=%1
}}

graph second(k: bf16[2,6,16]) {{
  @o : bf16[32,32]
  {read}
}}

schedule {{
  run first
  run second
  return y=y
}}
"""
AS_HEADS = "%1 = view(%0, shape=[2,6,16], strides=[16,32,1]) : bf16[2,6,16]"
AS_ROWS = """%0 = view(%k, shape=[6,2,16], strides=[16,96,1]) : bf16[6,2,16]
  %1 = reshape(%0, shape=[6,32]) : bf16[6,32]
  %2 = linear(%1, @o) : bf16[6,32]
  return y=%2"""


def test_a_result_that_is_a_view_lives_inside_the_value_it_shows() -> None:
    read = "%0 = exp(%k) : bf16[2,6,16]\n  return y=%0"
    built = agree(module_of(BETWEEN.format(made=AS_HEADS, read=read)))
    assert copies(built, "first") == copies(built, "second") == []
    (made,), (used,) = built.emitted["first"], built.emitted["second"]
    assert made.results[0].buffer.space == STATE and used.operands[0].buffer is made.results[0].buffer
    assert used.operands[0].strided.strides == (16, 32, 1)


def test_a_reshape_in_another_program_reads_such_a_view_where_it_lies() -> None:
    built = agree(module_of(BETWEEN.format(made=AS_HEADS, read=AS_ROWS)))
    assert copies(built, "first") == copies(built, "second") == []
    assert ops(built, "second") == ["linear"]


def test_a_value_lies_where_another_program_reshapes_it() -> None:
    shown = "%h = view(%0, shape=[2,6,16], strides=[16,32,1]) : bf16[2,6,16]\n  %1 = exp(%h) : bf16[2,6,16]"
    built = agree(module_of(BETWEEN.format(made=shown, read=AS_ROWS)))
    assert copies(built, "first") == copies(built, "second") == []
    assert built.emitted["first"][1].results[0].strided.strides == (16, 32, 1), "the rows of both heads side by side"


def test_a_part_of_a_value_cannot_be_placed_by_its_reshape() -> None:
    """Half of the columns, as rows: the whole lies as it is, and what is read is copied."""
    half = """%0 = view(%k, shape=[6,2,8], strides=[16,96,1]) : bf16[6,2,8]
  %1 = reshape(%0, shape=[3,32]) : bf16[3,32]
  %2 = linear(%1, @o) : bf16[3,32]
  return y=%2"""
    shown = "%h = view(%0, shape=[2,6,16], strides=[16,32,1]) : bf16[2,6,16]\n  %1 = exp(%h) : bf16[2,6,16]"
    built = agree(module_of(BETWEEN.format(made=shown, read=half)))
    assert copies(built, "first") == [] and len(copies(built, "second")) == 1


LOOP = """
module m

graph weights() {{
  %0 = tensor(key=w) : f32[16,16]
  return w=%0
}}

graph step(x: f32[16,16]) {{
  @w : f32[16,16]
{body}
}}

schedule {{
  let x = noise
  repeat 4 i {{
    run step
  }}
  return actions=x
}}
"""


def looped(*lines: str) -> Built:
    return agree(module_of(LOOP.format(body="\n".join(f"  {line}" for line in lines))))


def test_a_loop_carried_sum_is_written_where_it_is_read() -> None:
    built = looped("%0 = linear(%x, @w) : f32[16,16]", "%1 = linear(%0, @w, _, %x) : f32[16,16]", "return x=%1")
    assert copies(built, "step") == [] and copies(built, "let.x") == ["let x"]
    update = built.emitted["step"][1]
    assert update.results[0].buffer is update.operands[3].buffer and update.results[0].buffer.space == SLOT


@pytest.mark.parametrize(
    "lines",
    [
        # products read whole rows of x after its first elements are written
        ("%0 = linear(%x, @w) : f32[16,16]", "return x=%0"),
        # the same through a view of x
        (
            "%0 = view(%x, shape=[16,16], strides=[1,16]) : f32[16,16]",
            "%1 = linear(%0, @w) : f32[16,16]",
            "return x=%1",
        ),
        # a residual that is x transposed: other elements than those written
        (
            "%0 = linear(%x, @w) : f32[16,16]",
            "%1 = view(%x, shape=[16,16], strides=[1,16]) : f32[16,16]",
            "%2 = linear(%0, @w, _, %1) : f32[16,16]",
            "return x=%2",
        ),
        # the new x is a view of what is computed
        (
            "%0 = linear(%x, @w) : f32[16,16]",
            "%1 = view(%0, shape=[16,16], strides=[1,16]) : f32[16,16]",
            "return x=%1",
        ),
    ],
)
def test_a_value_that_is_still_read_is_not_overwritten(lines: tuple[str, ...]) -> None:
    assert copies(looped(*lines), "step")[-1] == "result x"


def test_a_later_reader_keeps_the_old_value() -> None:
    """x is updated by a linear of its own; something else reads the old x, before or after it in the text."""
    for order in ("%0, %1", "%1, %0"):
        built = looped(
            "%0 = linear(%x, @w, _, %x) : f32[16,16]",
            "%1 = view(%x, shape=[16,16], strides=[1,16]) : f32[16,16]",
            f"%2 = concat({order}, axis=-1) : f32[16,32]",
            "%3 = view(%2, shape=[16,16], strides=[32,2]) : f32[16,16]",
            "%4 = add(%3, %0) : f32[16,16]",
            "return x=%4",
        )
        assert "result x" in copies(built, "step")


def test_a_concat_of_the_carried_value_is_read_before_it_changes() -> None:
    built = looped(
        "%0 = linear(%x, @w) : f32[16,16]",
        "%1 = concat(%x, %0, axis=-2) : f32[32,16]",
        "%2 = view(%1, shape=[16,16], strides=[16,1], offset=8) : f32[16,16]",
        "%3 = linear(%2, @w) : f32[16,16]",
        "return x=%3",
    )
    assert "result x" in copies(built, "step")


def test_one_value_under_two_names() -> None:
    built = agree(
        module_of("""
        graph g(x: bf16[4,16]) {
          @w : bf16[16,16]
          %0 = linear(%x, @w) : bf16[4,16]
          return a=%0, b=%0
        }""")
    )
    assert ops(built, "g") == ["linear"] and copies(built, "g") == ["result b"]


def test_a_result_that_is_an_input_is_copied() -> None:
    built = agree(
        module_of("""
        graph g(x: bf16[4,16]) {
          %0 = view(%x, shape=[16,4], strides=[1,16]) : bf16[16,4]
          return a=%0, b=%x
        }""")
    )
    assert copies(built, "g") == ["result a", "result b"]
