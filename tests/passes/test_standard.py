"""The pipeline: what its order promises, on a layer with everything in it."""

from __future__ import annotations

from collections import Counter

from frtc.lowering.ir import Node
from frtc.passes.pipeline import Options, name_of, run_passes
from frtc.passes.standard import pipeline
from tests.passes.expect import as_module, plain

LAYER = """
module m

graph weights() {
  %0 = tensor(key=c) : f32[8,4]
  %1 = tensor(key=g) : f32[8,4]
  %2 = tensor(key=k) : f32[4,4]
  %3 = tensor(key=n) : f32[4]
  %4 = tensor(key=o) : f32[4,8]
  %5 = tensor(key=q) : f32[8,4]
  %6 = tensor(key=u) : f32[8,4]
  %7 = tensor(key=v) : f32[4,4]
  %8 = tensor(key=d) : f32[4,8]
  return c=%0, d=%8, g=%1, k=%2, n=%3, o=%4, q=%5, u=%6, v=%7
}

graph layer(x: f32[3,4], n: i32[], step: i32[]) {
  @c : f32[8,4]
  @d : f32[4,8]
  @g : f32[8,4]
  @k : f32[4,4]
  @n : f32[4]
  @o : f32[4,8]
  @q : f32[8,4]
  @u : f32[8,4]
  @v : f32[4,4]
  %0 = rms_norm(%x, @n, eps=1e-06, offset=1.0) : f32[3,4]
  %1 = linear(%0, @q) : f32[3,8]
  %2 = reshape(%1, shape=[3,2,4]) : f32[3,2,4]
  %3 = transpose(%2, perm=[-2,-3,-1]) : f32[2,3,4]
  %4 = iota(size=3) : i32[3]
  %5 = add(%4, %n) : i32[3]
  %6 = cast(%5) : f32[3]
  %7 = reshape(%6, shape=[3,1]) : f32[3,1]
  %8 = const(data="0000803f0000003f") : f32[2]
  %9 = mul(%7, %8) : f32[3,2]
  %10 = cos(%9) : f32[3,2]
  %11 = sin(%9) : f32[3,2]
  %12 = rope(%3, %10, %11) : f32[2,3,4]
  %13 = linear(%0, @k) : f32[3,4]
  %14 = reshape(%13, shape=[3,1,4]) : f32[3,1,4]
  %15 = transpose(%14, perm=[-2,-3,-1]) : f32[1,3,4]
  %16 = rope(%15, %10, %11) : f32[1,3,4]
  %17 = linear(%0, @v) : f32[3,4]
  %18 = reshape(%17, shape=[3,1,4]) : f32[3,1,4]
  %19 = transpose(%18, perm=[-2,-3,-1]) : f32[1,3,4]
  %20 = attention(%12, %16, %19, scale=0.5) : f32[2,3,4]
  %21 = transpose(%20, perm=[-2,-3,-1]) : f32[3,2,4]
  %22 = reshape(%21, shape=[3,8]) : f32[3,8]
  %23 = linear(%22, @o) : f32[3,4]
  %24 = add(%x, %23) : f32[3,4]
  %25 = const(data="0000803f00000040000000400000803f0000803f00000040000000400000803f") : f32[2,4]
  %26 = index(%25, %step) : f32[4]
  %27 = linear(%26, @c) : f32[8]
  %28 = slice(%27, axis=-1, start=0, stop=4) : f32[4]
  %29 = slice(%27, axis=-1, start=4, stop=8) : f32[4]
  %30 = ada_rms_norm(%24, %28, %29, eps=1e-06) : f32[3,4]
  %31 = gated_linear(%30, @g, @u, act=gelu_tanh) : f32[3,8]
  %32 = linear(%31, @d) : f32[3,4]
  %33 = add(%24, %32) : f32[3,4]
  return x=%33
}

schedule {
  repeat 2 step {
    run layer
  }
  return y=x
}
"""


def test_layer() -> None:
    """Seven launches remain of a layer, the angles are computed once, and every pass keeps the meaning."""
    module, report = run_passes(as_module(LAYER), pipeline(everything), Options(check=2))
    assert [g.name for g in module.graphs] == ["layer.once", "layer"]
    free = ("input", "weight", "view", "item", "index", "reshape", "const")
    ops = Counter(n.op for n in module.graph("layer").nodes if n.op not in free)
    assert ops == Counter("rms_norm linear_rope_qkv attention linear_moments gated_linear linear".split())
    assert [name for name, _ in module.weights.outputs] == [
        "c", "c~2", "d", "g|u", "o", "q|k|v", "table.const", "table.view",
    ]  # fmt: skip
    fired = {
        "fold_constants",
        "hoist",
        "merge_linears",
        "fold_norms",
        "fuse_epilogue",
        "interleave_gate",
        "fuse_rope_qkv",
    }
    assert fired <= report.fired.keys()


def test_a_target_without_kernels_fuses_nothing() -> None:
    """What the model means stays legal and canonical where no kernel fuses anything."""
    module, report = run_passes(as_module(LAYER), pipeline(lambda node: False), Options(check=2))
    assert not {"fuse_epilogue", "interleave_gate", "fuse_rope_qkv", "fuse_pointwise"} & report.fired.keys()
    assert module.graph("layer").count("add") == 2


def test_second_run_changes_nothing() -> None:
    module, _ = run_passes(as_module(LAYER), pipeline(everything))
    again, _ = run_passes(module, pipeline(everything))
    assert plain(again) == plain(module)
    assert again.weights.outputs == module.weights.outputs


def test_passes_by_name() -> None:
    names = [name_of(p) for p in pipeline(everything)]
    assert len(set(names)) == len(names)
    assert names[0] == "canonicalize" and names[-1] == "name_weights"
    assert names.index("fuse_epilogues") < names.index("layout") < names.index("fuse_rope_qkv")


def everything(node: Node) -> bool:
    return True
