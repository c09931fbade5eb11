"""attention_sites: what each attention sees, from its mask."""

from __future__ import annotations

import numpy as np
import pytest

from frtc.lowering.interpret import run
from frtc.passes.attention_sites import attention_sites
from frtc.passes.check import random_tensor
from tests.passes.expect import as_module, expect_pass, expect_unchanged

KEYS = 9
# Conditions on the key's number %j [9], the query's %i [4, 1] (the last four positions) and the scalar %n.
CONDITIONS = {
    "length": "%m0 = lt(%j, %n) : bool[9]",
    "length behind two": "%c = const(value=2) : i32[]\n%a = add(%n, %c) : i32[]\n%m0 = lt(%j, %a) : bool[9]",
    "up to and including": "%m0 = le(%j, %n) : bool[9]",
    "scalar on the left": "%m0 = gt(%n, %j) : bool[9]",
    "not beyond": "%a = ge(%j, %n) : bool[9]\n%m0 = not(%a) : bool[9]",
    "hole": "%c = const(value=6) : i32[]\n%a = lt(%j, %n) : bool[9]\n%b = ge(%j, %c) : bool[9]\n"
    "%m0 = or(%a, %b) : bool[9]",
    "causal": "%m0 = le(%j, %i) : bool[4,9]",
    "causal and length": "%a = le(%j, %i) : bool[4,9]\n%b = lt(%j, %n) : bool[9]\n%m0 = and(%a, %b) : bool[4,9]",
    "validity in pieces": "%a = const(value=true) : bool[2]\n%r = iota(size=4) : i32[4]\n%b = lt(%r, %n) : bool[4]\n"
    "%c = const(value=true) : bool[3]\n%m0 = concat(%a, %b, %c, axis=-1) : bool[9]",
    "pieces and nothing after": "%a = const(value=true) : bool[1]\n%r = iota(size=4) : i32[4]\n"
    "%b = lt(%r, %n) : bool[4]\n%c = const(value=false) : bool[4]\n%m0 = concat(%a, %b, %c, axis=-1) : bool[9]",
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_length(condition: str) -> None:
    """No mask is left, and the result is the same for each value of the scalar, beyond both ends too."""
    text = f"""graph g(q: f32[2,4,8], k: f32[2,9,8], v: f32[2,9,8], n: i32[]) {{
      %j = iota(size=9) : i32[9]
      %five = const(value=5) : i32[]
      %r4 = iota(size=4) : i32[4]
      %r5 = add(%r4, %five) : i32[4]
      %i = reshape(%r5, shape=[4,1]) : i32[4,1]
      {CONDITIONS[condition]}
      %out = attention(%q, %k, %v, %m0, scale=0.5) : f32[2,4,8]
      return %out
    }}"""
    before = as_module(text).graphs[0]
    after = attention_sites(as_module(text)).graphs[0]
    assert all(n.args[3] is None for n in after.nodes if n.op == "attention")
    inputs = {n["name"]: random_tensor(n["name"], n.t) for n in before.inputs}
    for n in range(-3, KEYS + 4):
        inputs["n"] = np.array(n, np.int32)
        np.testing.assert_array_equal(run(before, inputs)["out"], run(after, inputs)["out"], err_msg=str(n))


def test_causal() -> None:
    expect_pass(
        attention_sites,
        fires={"site.causal": 1},
        before="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8]) {
          %0 = iota(size=6) : i64[6]
          %1 = reshape(%0, shape=[6,1]) : i64[6,1]
          %2 = le(%0, %1) : bool[6,6]
          %3 = attention(%q, %k, %v, %2, scale=0.5) : f32[2,6,8]
          return %3
        }
        """,
        after="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8]) {
          %0 = attention(%q, %k, %v, causal=true, scale=0.5) : f32[2,6,8]
          return %0
        }
        """,
    )


