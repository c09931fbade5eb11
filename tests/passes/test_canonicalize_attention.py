"""canonicalize: attention."""

from __future__ import annotations

from frtc.passes.canonicalize import canonicalize
from tests.passes.expect import expect_pass, expect_unchanged


def test_eager_with_additive_mask() -> None:
    """Hugging Face's eager code in 16 bits: scaled after the product, probabilities rounded."""
    expect_pass(
        canonicalize,
        fires={"logic": 3, "literals": 1, "algebra": 1, "casts": 1, "attention": 1, "shape": 1},
        before="""
        graph g(q: bf16[1,4,3,8], k: bf16[1,4,5,8], v: bf16[1,4,5,8], seen: bool[1,1,3,5]) {
          %0 = transpose(%k, perm=[-1,-2]) : bf16[1,4,8,5]
          %1 = matmul(%q, %0) : bf16[1,4,3,5]
          %2 = const(value=0.35) : f32[]
          %3 = mul(%1, %2) : bf16[1,4,3,5]
          %4 = const(value=true) : bool[]
          %5 = or(%seen, %4) : bool[1,1,3,5]
          %6 = and(%5, %seen) : bool[1,1,3,5]
          %7 = const(value=0.0) : bf16[]
          %8 = const(value=-3.3895313892515355e+38) : bf16[]
          %9 = where(%6, %7, %8) : bf16[1,1,3,5]
          %10 = add(%3, %9) : bf16[1,4,3,5]
          %11 = softmax(%10) : f32[1,4,3,5]
          %12 = cast(%11) : bf16[1,4,3,5]
          %13 = matmul(%12, %v) : bf16[1,4,3,8]
          return %13
        }
        """,
        after="""
        graph g(q: bf16[1,4,3,8], k: bf16[1,4,5,8], v: bf16[1,4,5,8], seen: bool[1,1,3,5]) {
          %0 = attention(%q, %k, %v, %seen, probs=bf16, scale=0.35) : bf16[1,4,3,8]
          return %0
        }
        """,
    )


def test_scale_on_the_query() -> None:
    """Below the split into heads, before the product."""
    expect_pass(
        canonicalize,
        fires={"algebra": 1, "attention": 1, "attention_heads": 2, "shape": 1},
        before="""
        graph g(x: f32[3,32], k: f32[4,5,8], v: f32[4,5,8]) {
          %0 = const(value=0.25) : f32[]
          %1 = mul(%x, %0) : f32[3,32]
          %2 = reshape(%1, shape=[3,4,8]) : f32[3,4,8]
          %3 = transpose(%2, perm=[-2,-3,-1]) : f32[4,3,8]
          %4 = const(value=2.0) : f32[]
          %5 = div(%k, %4) : f32[4,5,8]
          %6 = transpose(%5, perm=[-1,-2]) : f32[4,8,5]
          %7 = matmul(%3, %6) : f32[4,3,5]
          %8 = softmax(%7) : f32[4,3,5]
          %9 = matmul(%8, %v) : f32[4,3,8]
          return %9
        }
        """,
        after="""
        graph g(x: f32[3,32], k: f32[4,5,8], v: f32[4,5,8]) {
          %0 = reshape(%x, shape=[3, 4, 8]) : f32[3,4,8]
          %1 = transpose(%0, perm=[-2, -3, -1]) : f32[4,3,8]
          %2 = attention(%1, %k, %v, scale=0.125) : f32[4,3,8]
          return %2
        }
        """,
    )


def test_masked_fill() -> None:
    """Scores are overwritten where a key is hidden."""
    expect_pass(
        canonicalize,
        fires={"attention": 1, "shape": 1, "logic": 1},
        before="""
        graph g(q: f32[4,3,8], k: f32[4,5,8], v: f32[4,5,8]) {
          %0 = transpose(%k, perm=[-1,-2]) : f32[4,8,5]
          %1 = matmul(%q, %0) : f32[4,3,5]
          %2 = iota(size=5) : i64[5]
          %3 = const(value=3) : i64[]
          %4 = ge(%2, %3) : bool[5]
          %5 = const(value=-inf) : f32[]
          %6 = where(%4, %5, %1) : f32[4,3,5]
          %7 = softmax(%6) : f32[4,3,5]
          %8 = matmul(%7, %v) : f32[4,3,8]
          return %8
        }
        """,
        after="""
        graph g(q: f32[4,3,8], k: f32[4,5,8], v: f32[4,5,8]) {
          %0 = iota(size=5) : i64[5]
          %1 = const(value=3) : i64[]
          %2 = lt(%0, %1) : bool[5]
          %3 = attention(%q, %k, %v, %2, scale=1.0) : f32[4,3,8]
          return %3
        }
        """,
    )


