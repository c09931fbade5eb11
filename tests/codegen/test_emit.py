"""Emit: what launches and what does not, states and their versions, rows with padding, reasons for choices. Every
module is run by the emulator and compared with the interpreter to the bit."""

from __future__ import annotations

import pytest

from frtc.codegen.build import Built
from frtc.errors import FrtcError
from frtc.kernels.catalog import CATALOG, NoKernel
from frtc.runtime.plan import ARENA, STATE, WEIGHTS
from tests.codegen.emulated import agree, built, copies, module_of, ops


def test_views_and_constants_launch_nothing() -> None:
    result = agree(
        module_of("""
        graph g(x: bf16[2,4,16]) {
          %0 = view(%x, shape=[4,16], strides=[16,1], offset=64) : bf16[4,16]
          %1 = const(value=2) : bf16[]
          %2 = mul(%0, %1) : bf16[4,16]
          return y=%2
        }""")
    )
    assert ops(result, "g") == ["pointwise"] and copies(result, "g") == []
    (call,) = result.emitted["g"]
    assert call.operands[0] is not None and call.operands[0].strided.offset == 64 and len(call.operands) == 1


TABLE = """
module m

graph weights() {{
  %0 = tensor(key=t) : f32[3,5,9]
  return t=%0
}}

graph step(x: f32[5,9], i: i32[]) {{
  @t : f32[3,5,9]
  %0 = index(@t, %i) : f32[5,9]
  %1 = {op} : f32[5,9]
  return x=%1
}}

schedule {{
  let x = noise
  repeat 3 i {{
    run step
  }}
  return y=x
}}
"""


def test_a_table_by_the_round_is_an_address_that_steps() -> None:
    result = agree(module_of(TABLE.format(op="add(%x, %0)")))
    (call, _) = result.emitted["step"]  # x is read in another order than written as far as the placement knows
    (table,) = [p for p in call.operands if p is not None and p.buffer.space == WEIGHTS]
    assert table.step == 5 * 12 * 4 and table.strided.strides == (12, 1), "rows of 9 floats lie 48 bytes apart"
    refs = [r for c in result.program.stage("step").calls for r in c.operands if r is not None and r.step]
    assert [(r.offset, r.step, r.shape) for r in refs] == [(0, 240, (5, 9))]


def test_the_round_itself_is_not_on_the_device() -> None:
    text = TABLE.format(op="mul(%x, %i)").replace("%0 = index(@t, %i) : f32[5,9]\n", "").replace("%1", "%0")
    with pytest.raises(FrtcError, match="program step reads the round of its loop, which lies nowhere") as caught:
        built(module_of(text))
    assert caught.value.code == "codegen.unplaced" and "run all passes" in caught.value.hint


def test_constants_that_no_pass_made_weights_are_named() -> None:
    text = """
        graph g(x: f32[4,8]) {
          @w : f32[8,8]
          %0 = exp(@w) : f32[8,8]
          %1 = linear(%x, %0) : f32[4,8]
          return y=%1
        }"""
    with pytest.raises(FrtcError, match=r"reads exp of f32\[8,8\]"):
        built(module_of(text))


# ---- states ----------------------------------------------------------------------------------------------------------

STATES = """
graph g(x: bf16[2,9], n: i32[]; s: bf16[6,9], count: i32[]) {{
  {lines}
  return {results}
  write s={last}, count=%c1
}}
"""


def states(*lines: str, results: str, last: str) -> Built:
    """Two runs, so that what the first leaves is what the second finds. A counter without axes counts along."""
    counted = (
        "%r = read(%count) : i32[]",
        "%one = const(value=1) : i32[]",
        "%sum = add(%r, %one) : i32[]",
        "%zero = const(value=0) : i32[]",
        "%c1 = write(%count, %sum, %zero, axis=-1) : i32[]",
    )
    text = STATES.format(lines="\n  ".join([*counted, *lines]), results=results, last=last)
    return agree(module_of(text), runs=3)


