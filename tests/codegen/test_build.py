"""Build: the same Program every time and for every target its own, memory within the plan, and clear refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from frtc.codegen.build import build
from frtc.codegen.nvrtc import Job
from frtc.errors import FrtcError
from frtc.kernels.catalog import CATALOG, Catalog
from frtc.kernels.cubin import sm_of
from frtc.kernels.spec import Config, Param, Site, TensorMap
from frtc.kernels.spec import Stage as KernelStage
from frtc.kernels.targets import Target, load_targets
from frtc.lowering.ir import Let, Repeat, Run, While
from frtc.runtime import plan
from frtc.runtime.plan import ARENA, SPACES, STATE, unrolled
from frtc.runtime.races import extent
from tests.codegen.emulated import agree, built, copies, module_of, no_compiler, ops

TARGETS = load_targets()

MODEL = """
module m

graph weights() {
  %0 = tensor(key=v) : f32[96,48]
  %1 = cast(%0) : bf16[96,48]
  %2 = tensor(key=w) : f32[48,96]
  %3 = cast(%2) : bf16[48,96]
  %4 = tensor(key=t) : f32[3,48]
  return t=%4, v=%1, w=%3
}

graph prefix(x: bf16[30,48]) {
  @v : bf16[96,48]
  @w : bf16[48,96]
  %0 = rms_norm(%x, eps=1e-06) : bf16[30,48]
  %1 = linear(%0, @v, act=gelu_tanh) : bf16[30,96]
  %2 = linear(%1, @w, _, %x) : bf16[30,48]
  %3 = rms_norm(%2, eps=1e-06) : bf16[30,48]
  %4 = linear(%3, @v, act=gelu_tanh) : bf16[30,96]
  %5 = linear(%4, @w, _, %2) : bf16[30,48]
  return kv=%5
}

graph step(z: bf16[4,48], kv: bf16[30,48], k: i32[]) {
  @t : f32[3,48]
  @v : bf16[96,48]
  @w : bf16[48,96]
  %0 = index(@t, %k) : f32[48]
  %1 = add(%z, %0) : bf16[4,48]
  %2 = concat(%kv, %1, axis=-2) : bf16[34,48]
  %3 = linear(%2, @v, act=silu) : bf16[34,96]
  %4 = view(%3, shape=[4,96], strides=[96,1], offset=2880) : bf16[4,96]
  %5 = linear(%4, @w, _, %z) : bf16[4,48]
  return z=%5
}

schedule {
  run prefix
  let z = noise
  repeat 3 k {
    run step
  }
  return actions=z
}
"""


def test_a_whole_module_computes_what_the_interpreter_computes() -> None:
    result = agree(module_of(MODEL), runs=2, exact=False)
    program = result.program
    assert ops(result, "prefix") == ["rms_norm", "linear", "linear"] * 2 and copies(result, "prefix") == []
    assert ops(result, "step") == ["pointwise", "linear", "linear"] and copies(result, "step") == []
    assert unrolled(program.schedule) == [
        ("prefix", 0), ("let.z", 0), ("step", 0), ("step", 1), ("step", 2),
    ]  # fmt: skip
    assert [s.name for s in program.inputs] == ["x", "noise"] and [s.name for s in program.outputs] == ["actions"]
    assert (program.model, program.target.name, program.target.family) == ("m", "hopper", "baseline")


def test_memory_is_used_again_and_nothing_leaves_it() -> None:
    """Two programs share one arena; inside the first, the second half uses the memory of the first half."""
    result = built(module_of(MODEL), "a100")  # where no stages overlap
    program = result.program
    buffers = {
        p.buffer for calls in result.emitted.values() for c in calls for p in c.results if p.buffer.space == ARENA
    }
    assert sum(b.nbytes for b in buffers) > 1.5 * program.arena_nbytes
    assert program.state_nbytes == -(-34 * 96 // 256) * 256, "keys of both programs, nothing else"
    sizes = {"weights": program.weights_nbytes, ARENA: program.arena_nbytes, STATE: program.state_nbytes}
    for stage in program.stages:
        for call in stage.calls:
            for ref in (r for r in (*call.operands, *call.results) if r is not None and r.space in sizes):
                _, start, end = extent(ref, 3)
                assert ref.space in SPACES and 0 <= start < end <= sizes[ref.space]


def test_two_builds_are_equal_for_every_target_and_differ_between_them() -> None:
    programs = {}
    for name in TARGETS:
        first, second = (built(module_of(MODEL), name) for _ in range(2))
        assert first.program == second.program
        programs[name] = first.program
        assert first.program.target.nvcc == TARGETS[name].nvcc
        assert first.program.target.evidence == TARGETS[name].evidence
    assert len({str(p) for p in programs.values()}) == len(TARGETS)


def test_cubins_are_for_their_target_and_equal_byte_for_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled twice from nothing on one target; on the others once, through the cache."""
    text = "graph g(x: f32[4,8]) {\n %0 = exp(%x) : f32[4,8]\n return y=%0\n}"
    for name, target in TARGETS.items():
        result = build(module_of(text), target)
        assert {sm_of(image) for image in result.cubins.values()} == {target.sm}
        assert [k.cubin for k in result.program.kernels] == list(result.cubins) == ["cubin.000"]
        if name == "hopper":
            kept = result.cubins
    for folder in ("a", "b"):
        monkeypatch.setenv("FRTC_CACHE", str(tmp_path / folder))
        assert build(module_of(text), TARGETS["hopper"]).cubins == kept