def test_two_masks_and_an_inverted_one() -> None:
    expect_pass(
        canonicalize,
        fires={"attention": 1, "shape": 1, "logic": 2},
        before="""
        graph g(q: f32[4,5,8], k: f32[4,5,8], v: f32[4,5,8], n: i32[]) {
          %0 = iota(size=5) : i32[5]
          %1 = reshape(%0, shape=[5,1]) : i32[5,1]
          %2 = gt(%0, %1) : bool[5,5]
          %3 = const(value=0.0) : f32[]
          %4 = const(value=-1e+30) : f32[]
          %5 = where(%2, %4, %3) : f32[5,5]
          %6 = lt(%0, %n) : bool[5]
          %7 = cast(%6) : f32[5]
          %8 = const(value=1.0) : f32[]
          %9 = sub(%8, %7) : f32[5]
          %10 = mul(%9, %4) : f32[5]
          %11 = add(%5, %10) : f32[5,5]
          %12 = transpose(%k, perm=[-1,-2]) : f32[4,8,5]
          %13 = matmul(%q, %12) : f32[4,5,5]
          %14 = add(%11, %13) : f32[4,5,5]
          %15 = softmax(%14) : f32[4,5,5]
          %16 = matmul(%15, %v) : f32[4,5,8]
          return %16
        }
        """,
        after="""
        graph g(q: f32[4,5,8], k: f32[4,5,8], v: f32[4,5,8], n: i32[]) {
          %0 = iota(size=5) : i32[5]
          %1 = reshape(%0, shape=[5, 1]) : i32[5,1]
          %2 = le(%0, %1) : bool[5,5]
          %3 = lt(%0, %n) : bool[5]
          %4 = and(%2, %3) : bool[5,5]
          %5 = attention(%q, %k, %v, %4, scale=1.0) : f32[4,5,8]
          return %5
        }
        """,
    )


def test_bias_that_is_no_mask() -> None:
    """A learned bias has no place in `attention`."""
    expect_unchanged(
        canonicalize,
        """
        graph g(q: f32[4,3,8], k: f32[4,5,8], v: f32[4,5,8]) {
          @bias : f32[4,3,5]
          %0 = transpose(%k, perm=[-1, -2]) : f32[4,8,5]
          %1 = matmul(%q, %0) : f32[4,3,5]
          %2 = add(%1, @bias) : f32[4,3,5]
          %3 = softmax(%2) : f32[4,3,5]
          %4 = matmul(%3, %v) : f32[4,3,8]
          return %4
        }
        """,
    )


def test_mask_that_is_not_huge() -> None:
    """-100 discourages, it does not hide."""
    expect_unchanged(
        canonicalize,
        """
        graph g(q: f32[4,3,8], k: f32[4,5,8], v: f32[4,5,8], seen: bool[3,5]) {
          %0 = transpose(%k, perm=[-1, -2]) : f32[4,8,5]
          %1 = matmul(%q, %0) : f32[4,3,5]
          %2 = const(value=0.0) : f32[]
          %3 = const(value=-100.0) : f32[]
          %4 = where(%seen, %2, %3) : f32[3,5]
          %5 = add(%1, %4) : f32[4,3,5]
          %6 = softmax(%5) : f32[4,3,5]
          %7 = matmul(%6, %v) : f32[4,3,8]
          return %7
        }
        """,
    )