def test_causal_after_a_prefix() -> None:
    """Four queries are the last of six positions."""
    expect_pass(
        attention_sites,
        fires={"site.causal": 1},
        before="""
        graph g(q: f32[1,2,4,8], k: f32[1,2,6,8], v: f32[1,2,6,8]) {
          %0 = iota(size=4) : i64[4]
          %1 = const(value=2) : i64[]
          %2 = add(%0, %1) : i64[4]
          %3 = reshape(%2, shape=[1,1,4,1]) : i64[1,1,4,1]
          %4 = iota(size=6) : i64[6]
          %5 = gt(%4, %3) : bool[1,1,4,6]
          %6 = not(%5) : bool[1,1,4,6]
          %7 = attention(%q, %k, %v, %6, scale=0.5) : f32[1,2,4,8]
          return %7
        }
        """,
        after="""
        graph g(q: f32[1,2,4,8], k: f32[1,2,6,8], v: f32[1,2,6,8]) {
          %0 = attention(%q, %k, %v, causal=true, scale=0.5) : f32[1,2,4,8]
          return %0
        }
        """,
    )


def test_causal_off_by_one() -> None:
    """Query i sees key i + 1 too: that is no flag."""
    expect_unchanged(
        attention_sites,
        """
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8]) {
          %0 = iota(size=6) : i64[6]
          %1 = const(value=1) : i64[]
          %2 = add(%0, %1) : i64[6]
          %3 = reshape(%2, shape=[6, 1]) : i64[6,1]
          %4 = le(%0, %3) : bool[6,6]
          %5 = attention(%q, %k, %v, %4, scale=0.5) : f32[2,6,8]
          return %5
        }
        """,
        fires={"site.dense: differs between queries, not causally": 1},
    )


def test_sliding_window() -> None:
    """Causal leaves the mask, the window stays in it."""
    expect_pass(
        attention_sites,
        fires={"site.dense: differs between queries, not causally": 1, "site.causal+mask": 1},
        before="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8]) {
          %0 = iota(size=6) : i64[6]
          %1 = reshape(%0, shape=[6,1]) : i64[6,1]
          %2 = le(%0, %1) : bool[6,6]
          %3 = sub(%1, %0) : i64[6,6]
          %4 = const(value=3) : i64[]
          %5 = lt(%3, %4) : bool[6,6]
          %6 = and(%2, %5) : bool[6,6]
          %7 = attention(%q, %k, %v, %6, scale=0.5) : f32[2,6,8]
          return %7
        }
        """,
        after="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8]) {
          %0 = iota(size=6) : i64[6]
          %1 = reshape(%0, shape=[6, 1]) : i64[6,1]
          %2 = sub(%1, %0) : i64[6,6]
          %3 = const(value=3) : i64[]
          %4 = lt(%2, %3) : bool[6,6]
          %5 = attention(%q, %k, %v, %4, causal=true, scale=0.5) : f32[2,6,8]
          return %5
        }
        """,
    )


def test_length() -> None:
    """A prompt behind three image tokens."""
    expect_pass(
        attention_sites,
        fires={"site.length": 1},
        before="""
        graph g(q: f32[2,4,8], k: f32[2,8,8], v: f32[2,8,8], n: i32[]) {
          %0 = iota(size=8) : i32[8]
          %1 = const(value=3) : i32[]
          %2 = add(%n, %1) : i32[]
          %3 = lt(%0, %2) : bool[8]
          %4 = reshape(%3, shape=[1,8]) : bool[1,8]
          %5 = attention(%q, %k, %v, %4, scale=0.5) : f32[2,4,8]
          return %5
        }
        """,
        after="""
        graph g(q: f32[2,4,8], k: f32[2,8,8], v: f32[2,8,8], n: i32[]) {
          %0 = const(value=3) : i32[]
          %1 = add(%n, %0) : i32[]
          %2 = attention(%q, %k, %v, _, %1, scale=0.5) : f32[2,4,8]
          return %2
        }
        """,
    )


def test_length_from_i64() -> None:
    """The comparison the other way round, the scalar in a batch of one."""
    expect_pass(
        attention_sites,
        fires={"site.length": 1},
        before="""
        graph g(q: f32[2,4,8], k: f32[2,8,8], v: f32[2,8,8], x: i64[]) {
          %0 = reshape(%x, shape=[1]) : i64[1]
          %1 = iota(size=8) : i64[8]
          %2 = reshape(%1, shape=[1,8]) : i64[1,8]
          %3 = ge(%0, %2) : bool[1,8]
          %4 = attention(%q, %k, %v, %3, scale=0.5) : f32[2,4,8]
          return %4
        }
        """,
        after="""
        graph g(q: f32[2,4,8], k: f32[2,8,8], v: f32[2,8,8], x: i64[]) {
          %0 = cast(%x) : i32[]
          %1 = const(value=1) : i32[]
          %2 = add(%0, %1) : i32[]
          %3 = attention(%q, %k, %v, _, %2, scale=0.5) : f32[2,4,8]
          return %3
        }
        """,
    )