def test_a_kernel_is_compiled_once_however_often_it_is_launched() -> None:
    result = built(module_of(MODEL))
    launched = [launch.kernel for s in result.program.stages for c in s.calls for launch in c.launches]
    assert len(launched) > len(set(launched)) == len(result.program.kernels) == len(result.cubins)


def test_weights_lie_in_order_of_first_use_with_their_expressions() -> None:
    result = built(module_of(MODEL))
    v, w, t = result.program.weights
    assert [x.name for x in (v, w, t)] == ["v", "w", "t"]
    assert (v.offset, w.offset, t.offset) == (0, 96 * 96, 2 * 96 * 96)
    assert list(result.expressions) == ["v", "w", "t"]
    made = result.expressions["v"]
    assert (made.op, [n["key"] for n in made.operands]) == ("cast", ["v"])


LARGE = """
graph g(x: bf16[768,2048]) {
  @w : bf16[16384,2048]
  %0 = linear(%x, @w) : bf16[768,16384]
  return y=%0
}
"""


def test_native_kernels_come_where_they_serve_and_the_plan_says_so() -> None:
    module = module_of(LARGE)
    families = {name: ("baseline", TARGETS[name].nvcc) for name in TARGETS}
    for name, families_asked in families.items():
        program = built(module, name, families_asked).program
        assert program.target.family == {"thor": "sm_110a", "hopper": "sm_90a"}.get(name, "baseline")
        assert built(module, name).program.target.family == "baseline"
    stage = (
        built(module, "thor", families["thor"])
        .emitted["g"][0]
        .choice.kernel.stages(built(module, "thor").emitted["g"][0].site, {"BN": 256, "STAGES": 4}, TARGETS["thor"])[0]
    )
    assert Job.of(stage, TARGETS["thor"]).needs_cutlass


@pytest.mark.parametrize(
    ("change", "code", "what"),
    [
        (
            lambda m: replace(m, graphs=(*m.graphs, replace(m.graphs[0], variant="prompt=48"))),
            "codegen.variants", "program prefix has variants",
        ),
        (
            lambda m: replace(m, schedule=(*m.schedule, While("n", (Run("prefix"),)))),
            "codegen.while", "a loop whose end is decided on the device",
        ),
        (
            lambda m: replace(m, schedule=(*m.schedule, Repeat(2, "j", (Run("step"),)))),
            "codegen.loops", "program step runs in two loops",
        ),
        (lambda m: replace(m, outputs=(("a", "noise"),)), "codegen.output", "cannot be noise: no program computes it"),
        (lambda m: replace(m, outputs=(("a", "z"), ("b", "z"))), "codegen.output", "a cannot be z: another result is"),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_say(change: object, code: str, what: str) -> None:
    with pytest.raises(FrtcError, match=what) as caught:
        built(change(module_of(MODEL)))  # type: ignore[operator]
    assert caught.value.code == code


def test_lets_become_stages_of_one_copy() -> None:
    module = module_of(MODEL)
    twice = replace(module, schedule=(*module.schedule[:2], Let("z", "noise"), *module.schedule[2:]))
    result = agree(twice, exact=False)
    assert [name for name, _ in unrolled(result.program.schedule)][:3] == ["prefix", "let.z", "let.z"]
    assert copies(result, "let.z") == ["let z"]


@pytest.mark.parametrize("name", TARGETS)
def test_early_launches(name: str) -> None:
    """Of kernels that wait, on targets that can: nobody else's are, for nobody could tell."""
    made = built(module_of(MODEL), name)
    about = TARGETS[name]
    for stage in made.program.stages:
        for call, emitted in zip(stage.calls, made.emitted[stage.name], strict=True):
            stages = emitted.choice.kernel.stages(emitted.site, emitted.choice.config, about)
            assert [n.early for n in call.launches] == [s.waits and "pdl" in about.has for s in stages]
    assert any(n.early for s in made.program.stages for c in s.calls for n in c.launches) == ("pdl" in about.has)


def test_a_kernel_that_does_not_wait_is_not_early() -> None:
    def careless(site: Site, config: Config, target: Target) -> tuple[KernelStage, ...]:
        return tuple(replace(stage, waits=False) for stage in norm.stages(site, config, target))

    norm = next(k for k in CATALOG.kernels if k.name == "smxx_norm" and k.op == "rms_norm")
    others = [k for k in CATALOG.kernels if k is not norm]
    catalog = Catalog((replace(norm, stages=careless), *others))
    with no_compiler():
        made = build(module_of(MODEL), TARGETS["hopper"], catalog=catalog)
    early = {c.op: n.early for s in made.program.stages for c in s.calls for n in c.launches}
    assert early["rms_norm"] is False and early["linear"] is True


def test_tensor_maps_reach_the_plan() -> None:
    """As the stage names them, with the parameter that takes the map."""
    map = TensorMap(Param("operand", 0), "bf16", (48, 30), (96,), (64, 16), 128)

    def mapped(site: Site, config: Config, target: Target) -> tuple[KernelStage, ...]:
        (stage,) = norm.stages(site, config, target)
        return (replace(stage, tensormaps=(map,), params=(Param("tensormap", 0), *stage.params)),)

    norm = next(k for k in CATALOG.kernels if k.name == "smxx_norm" and k.op == "rms_norm")
    catalog = Catalog((replace(norm, stages=mapped), *(k for k in CATALOG.kernels if k is not norm)))
    with no_compiler():
        made = build(module_of(MODEL), TARGETS["hopper"], catalog=catalog)
    (launch,) = made.program.stage("prefix").calls[0].launches
    assert launch.params[0] == ("tensormap", 0)
    assert launch.tensormaps == (plan.TensorMap(("operand", 0), "bf16", (48, 30), (96,), (64, 16), 128),)
