"""Explain: every node has one fate, and a rule that did not fire says which precondition failed."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from frtc.codegen.fusible import implements
from frtc.commands.explain import read_ir
from frtc.compiler import CompileOptions, import_module, open_model
from frtc.explain import LEAVES, OUTCOMES, Explanation, explain
from frtc.kernels.targets import load_targets
from frtc.lowering.ir import fresh_nodes
from frtc.passes.standard import pipeline
from tests.cli.face import call
from tests.conftest import Demo

HOPPER = load_targets()["hopper"]
BASELINE = ("baseline",)


def explained(tmp_path: Path, text: str) -> Explanation:
    path = tmp_path / "g.ir"
    path.write_text(dedent(text).strip() + "\n")
    return explain(read_ir(path), pipeline(implements(HOPPER, BASELINE)), HOPPER, BASELINE)


@pytest.fixture(scope="module")
def whole(demo: Demo) -> tuple[int, list[str], list[str], Explanation]:
    """Of the demo's model: nodes imported, their locations before and after, the explanation."""
    with fresh_nodes():  # as the command: what other tests keep alive has locations of its own
        module = import_module(open_model(demo.checkpoint, CompileOptions()))
        nodes = [n for g in module.graphs for n in g.nodes if n.op not in LEAVES]
        before = [n.loc for n in nodes]
        found = explain(module, pipeline(implements(HOPPER, BASELINE)), HOPPER, BASELINE)
    return len(nodes), before, [n.loc for n in nodes], found


def test_every_node_has_one_fate(whole: tuple[int, list[str], list[str], Explanation]) -> None:
    total, _, _, found = whole
    assert total > 300 and len(found.nodes) == total == sum(found.counts().values())
    assert set(found.counts()) == set(OUTCOMES) and found.counts()["launch"] > 40
    calls = {c.call for c in found.calls}
    runs = [f for f in found.nodes if f.outcome in ("launch", "fused")]
    assert all(f.call in calls for f in runs)
    assert all(f.rules for f in runs if f.outcome == "fused")


def test_locations_are_left_as_they_were(whole: tuple[int, list[str], list[str], Explanation]) -> None:
    _, before, after, found = whole
    assert before == after and not any("##" in f.loc for f in found.nodes)
    assert not any("##" in text for c in found.calls for text in (c.loc, *c.missed))


def test_a_norm_is_told_by_its_rule(whole: tuple[int, list[str], list[str], Explanation]) -> None:
    nodes = whole[3].nodes
    squares = [f for f in nodes if (f.op == "pow" and "gemma.py" in f.loc) or (f.op == "rsqrt" and "gemma.py" in f.loc)]
    assert squares and all(f.outcome == "fused" and "norm" in " ".join(f.rules) for f in squares)


def test_kernels_not_taken_have_reasons(whole: tuple[int, list[str], list[str], Explanation]) -> None:
    gemm = next(c for c in whole[3].calls if c.kernel.startswith("smxx_gemm"))
    reasons = dict(gemm.rejected)
    assert reasons["smxx_linear_f32"] == "tensor cores can do it"
    assert any("us estimated" in reason for reason in reasons.values())