def test_softmax_over_queries() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(q: f32[4,3,8], k: f32[4,5,8], v: f32[4,5,8]) {
          %0 = transpose(%k, perm=[-1, -2]) : f32[4,8,5]
          %1 = matmul(%q, %0) : f32[4,3,5]
          %2 = softmax(%1, axis=-2) : f32[4,3,5]
          %3 = matmul(%2, %v) : f32[4,3,8]
          return %3
        }
        """,
    )


def test_soft_cap() -> None:
    """tanh on the scores is another attention."""
    expect_unchanged(
        canonicalize,
        """
        graph g(q: f32[4,3,8], k: f32[4,5,8], v: f32[4,5,8]) {
          %0 = transpose(%k, perm=[-1, -2]) : f32[4,8,5]
          %1 = matmul(%q, %0) : f32[4,3,5]
          %2 = tanh(%1) : f32[4,3,5]
          %3 = softmax(%2) : f32[4,3,5]
          %4 = matmul(%3, %v) : f32[4,3,8]
          return %4
        }
        """,
    )


def test_repeated_key_heads() -> None:
    """Hugging Face's repeat_kv."""
    expect_pass(
        canonicalize,
        fires={"shape": 1, "attention_heads": 1},
        before="""
        graph g(q: bf16[1,4,3,8], k: bf16[1,2,5,8], x: bf16[1,5,16]) {
          %0 = reshape(%x, shape=[1,5,2,8]) : bf16[1,5,2,8]
          %1 = transpose(%0, perm=[-2,-3,-1]) : bf16[1,2,5,8]
          %2 = reshape(%1, shape=[1,2,1,5,8]) : bf16[1,2,1,5,8]
          %3 = broadcast(%2, shape=[1,2,2,5,8]) : bf16[1,2,2,5,8]
          %4 = reshape(%3, shape=[1,4,5,8]) : bf16[1,4,5,8]
          %5 = reshape(%k, shape=[1,2,1,5,8]) : bf16[1,2,1,5,8]
          %6 = broadcast(%5, shape=[1,2,2,5,8]) : bf16[1,2,2,5,8]
          %7 = reshape(%6, shape=[1,4,5,8]) : bf16[1,4,5,8]
          %8 = attention(%q, %7, %4, scale=0.5) : bf16[1,4,3,8]
          return %8
        }
        """,
        after="""
        graph g(q: bf16[1,4,3,8], k: bf16[1,2,5,8], x: bf16[1,5,16]) {
          %0 = reshape(%x, shape=[1, 5, 2, 8]) : bf16[1,5,2,8]
          %1 = transpose(%0, perm=[-2, -3, -1]) : bf16[1,2,5,8]
          %2 = attention(%q, %k, %1, scale=0.5) : bf16[1,4,3,8]
          return %2
        }
        """,
    )


def test_one_key_head_for_all() -> None:
    expect_pass(
        canonicalize,
        fires={"attention_heads": 1},
        before="""
        graph g(q: f32[4,3,8], k: f32[1,5,8], v: f32[1,5,8]) {
          %0 = broadcast(%k, shape=[4,5,8]) : f32[4,5,8]
          %1 = broadcast(%v, shape=[4,5,8]) : f32[4,5,8]
          %2 = attention(%q, %0, %1, scale=0.5) : f32[4,3,8]
          return %2
        }
        """,
        after="""
        graph g(q: f32[4,3,8], k: f32[1,5,8], v: f32[1,5,8]) {
          %0 = attention(%q, %k, %v, scale=0.5) : f32[4,3,8]
          return %0
        }
        """,
    )


def test_heads_repeated_as_a_whole() -> None:
    """0 1 0 1 is not 0 0 1 1."""
    expect_unchanged(
        canonicalize,
        """
        graph g(q: f32[4,3,8], k: f32[2,5,8], v: f32[2,5,8]) {
          %0 = reshape(%k, shape=[1, 2, 5, 8]) : f32[1,2,5,8]
          %1 = broadcast(%0, shape=[2, 2, 5, 8]) : f32[2,2,5,8]
          %2 = reshape(%1, shape=[4, 5, 8]) : f32[4,5,8]
          %3 = reshape(%v, shape=[1, 2, 5, 8]) : f32[1,2,5,8]
          %4 = broadcast(%3, shape=[2, 2, 5, 8]) : f32[2,2,5,8]
          %5 = reshape(%4, shape=[4, 5, 8]) : f32[4,5,8]
          %6 = attention(%q, %2, %5, scale=0.5) : f32[4,3,8]
          return %6
        }
        """,
    )