def test_known_length() -> None:
    expect_pass(
        attention_sites,
        fires={"site.length": 1},
        before="""
        graph g(q: f32[2,4,8], k: f32[2,8,8], v: f32[2,8,8]) {
          %0 = iota(size=8) : i32[8]
          %1 = const(value=5) : i32[]
          %2 = lt(%0, %1) : bool[8]
          %3 = attention(%q, %k, %v, %2, scale=0.5) : f32[2,4,8]
          return %3
        }
        """,
        after="""
        graph g(q: f32[2,4,8], k: f32[2,8,8], v: f32[2,8,8]) {
          %0 = const(value=5) : i32[]
          %1 = attention(%q, %k, %v, _, %0, scale=0.5) : f32[2,4,8]
          return %1
        }
        """,
    )


def test_hole() -> None:
    """Padding between the valid prefix and the suffix."""
    expect_pass(
        attention_sites,
        fires={"site.hole": 1},
        before="""
        graph g(q: f32[2,4,8], k: f32[2,9,8], v: f32[2,9,8], n: i32[]) {
          %0 = iota(size=9) : i32[9]
          %1 = const(value=1) : i32[]
          %2 = add(%n, %1) : i32[]
          %3 = lt(%0, %2) : bool[9]
          %4 = const(value=6) : i32[]
          %5 = ge(%0, %4) : bool[9]
          %6 = or(%3, %5) : bool[9]
          %7 = reshape(%6, shape=[1,9]) : bool[1,9]
          %8 = attention(%q, %k, %v, %7, scale=0.5) : f32[2,4,8]
          return %8
        }
        """,
        after="""
        graph g(q: f32[2,4,8], k: f32[2,9,8], v: f32[2,9,8], n: i32[]) {
          %0 = const(value=1) : i32[]
          %1 = add(%n, %0) : i32[]
          %2 = attention(%q, %k, %v, _, %1, resume=6, scale=0.5) : f32[2,4,8]
          return %2
        }
        """,
    )


def test_hole_from_concatenated_validity() -> None:
    """Images are valid, the prompt up to n, the suffix is valid. Nothing says that n is not negative: max."""
    expect_pass(
        attention_sites,
        fires={"site.hole": 1},
        before="""
        graph g(q: f32[2,4,8], k: f32[2,9,8], v: f32[2,9,8], n: i32[]) {
          %0 = const(value=true) : bool[2]
          %1 = iota(size=4) : i32[4]
          %2 = lt(%1, %n) : bool[4]
          %3 = const(value=true) : bool[3]
          %4 = concat(%0, %2, %3, axis=-1) : bool[9]
          %5 = reshape(%4, shape=[1,1,9]) : bool[1,1,9]
          %6 = attention(%q, %k, %v, %5, scale=0.5) : f32[2,4,8]
          return %6
        }
        """,
        after="""
        graph g(q: f32[2,4,8], k: f32[2,9,8], v: f32[2,9,8], n: i32[]) {
          %0 = const(value=2) : i32[]
          %1 = add(%n, %0) : i32[]
          %2 = maximum(%1, %0) : i32[]
          %3 = attention(%q, %k, %v, _, %2, resume=6, scale=0.5) : f32[2,4,8]
          return %3
        }
        """,
    )


def test_suffix_that_is_hidden() -> None:
    """Keys after the prompt are never seen: n may be larger than the prompt: min."""
    expect_pass(
        attention_sites,
        fires={"site.length": 1},
        before="""
        graph g(q: f32[2,4,8], k: f32[2,9,8], v: f32[2,9,8], n: i32[]) {
          %0 = iota(size=4) : i32[4]
          %1 = lt(%0, %n) : bool[4]
          %2 = const(value=false) : bool[5]
          %3 = concat(%1, %2, axis=-1) : bool[9]
          %4 = attention(%q, %k, %v, %3, scale=0.5) : f32[2,4,8]
          return %4
        }
        """,
        after="""
        graph g(q: f32[2,4,8], k: f32[2,9,8], v: f32[2,9,8], n: i32[]) {
          %0 = const(value=4) : i32[]
          %1 = minimum(%n, %0) : i32[]
          %2 = attention(%q, %k, %v, _, %1, scale=0.5) : f32[2,4,8]
          return %2
        }
        """,
    )