def test_a_write_at_a_literal_place_is_a_copy_there() -> None:
    result = states(
        "%four = const(value=4) : i32[]",
        "%s1 = write(%s, %x, %four, axis=-2) : bf16[6,9]",
        "%y = read(%s1) : bf16[6,9]",
        results="y=%y, n2=%sum",
        last="%s1",
    )
    copied = next(c for c in result.emitted["g"] if c.site.operands[0].shape == (2, 9))
    assert copied.results[0].buffer.space == STATE and copied.results[0].strided.offset == 4 * 16
    assert "write" not in ops(result, "g")


def test_a_write_at_a_place_that_the_device_knows_is_a_launch() -> None:
    result = states(
        "%s1 = write(%s, %x, %n, axis=-2) : bf16[6,9]",
        "%y = read(%s1) : bf16[6,9]",
        results="y=%y",
        last="%s1",
    )
    (call,) = [c for c in result.emitted["g"] if c.site.op == "write"]
    assert call.choice.kernel.name == "smxx_write"
    assert call.operands[0] is call.results[0] and call.results[0].buffer.space == STATE
    (written,) = [c for c in result.program.stage("g").calls if c.op == "write"]
    assert written.operands[0] == written.results[0]
    numbers = [value for kind, value in written.launches[0].params if kind == "i32"]
    assert numbers[0] == 16 + 9 and numbers[-1] == 16, "two rows of 9, each padded to 16: one block of 25"


@pytest.mark.parametrize("at", ["%n", "%three"])
@pytest.mark.parametrize("results", ["a=%old, b=%new", "b=%new, a=%old", "b=%new, a=%both"])
def test_an_old_version_is_read_before_it_is_gone(at: str, results: str) -> None:
    result = states(
        "%three = const(value=3) : i32[]",
        "%old = read(%s) : bf16[6,9]",
        f"%s1 = write(%s, %x, {at}, axis=-2) : bf16[6,9]",
        "%new = read(%s1) : bf16[6,9]",
        "%both = sub(%new, %old) : bf16[6,9]",
        results=results,
        last="%s1",
    )
    assert any(c.results[0].buffer.space == ARENA for c in result.emitted["g"] if c.node is None)


def test_a_version_whose_last_use_comes_first_is_not_copied() -> None:
    result = states(
        "%old = read(%s) : bf16[6,9]",
        "%v = view(%old, shape=[2,9], strides=[9,1], offset=9) : bf16[2,9]",
        "%sum2 = add(%v, %x) : bf16[2,9]",
        "%s1 = write(%s, %sum2, %n, axis=-2) : bf16[6,9]",
        "%s2 = write(%s1, %x, %zero, axis=-2) : bf16[6,9]",
        "%new = read(%s2) : bf16[6,9]",
        results="y=%new",
        last="%s2",
    )
    assert not any(c.results[0].buffer.space == ARENA for c in result.emitted["g"] if c.node is None)


def test_a_state_moved_along_itself_is_copied_in_between() -> None:
    states(
        "%old = read(%s) : bf16[6,9]",
        "%v = view(%old, shape=[5,9], strides=[9,1]) : bf16[5,9]",
        "%s1 = write(%s, %v, %one, axis=-2) : bf16[6,9]",
        "%s2 = write(%s1, %x, %zero, axis=-2) : bf16[6,9]",
        "%new = read(%s2) : bf16[6,9]",
        results="y=%new",
        last="%s2",
    )


def test_a_write_beside_the_state_is_refused() -> None:
    with pytest.raises(FrtcError, match=r"a write of \[5, 7\) leaves state bf16\[6,9\] along axis -2") as caught:
        states(
            "%five = const(value=5) : i32[]",
            "%s1 = write(%s, %x, %five, axis=-2) : bf16[6,9]",
            results="n2=%sum",
            last="%s1",
        )
    assert caught.value.code == "codegen.position"