def test_only_keys_repeated() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(q: f32[4,3,8], k: f32[2,5,8], v: f32[4,5,8]) {
          %0 = reshape(%k, shape=[2, 1, 5, 8]) : f32[2,1,5,8]
          %1 = broadcast(%0, shape=[2, 2, 5, 8]) : f32[2,2,5,8]
          %2 = reshape(%1, shape=[4, 5, 8]) : f32[4,5,8]
          %3 = attention(%q, %2, %v, scale=0.5) : f32[4,3,8]
          return %3
        }
        """,
    )


def test_heads_of_one_query_as_rows() -> None:
    """Decoding: the query heads of a key head come as rows."""
    expect_pass(
        canonicalize,
        fires={"attention_heads": 1, "shape": 1},
        before="""
        graph g(q: f32[1,4,1,8], k: f32[1,2,5,8], v: f32[1,2,5,8]) {
          %1 = iota(size=5) : i64[5]
          %2 = const(value=4) : i64[]
          %3 = lt(%1, %2) : bool[5]
          %4 = reshape(%3, shape=[1,1,1,5]) : bool[1,1,1,5]
          %5 = reshape(%q, shape=[1,2,2,8]) : f32[1,2,2,8]
          %6 = attention(%5, %k, %v, %4, scale=0.5) : f32[1,2,2,8]
          %7 = reshape(%6, shape=[1,4,1,8]) : f32[1,4,1,8]
          return %7
        }
        """,
        after="""
        graph g(q: f32[1,4,1,8], k: f32[1,2,5,8], v: f32[1,2,5,8]) {
          %0 = iota(size=5) : i64[5]
          %1 = const(value=4) : i64[]
          %2 = lt(%0, %1) : bool[5]
          %3 = reshape(%2, shape=[1, 1, 1, 5]) : bool[1,1,1,5]
          %4 = attention(%q, %k, %v, %3, scale=0.5) : f32[1,4,1,8]
          return %4
        }
        """,
    )


def test_rows_with_masks_of_their_own() -> None:
    expect_unchanged(
        canonicalize,
        """
        graph g(q: f32[1,4,1,8], k: f32[1,2,5,8], v: f32[1,2,5,8]) {
          %0 = reshape(%q, shape=[1, 2, 2, 8]) : f32[1,2,2,8]
          %1 = iota(size=5) : i64[5]
          %2 = iota(size=2) : i64[2]
          %3 = reshape(%2, shape=[2, 1]) : i64[2,1]
          %4 = le(%1, %3) : bool[2,5]
          %5 = attention(%0, %k, %v, %4, scale=0.5) : f32[1,2,2,8]
          %6 = reshape(%5, shape=[1, 4, 1, 8]) : f32[1,4,1,8]
          return %6
        }
        """,
    )


def test_mask_that_hides_nothing() -> None:
    expect_pass(
        canonicalize,
        fires={"literals": 2, "attention": 1},
        before="""
        graph g(q: f32[4,3,8], k: f32[4,5,8], v: f32[4,5,8]) {
          %0 = iota(size=5) : i64[5]
          %1 = const(value=0) : i64[]
          %2 = ge(%0, %1) : bool[5]
          %3 = broadcast(%2, shape=[1,3,5]) : bool[1,3,5]
          %4 = attention(%q, %k, %v, %3, scale=0.5) : f32[4,3,8]
          return %4
        }
        """,
        after="""
        graph g(q: f32[4,3,8], k: f32[4,5,8], v: f32[4,5,8]) {
          %0 = attention(%q, %k, %v, scale=0.5) : f32[4,3,8]
          return %0
        }
        """,
    )


def test_one_head_without_an_axis() -> None:
    expect_pass(
        canonicalize,
        fires={"attention": 1, "shape": 1},
        before="""
        graph g(q: f32[3,8], k: f32[5,8], v: f32[5,8]) {
          %0 = transpose(%k, perm=[-1,-2]) : f32[8,5]
          %1 = matmul(%q, %0) : f32[3,5]
          %2 = const(value=0.25) : f32[]
          %3 = mul(%1, %2) : f32[3,5]
          %4 = softmax(%3) : f32[3,5]
          %5 = matmul(%4, %v) : f32[3,8]
          return %5
        }
        """,
        after="""
        graph g(q: f32[3,8], k: f32[5,8], v: f32[5,8]) {
          %0 = reshape(%q, shape=[1, 3, 8]) : f32[1,3,8]
          %1 = reshape(%k, shape=[1, 5, 8]) : f32[1,5,8]
          %2 = reshape(%v, shape=[1, 5, 8]) : f32[1,5,8]
          %3 = attention(%0, %1, %2, scale=0.25) : f32[1,3,8]
          %4 = reshape(%3, shape=[3, 8]) : f32[3,8]
          return %4
        }
        """,
    )


def test_same_number_added_everywhere() -> None:
    """Hugely negative, but for every key: nothing is hidden."""
    expect_unchanged(
        canonicalize,
        """
        graph g(q: f32[4,3,8], k: f32[4,5,8], v: f32[4,5,8]) {
          %0 = transpose(%k, perm=[-1, -2]) : f32[4,8,5]
          %1 = matmul(%q, %0) : f32[4,3,5]
          %2 = const(value=-1000000000.0) : f32[]
          %3 = add(%1, %2) : f32[4,3,5]
          %4 = softmax(%3) : f32[4,3,5]
          %5 = matmul(%4, %v) : f32[4,3,8]
          return %5
        }
        """,
    )