def test_causal_and_length() -> None:
    expect_pass(
        attention_sites,
        fires={"site.causal+length": 1},
        before="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], n: i32[]) {
          %0 = iota(size=6) : i32[6]
          %1 = reshape(%0, shape=[6,1]) : i32[6,1]
          %2 = le(%0, %1) : bool[6,6]
          %3 = lt(%0, %n) : bool[6]
          %4 = and(%2, %3) : bool[6,6]
          %5 = attention(%q, %k, %v, %4, scale=0.5) : f32[2,6,8]
          return %5
        }
        """,
        after="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], n: i32[]) {
          %0 = attention(%q, %k, %v, _, %n, causal=true, scale=0.5) : f32[2,6,8]
          return %0
        }
        """,
    )


def test_decoding_position() -> None:
    """One query at a position that a state holds: it sees keys up to itself."""
    expect_pass(
        attention_sites,
        fires={"site.length": 1},
        before="""
        graph g(q: f32[2,1,8]; k: f32[2,9,8], v: f32[2,9,8], at: i64[]) {
          %0 = read(%k) : f32[2,9,8]
          %1 = read(%v) : f32[2,9,8]
          %2 = read(%at) : i64[]
          %3 = iota(size=1) : i64[1]
          %4 = add(%3, %2) : i64[1]
          %5 = reshape(%4, shape=[1,1]) : i64[1,1]
          %6 = iota(size=9) : i64[9]
          %7 = le(%6, %5) : bool[1,9]
          %8 = attention(%q, %0, %1, %7, scale=0.5) : f32[2,1,8]
          return %8
        }
        """,
        after="""
        graph g(q: f32[2,1,8]; k: f32[2,9,8], v: f32[2,9,8], at: i64[]) {
          %0 = read(%k) : f32[2,9,8]
          %1 = read(%v) : f32[2,9,8]
          %2 = read(%at) : i64[]
          %3 = cast(%2) : i32[]
          %4 = const(value=1) : i32[]
          %5 = add(%3, %4) : i32[]
          %6 = attention(%q, %0, %1, _, %5, scale=0.5) : f32[2,1,8]
          return %6
        }
        """,
    )


def test_several_queries_at_a_position() -> None:
    """Causal from a device position: no kernel flag says that."""
    expect_unchanged(
        attention_sites,
        """
        graph g(q: f32[2,3,8], k: f32[2,9,8], v: f32[2,9,8], at: i64[]) {
          %0 = iota(size=9) : i64[9]
          %1 = iota(size=3) : i64[3]
          %2 = add(%1, %at) : i64[3]
          %3 = reshape(%2, shape=[3, 1]) : i64[3,1]
          %4 = le(%0, %3) : bool[3,9]
          %5 = attention(%q, %k, %v, %4, scale=0.5) : f32[2,3,8]
          return %5
        }
        """,
        fires={"site.dense: causal from a device position": 1},
    )


def test_all_visible() -> None:
    """Longer than the fold of literals computes."""
    expect_pass(
        attention_sites,
        fires={"site.full": 1},
        before="""
        graph g(q: f32[2,80,8], k: f32[2,80,8], v: f32[2,80,8]) {
          %0 = iota(size=80) : i64[80]
          %1 = reshape(%0, shape=[80,1]) : i64[80,1]
          %2 = add(%0, %1) : i64[80,80]
          %3 = const(value=0) : i64[]
          %4 = ge(%2, %3) : bool[80,80]
          %5 = attention(%q, %k, %v, %4, scale=0.5) : f32[2,80,8]
          return %5
        }
        """,
        after="""
        graph g(q: f32[2,80,8], k: f32[2,80,8], v: f32[2,80,8]) {
          %0 = attention(%q, %k, %v, scale=0.5) : f32[2,80,8]
          return %0
        }
        """,
    )