NEAR_MISSES = {
    "a second reader": (
        """
        graph g(x: bf16[8,64]) {
          @w : bf16[64,64]
          %0 = linear(%x, @w) : bf16[8,64]
          %1 = gelu_tanh(%0) : bf16[8,64]
          return y=%1, z=%0
        }
        """,
        "not by fuse_epilogue: linear : bf16[8,64] is read 2 times, by gelu_tanh : bf16[8,64]",
    ),
    "a gate of the wrong shape": (
        """
        graph g(x: bf16[8,64], r: bf16[8,1]) {
          @w : bf16[64,64]
          %0 = linear(%x, @w) : bf16[8,64]
          %1 = mul(%0, %r) : bf16[8,64]
          return y=%1
        }
        """,
        "not by fuse_epilogue: the pattern matches, but not with these values: product is linear : bf16[8,64], "
        "other is input : bf16[8,1] at r",
    ),
    "a norm that attention reads": (
        """
        graph g(x: bf16[1,8,64], k: bf16[1,8,64]) {
          @w : bf16[64]
          %0 = rms_norm(%x, @w, eps=1e-06) : bf16[1,8,64]
          %1 = attention(%0, %k, %k, scale=0.125) : bf16[1,8,64]
          return y=%1
        }
        """,
        "not by fold_norms: rms_norm : bf16[1,8,64] is read by attention : bf16[1,8,64]: "
        "not a linear with constant weights",
    ),
    "gate and up of different activations": (
        """
        graph g(x: bf16[8,64], u: bf16[64,64]) {
          @w : bf16[64,64]
          %0 = linear(%x, @w) : bf16[8,64]
          %1 = silu(%0) : bf16[8,64]
          %2 = linear(%x, %u) : bf16[8,64]
          %3 = mul(%1, %2) : bf16[8,64]
          return y=%3
        }
        """,
        "not by gated_linear: input : bf16[64,64] at u is no constant",
    ),
    "pointwise ops of two shapes": (
        """
        graph g(x: bf16[800,64], r: bf16[1,64]) {
          %0 = silu(%r) : bf16[1,64]
          %1 = add(%x, %0) : bf16[800,64]
          return y=%1
        }
        """,
        "not by fuse_pointwise: silu : bf16[1,64] does not have the shape of the result, [800, 64]",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name: str, tmp_path: Path) -> None:
    text, reason = NEAR_MISSES[name]
    found = explained(tmp_path, text)
    missed = [m for c in found.calls for m in c.missed]
    assert any(m.startswith(reason) for m in missed), missed


def test_what_shares_a_launch_is_told_which(tmp_path: Path) -> None:
    """A reader that follows has a launch of its own, which is not the one that the pair shares."""
    text = """
        graph g(x: f32[800,64]) {
          @w : f32[64,64]
          %0 = cos(%x) : f32[800,64]
          %1 = sin(%x) : f32[800,64]
          %2 = linear(%1, @w) : f32[800,64]
          return a=%0, b=%2
        }"""
    cosine, sine, _ = explained(tmp_path, text).nodes
    assert (cosine.outcome, sine.outcome, sine.rules) == ("launch", "fused", ("join_pointwise",))
    assert cosine.call == sine.call == "g/0"


def test_a_kernel_that_refuses_is_quoted(tmp_path: Path) -> None:
    """What no kernel can run is not fused, and the kernels' own reasons say why."""
    from frtc.lowering.ir import Type, input_, weight
    from frtc.lowering.ops import linear
    from frtc.near_miss import refusal

    x, w = input_("x", Type("f64", (8, 64))), weight("w", Type("f64", (64, 64)))
    reason = refusal(linear(x, w, dtype="f64"), HOPPER, BASELINE)
    assert "no kernel runs linear(f64[8,64]" in reason and "smxx_gemm" in reason
    x, w = input_("x", Type("bf16", (8, 64))), weight("w", Type("bf16", (64, 64)))
    assert refusal(linear(x, w), HOPPER, BASELINE) == ""


def test_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g.ir"
    path.write_text(dedent(NEAR_MISSES["a second reader"][0]).strip() + "\n")
    said = call(capsys, "explain", path, "--arch", "a100", "--node", "gelu", "--all")
    assert said.code == 0 and "2 nodes imported" in said.out and "1 calls" in said.out
    data = call(capsys, "explain", path, "--arch", "a100", "--json").json()
    assert data["total"] == len(data["nodes"]) == sum(data["counts"].values()) == 2
    said = call(capsys, "explain", path, "--arch", "a100", "--node", "gelu_than")
    assert (said.code, said.error) == (2, "explain.node") and "nearest  gelu_tanh" in said.err
