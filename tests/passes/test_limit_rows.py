"""limit_rows: rows that nothing reads are not computed; what reads all of a value, or another length, prevents it."""

from __future__ import annotations

import numpy as np

from frtc.lowering.interpret import run_module
from frtc.lowering.ir import walk
from frtc.lowering.ops import OPS
from frtc.passes.limit_rows import limit_rows, returned_rows
from tests.passes.expect import as_module, expect_pass, expect_unchanged

# A prefix whose keys one program reads up to its length, which a program ahead of the loop computes.
MODULE = """
module m

graph weights() {{
  %0 = tensor(key=f) : f32[8,4]
  %1 = tensor(key=k) : f32[4,4]
  %2 = tensor(key=o) : f32[4,4]
  %3 = tensor(key=u) : f32[8,4]
  return f=%0, k=%1, o=%2, u=%3
}}

graph prefix(x: f32[6,4], n: i32[]) {{
  @f : f32[8,4]
  @k : f32[4,4]
  @o : f32[4,4]
  @u : f32[8,4]
  %0 = rms_norm(%x, eps=1e-06) : f32[6,4]
  %4 = const(value=1) : i32[]
  %5 = add(%n, %4) : i32[]
  {q_linear}
  %2 = reshape(%1, shape=[6,2,2]) : f32[6,2,2]
  %3 = transpose(%2, perm=[-2,-3,-1]) : f32[2,6,2]
  %6 = attention(%3, %3, %3, _, %5, scale=0.5) : f32[2,6,2]
  %7 = transpose(%6, perm=[-2,-3,-1]) : f32[6,2,2]
  %8 = reshape(%7, shape=[6,4]) : f32[6,4]
  {o_linear}
  {gated}
  %11 = slice(%10, axis=-1, start=0, stop=4) : f32[6,4]
  %12 = add(%11, %9) : f32[6,4]
  {k_linear}
  %14 = reshape(%13, shape=[1,6,4]) : f32[1,6,4]
  return k={result}
}}

graph step.once(n: i32[]) {{
  %0 = const(value={once}) : i32[]
  %1 = add(%n, %0) : i32[]
  return step.h0=%1
}}

graph step(y: f32[2,4], k: f32[1,6,4], step.h0: i32[], i: i32[]) {{
  %0 = reshape(%y, shape=[1,2,4]) : f32[1,2,4]
  {mean}
  %2 = concat(%k, %0, axis=-2) : f32[1,8,4]
  {attention}
  {sum}
  %6 = reshape(%5, shape=[2,4]) : f32[2,4]
  return y=%6
}}

schedule {{
  {first}run prefix
  {let}run step.once
  repeat 2 i {{
    run step
  }}
  return y=y{outputs}
}}
"""
WHOLE = {
    "q_linear": "%1 = linear(%0, @k) : f32[6,4]",
    "o_linear": "%9 = linear(%8, @o, _, %x) : f32[6,4]",
    "gated": "%10 = gated_linear(%9, @f, @u, act=silu) : f32[6,8]",
    "k_linear": "%13 = linear(%12, @k) : f32[6,4]",
    "result": "%14",
    "once": "1",
    "mean": "",
    "attention": "%5 = attention(%0, %2, %2, _, %step.h0, scale=0.5, resume=6) : f32[1,2,4]",
    "sum": "",
    "first": "",
    "let": "",
    "outputs": "",
}
LIMITED = {
    "q_linear": "%1 = linear(%0, @k, _, _, _, %5) : f32[6,4]",
    "o_linear": "%9 = linear(%8, @o, _, %x, _, %5) : f32[6,4]",
    "gated": "%10 = gated_linear(%9, @f, @u, %5, act=silu) : f32[6,8]",
    "k_linear": "%13 = linear(%12, @k, _, _, _, %5) : f32[6,4]",
}


def module(**parts: str) -> str:
    return MODULE.format(**{**WHOLE, **parts})


def stays(**parts: str) -> None:
    expect_unchanged(limit_rows, module(**parts))


def test_through_a_layer_and_across_programs() -> None:
    """The length is `n + 1` here and `step.h0` there; the loop's own keys come after `resume`."""
    expect_pass(limit_rows, before=module(), after=module(**LIMITED), fires={"limit_rows": 4})


def test_what_is_returned() -> None:
    rows = returned_rows(as_module(module()))
    assert {key: (need.axis, need.resume) for key, need in rows.items()} == {("prefix", "k"): (-2, -1)}


def test_rows_beyond_are_unspecified_and_reach_nothing() -> None:
    """The interpreter leaves NaN where nobody may read."""
    after, rng = limit_rows(as_module(module())), np.random.default_rng(0)
    weights = {name: rng.standard_normal((rows, 4)) for name, rows in (("f", 8), ("k", 4), ("o", 4), ("u", 8))}
    inputs = {"x": rng.standard_normal((6, 4)), "y": rng.standard_normal((2, 4)), "n": np.array(2)}
    env = run_module(after, inputs, weights.__getitem__)
    assert np.isnan(env["k"][0]).tolist() == [[j >= 3] * 4 for j in range(6)]
    assert np.isfinite(env["y"]).all()


def test_a_result_of_the_module() -> None:
    """Near miss: whoever asks for k sees all of it."""
    stays(outputs=", k=k")


def test_a_copy_of_it() -> None:
    stays(let="let kept = k\n  ")


def test_another_length() -> None:
    """Near miss: the loop reads one row more than the prefix's own attention does of q, k and v."""
    prefix, *_ = limit_rows(as_module(module(once="2"))).graphs
    rows = [n.args[OPS[n.op].operands.index("rows")] for n in prefix.nodes if n.op in ("linear", "gated_linear")]
    assert rows[0] is None and len(set(rows[1:])) == 1 and rows[1] is not None
    (limit,) = {n["value"] for n in walk([rows[1]]) if n.op == "const"}
    assert limit == 2


def test_a_length_that_the_loop_changes() -> None:
    stays(attention="%5 = attention(%0, %2, %2, _, %i, scale=0.5, resume=6) : f32[1,2,4]")


def test_a_length_that_the_schedule_sets() -> None:
    """Near miss: n is another number before and after."""
    stays(first="let n = m\n  ")


def test_resume_inside_the_value() -> None:
    """Near miss: of the prefix's own rows, the last one is read too."""
    stays(attention="%5 = attention(%0, %2, %2, _, %step.h0, scale=0.5, resume=5) : f32[1,2,4]")


def test_no_length() -> None:
    stays(attention="%5 = attention(%0, %2, %2, scale=0.5) : f32[1,2,4]")


def test_something_else_reads_it() -> None:
    """Near miss: a mean over all of its rows, beside the attention that reads some."""
    stays(
        mean="%1 = reduce_mean(%k, axes=[-2], keepdims=true) : f32[1,1,4]",
        attention="%4 = attention(%0, %2, %2, _, %step.h0, scale=0.5, resume=6) : f32[1,2,4]",
        sum="%5 = add(%4, %1) : f32[1,2,4]",
    )


def test_residual_stream_read_in_full() -> None:
    """Near miss: the last sum leaves the module whole; only the keys that follow it do not."""
    whole = {"result": "%14, s=%12", "outputs": ", s=s"}
    after = module(**whole, k_linear=LIMITED["k_linear"])
    expect_pass(limit_rows, before=module(**whole), after=after, fires={"limit_rows": 1})