def test_padding_given_by_the_caller() -> None:
    """The part that is known leaves the mask."""
    expect_pass(
        attention_sites,
        fires={"site.dense: depends on floats (x)": 1, "site.causal+mask": 1},
        before="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], x: f32[6]) {
          %0 = iota(size=6) : i64[6]
          %1 = reshape(%0, shape=[6,1]) : i64[6,1]
          %2 = le(%0, %1) : bool[6,6]
          %3 = const(value=-2.5) : f32[]
          %4 = gt(%x, %3) : bool[6]
          %5 = and(%2, %4) : bool[6,6]
          %6 = attention(%q, %k, %v, %5, scale=0.5) : f32[2,6,8]
          return %6
        }
        """,
        after="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], x: f32[6]) {
          %0 = const(value=-2.5) : f32[]
          %1 = gt(%x, %0) : bool[6]
          %2 = attention(%q, %k, %v, %1, causal=true, scale=0.5) : f32[2,6,8]
          return %2
        }
        """,
    )


def test_mask_from_an_input() -> None:
    expect_unchanged(
        attention_sites,
        """
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], x: f32[6]) {
          %0 = const(value=-2.5) : f32[]
          %1 = gt(%x, %0) : bool[6]
          %2 = attention(%q, %k, %v, %1, scale=0.5) : f32[2,6,8]
          return %2
        }
        """,
        fires={"site.dense: depends on floats (x)": 1},
    )


def test_two_lengths() -> None:
    """One becomes the length, the other stays a mask."""
    expect_pass(
        attention_sites,
        fires={"site.dense: depends on two device scalars": 1, "site.length+mask": 1},
        before="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], n: i32[], m: i32[]) {
          %0 = iota(size=6) : i32[6]
          %1 = lt(%0, %n) : bool[6]
          %2 = lt(%0, %m) : bool[6]
          %3 = and(%1, %2) : bool[6]
          %4 = attention(%q, %k, %v, %3, scale=0.5) : f32[2,6,8]
          return %4
        }
        """,
        after="""
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], n: i32[], m: i32[]) {
          %0 = iota(size=6) : i32[6]
          %1 = lt(%0, %m) : bool[6]
          %2 = attention(%q, %k, %v, %1, %n, scale=0.5) : f32[2,6,8]
          return %2
        }
        """,
    )


def test_left_padding() -> None:
    """The first keys are hidden: lengths cut at the end."""
    expect_unchanged(
        attention_sites,
        """
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], n: i32[]) {
          %0 = iota(size=6) : i32[6]
          %1 = ge(%0, %n) : bool[6]
          %2 = attention(%q, %k, %v, %1, scale=0.5) : f32[2,6,8]
          return %2
        }
        """,
        fires={"site.dense: hides the first keys": 1},
    )


def test_view_that_may_be_missing() -> None:
    """A second scalar decides about a block of keys."""
    expect_unchanged(
        attention_sites,
        """
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], view: bool[1]) {
          %0 = const(value=true) : bool[3]
          %1 = broadcast(%view, shape=[3]) : bool[3]
          %2 = concat(%0, %1, axis=-1) : bool[6]
          %3 = attention(%q, %k, %v, %2, scale=0.5) : f32[2,6,8]
          return %3
        }
        """,
        fires={"site.dense: depends on view": 1},
    )


def test_heads_with_masks_of_their_own() -> None:
    expect_unchanged(
        attention_sites,
        """
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8]) {
          %0 = iota(size=6) : i64[6]
          %1 = iota(size=2) : i64[2]
          %2 = const(value=3) : i64[]
          %3 = add(%1, %2) : i64[2]
          %4 = reshape(%3, shape=[2, 1, 1]) : i64[2,1,1]
          %5 = lt(%0, %4) : bool[2,1,6]
          %6 = attention(%q, %k, %v, %5, scale=0.5) : f32[2,6,8]
          return %6
        }
        """,
        fires={"site.dense: differs between heads or batches": 1},
    )


def test_every_other_key() -> None:
    expect_unchanged(
        attention_sites,
        """
        graph g(q: f32[2,6,8], k: f32[2,6,8], v: f32[2,6,8], n: i32[]) {
          %0 = iota(size=6) : i32[6]
          %1 = const(value=2) : i32[]
          %2 = mul(%0, %1) : i32[6]
          %3 = const(value=4) : i32[]
          %4 = add(%n, %3) : i32[]
          %5 = lt(%2, %4) : bool[6]
          %6 = attention(%q, %k, %v, %5, scale=0.5) : f32[2,6,8]
          return %6
        }
        """,
        fires={"site.dense: is no run of keys up to a length": 1},
    )
