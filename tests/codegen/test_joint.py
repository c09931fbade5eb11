"""Pointwise ops with several results: each lies where its value is wanted; the Plan computes what the module says."""

from __future__ import annotations

from frtc.codegen.fusible import implements
from frtc.kernels.targets import load_targets
from frtc.lowering.ir import Module
from frtc.passes.join_pointwise import join_pointwise
from frtc.runtime.plan import ARENA, SLOT, STATE
from tests.codegen.emulated import agree, copies, module_of, ops

JOIN = join_pointwise(implements(load_targets()["hopper"]))


def joined(text: str) -> Module:
    return JOIN(module_of(text))


TWO = """
module m

graph once(n: i32[], x: f32[4,8], i: i32[4,1]) {
  %0 = pointwise(%n, %i, expr=[[add, 0, 1], [cast, 2, f32], [cos, 3]], results=[4], shape=[4,8]) : f32[4,8]
  %1 = pointwise(%n, %i, expr=[[add, 0, 1], [cast, 2, f32], [sin, 3]], results=[4], shape=[4,8]) : f32[4,8]
  %2 = pointwise(%n, %i, expr=[[lt, 0, 1]], results=[2], shape=[4,8]) : bool[4,8]
  %3 = where(%2, %x, %0) : f32[4,8]
  %4 = view(%1, shape=[8,4], strides=[1,8]) : f32[8,4]
  return cos=%0, sin=%4, y=%3
}

graph step(y: f32[4,8], cos: f32[4,8], sin: f32[8,4]) {
  %0 = view(%sin, shape=[4,8], strides=[1,4]) : f32[4,8]
  %1 = pointwise(%cos, %0, %y, expr=[[mul, 0, 2], [mul, 1, 2], [sub, 3, 4]], results=[5], shape=[4,8]) : f32[4,8]
  return z=%1
}

schedule {
  run once
  run step
  return y=y, z=z
}
"""


def test_results_lie_at_home() -> None:
    """One is a result of its program, one is behind a view of it, one stays inside; nothing is copied."""
    result = agree(joined(TWO))
    assert ops(result, "once") == ["pointwise", "pointwise"] and copies(result, "once") == []
    (three, _) = result.emitted["once"]
    assert [(p.dtype, p.buffer.space) for p in three.results] == [("f32", STATE), ("f32", STATE), ("bool", ARENA)]
    assert ops(result, "step") == ["pointwise"] and copies(result, "step") == []


def test_both_results_of_an_inference() -> None:
    result = agree(
        joined("""
        graph g(x: bf16[5,24]) {
          %0 = sigmoid(%x) : f32[5,24]
          %1 = pointwise(%x, expr=[[const, 2.0], [mul, 0, 1]], results=[2], shape=[5,24]) : bf16[5,24]
          return a=%1, b=%0
        }""")
    )
    assert ops(result, "g") == ["pointwise"] and copies(result, "g") == []
    (call,) = result.emitted["g"]
    assert [(p.dtype, p.buffer.space, p.buffer.slot) for p in call.results] == [("bf16", SLOT, "a"), ("f32", SLOT, "b")]
    assert set(call.site.attrs) == {"expr", "results", "shape"}


CARRIED = """
module m

graph step(x: f32[4,8], y: f32[4,8]) {
  %0 = cos(%y) : f32[4,8]
  %1 = sin(%y) : f32[4,8]
  %2 = mul(%0, %x) : f32[4,8]
  return z=%2, x=%1
}

schedule {
  let x = noise
  repeat 3 i {
    run step
  }
  return z=z, x=x
}
"""


def test_a_carried_value_is_written_in_its_place() -> None:
    """It overwrites what others read: computed together with them, it would have to be copied."""
    result = agree(joined(CARRIED))
    assert copies(result, "step") == [] and len(result.emitted["step"]) == 3