# ---- padded rows and strided operands --------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k", "n"), [(3, 9, 7), (1, 1, 1), (5, 8, 13), (4, 17, 16)])
def test_odd_widths(m: int, k: int, n: int) -> None:
    """Rows are padded between launches, packed in slots; heads of odd width and their way back."""
    result = agree(
        module_of(f"""
        graph g(x: bf16[{m},{k}]) {{
          @v : bf16[{2 * n},{k}]
          @w : bf16[{n},{2 * n}]
          @b : bf16[{n}]
          %0 = linear(%x, @v) : bf16[{m},{2 * n}]
          %1 = rms_norm(%0, eps=1e-06) : bf16[{m},{2 * n}]
          %2 = linear(%1, @w, @b) : bf16[{m},{n}]
          %3 = view(%0, shape=[{m},{n}], strides=[{2 * n},1], offset={n}) : bf16[{m},{n}]
          %4 = add(%2, %3) : bf16[{m},{n}]
          return y=%4, h=%0
        }}"""),
        exact=False,
    )
    for call in result.program.stage("g").calls:
        for ref in (*call.operands, *call.results):
            if ref is not None and ref.space in (ARENA, WEIGHTS) and len(ref.shape) == 2:
                assert ref.strides[0] % 8 == 0


def test_rows_that_cannot_be_merged_over_their_padding_are_copied() -> None:
    """[4, 9] as [36]: the rows have gaps of 7."""
    result = agree(
        module_of("""
        graph g(x: bf16[4,9]) {
          %0 = exp(%x) : bf16[4,9]
          %1 = view(%0, shape=[36], strides=[1]) : bf16[36]
          %2 = neg(%1) : bf16[36]
          return y=%2
        }""")
    )
    assert ops(result, "g") == ["pointwise", "pointwise"] and len(copies(result, "g")) == 1


def test_a_reshape_over_padding_takes_two_copies() -> None:
    result = agree(
        module_of("""
        graph g(x: bf16[4,9]) {
          %0 = view(%x, shape=[9,4], strides=[1,9]) : bf16[9,4]
          %1 = exp(%0) : bf16[9,4]
          %2 = view(%1, shape=[3,3,4], strides=[4,12,1]) : bf16[3,3,4]
          %3 = reshape(%2, shape=[36]) : bf16[36]
          %4 = neg(%3) : bf16[36]
          return y=%4
        }""")
    )
    assert ops(result, "g") == ["pointwise", "pointwise"]


def test_an_operand_that_no_kernel_takes_as_it_lies_is_copied() -> None:
    result = agree(
        module_of("""
        graph g(x: bf16[16,4]) {
          @w : bf16[8,16]
          %0 = view(%x, shape=[4,16], strides=[1,4]) : bf16[4,16]
          %1 = linear(%0, @w) : bf16[4,8]
          return y=%1
        }""")
    )
    assert [c.site.op for c in result.emitted["g"]] == ["pointwise", "linear"]


def test_an_op_that_no_kernel_runs_names_each_reason() -> None:
    text = "graph g(x: i64[4,8]) {\n %0 = softmax(%x) : f32[4,8]\n return y=%0\n}"
    text = text.replace("i64", "f64").replace("f32", "f64")
    with pytest.raises(NoKernel, match=r"no kernel runs softmax\(f64\[4,8\]\) -> f64\[4,8\] on hopper"):
        built(module_of(text))


def test_every_choice_says_why_and_why_not() -> None:
    result = agree(
        module_of("""
        graph g(x: bf16[64,256]) {
          @w : bf16[256,256]
          %0 = linear(%x, @w) : bf16[64,256]
          return y=%0
        }""")
    )
    (call,) = result.emitted["g"]
    first, *others = str(call.choice).splitlines()
    assert first.startswith("smxx_gemm BM=") and first.endswith("us estimated")
    names = {kernel.name for kernel in CATALOG.kernels_for("linear")}
    assert {line.split()[1].rstrip(":") for line in others} == names
    assert any("its family sm_110a is another GPU's" in line for line in others)


@pytest.mark.parametrize("families", [("baseline",), ("baseline", "sm_90a")])
def test_a_view_that_begins_between_vectors_is_copied_first(families: tuple[str, ...]) -> None:
    """Products and attention move 16 bytes at a time: element 4 of a bf16 row is no place for them to begin."""
    module = module_of("""
        graph g(x: bf16[64,72]) {
          @w : bf16[64,64]
          %0 = view(%x, shape=[64,64], strides=[72,1], offset=4) : bf16[64,64]
          %1 = linear(%0, @w) : bf16[64,64]
          return y=%1
        }""")
    calls = built(module, "hopper", families).emitted["g"]
    assert [c.site.op for c in calls] == ["pointwise", "linear"]
    assert all(place is None or place.operand().aligned for place in calls[1].operands)
    agree(module)
