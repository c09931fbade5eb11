"""Self-test, verification against the checkpoint, bisection: what must be found is found, and named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc import selftest
from frtc.bisect import Emulated, first_departure
from frtc.errors import FrtcError
from frtc.kernels.reference import REFERENCES
from frtc.models.checkpoint import read_header
from frtc.policy import Policy
from frtc.probe import by_call, read
from frtc.runtime import emulator
from frtc.runtime.emulator import Emulator
from frtc.runtime.plan import Ref, unrolled
from frtc.runtime.plan_file import Plan, open_plan
from tests.cli.face import call
from tests.conftest import Demo

EXPERT = "paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def plan(demo: Demo) -> Plan:
    return open_plan(demo.plan)


def running(plan: Plan) -> Policy:
    return Policy(plan, Emulator(plan))


def changed(plan: Plan, **test: Any) -> Plan:
    return replace(plan, evidence={**plan.evidence, "self_test": {**plan.evidence["self_test"], **test}})


def test_self_test_is_exact_here(plan: Plan) -> None:
    outcome = selftest.check(running(plan))
    assert all(v.exact for v in outcome.values) and outcome.failure() is None
    names = {v.where for v in outcome.values}
    assert {"input images", "vision image_tokens", "prefix k.2", "denoise[9] x_t", "actions"} <= names


def sabotaged(plan: Plan, monkeypatch: pytest.MonkeyPatch, op: str, gain: float) -> selftest.Outcome:
    """The self-test where one op is computed wrongly."""
    honest = REFERENCES[op]

    def wrong(*args: Any, **attrs: Any) -> Any:
        return honest(*args, **attrs) * np.float32(gain)

    monkeypatch.setitem(emulator.REFERENCES, op, wrong)
    return selftest.check(running(plan))


def test_self_test_names_the_first_wrong_value(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = sabotaged(plan, monkeypatch, "gated_linear", 1.1)
    failure = outcome.failure()
    assert failure is not None and failure.code == "verify.self_test" and failure.exit_code == 3
    assert outcome.failed[0].where == "prefix k.1", "k.0 comes before the first MLP"


def test_a_self_test_of_nan_fails_as_any_other(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy would refuse such actions before anything is compared; the first value that is NaN is named."""
    outcome = sabotaged(plan, monkeypatch, "gated_linear", float("nan"))
    failure = outcome.failure()
    assert failure is not None and (failure.code, failure.exit_code) == ("verify.self_test", 3)
    assert outcome.failed[0].where == "prefix k.1" and outcome.failed[-1].where == "actions"


def test_self_test_allows_other_roundings(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sums in another order: nothing is equal to the bit, everything within the bar."""
    outcome = sabotaged(plan, monkeypatch, "linear", 1 + 2e-4)
    assert outcome.failure() is None and sum(v.exact for v in outcome.values) < len(outcome.values) / 2
    assert 0 < max(v.error for v in outcome.values) < outcome.bar


@pytest.mark.parametrize("wrong", ["no vectors", "no prints", "a ref outside", "a ref of nowhere"])
def test_forged_vectors_are_refused(wrong: str, plan: Plan) -> None:
    values = json.loads(json.dumps(plan.evidence["self_test"]["values"]))
    ref = values["vision"]["image_tokens"]
    forged = {
        "no vectors": replace(plan, evidence={}),
        "no prints": changed(plan, prints={}),
        "a ref outside": changed(plan, values={**values, "vision": {"image_tokens": {**ref, "offset": 1 << 40}}}),
        "a ref of nowhere": changed(plan, values={**values, "vision": {"image_tokens": {**ref, "space": "host"}}}),
    }[wrong]
    with pytest.raises(FrtcError) as caught:
        selftest.check(running(forged))
    assert caught.value.code == ("verify.no_vectors" if wrong == "no vectors" else "plan.damaged")


def test_reading_checks_bounds(plan: Plan) -> None:
    with Emulator(plan) as executor:
        with pytest.raises(ValueError, match="arena"):
            read(executor, Ref("arena", plan.program.arena_nbytes, "f32", (1,), (1,)))
        with pytest.raises(ValueError, match="state"):
            read(executor, Ref("state", -4, "f32", (1,), (1,)))


def test_by_call_runs_the_same_calls(plan: Plan) -> None:
    spread = by_call(plan).program
    counts = {s.name: len(s.calls) for s in plan.program.stages}
    assert len(unrolled(spread.schedule)) == sum(counts[name] for name, _ in unrolled(plan.program.schedule))
    with Emulator(by_call(plan)) as a, Emulator(plan) as b:
        for executor in (a, b):
            executor.set("noise", np.ones((10, 32), np.float32))
            executor.run()
        assert np.array_equal(a.get("actions"), b.get("actions"))


def changed_checkpoint(demo: Demo, folder: Path) -> Path:
    """One weight of the action expert 1.5 times as large."""
    shutil.copytree(demo.checkpoint, folder)
    info = read_header(folder / "model.safetensors")[EXPERT]
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(info.offset)
        bits = np.frombuffer(file.read(info.nbytes), np.uint16).astype(np.uint32) << 16
        larger = (bits.view(np.float32) * np.float32(1.5)).view(np.uint32) >> 16
        file.seek(info.offset)
        file.write(larger.astype(np.uint16).tobytes())
    return folder


def test_another_checkpoint_is_found_and_bisected(demo: Demo, tmp_path: Path, capsys: Capture) -> None:
    other = changed_checkpoint(demo, tmp_path / "ck")
    words = ("verify", demo.plan, other, "--device", "cpu", "--json")
    said = call(capsys, *words)
    data = said.json()
    assert said.code == 3 and data["error"]["code"] == "verify.checkpoint"
    assert all("denoise.layers.1.mlp.gate.weight|up.weight" in name for name in data["weights"]) and data["weights"]
    assert all(where.startswith("denoise") for where in data["failed"]), "in 8 bits, results may all be inside"
    assert "verified" in open_plan(demo.plan).evidence, "what was found of the right checkpoint stays"
    assert data["cosine"] > 0.99, "the cosine of the actions would have said that all is well"
    said = call(capsys, *words, "--bisect")
    found = said.json()["departs"]
    assert said.code == 3 and said.json()["error"]["code"] == "verify.departs"
    assert (found["stage"], found["op"]) == ("denoise", "gated_linear") and "layers.1.mlp" in found["name"]
    assert (
        "denoise.layers.1.mlp.gate.weight|up.weight" in found["weight"]
        and "its weight" in said.json()["error"]["rows"][0][1]
    )


def test_bisection_of_a_device(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A "device" whose layer norm is wrong, beside an honest emulator."""
    inputs = {slot.name: np.zeros(slot.shape, {"u8": np.uint8, "i32": np.int32}.get(slot.dtype, np.float32))
              for slot in plan.program.inputs}  # fmt: skip
    inputs["n"] = np.array(4, np.int32)
    honest = Emulated(plan, inputs)
    assert first_departure(plan, None, inputs, honest, lambda what, share: None) is None

    def wrong(self: Emulator, name: str, round: int = 0) -> None:
        run(self, name, round)
        call = self.program.stage(name).calls[0]
        if self is not second.executor and call.op == "layer_norm":
            self.view(call.results[0], round)[...] *= 2

    run = Emulator.run_stage
    second = Emulated(plan, inputs)
    monkeypatch.setattr(Emulator, "run_stage", wrong)
    found = first_departure(plan, None, inputs, second, lambda what, share: None)
    assert found is not None and found.op == "layer_norm" and found.stage == "vision"
    first = next(i for i, c in enumerate(plan.program.stage("vision").calls) if c.op == "layer_norm")
    assert found.index == first


def test_the_right_checkpoint_bisects_to_nothing(demo: Demo, capsys: Capture) -> None:
    said = call(capsys, "verify", demo.plan, demo.checkpoint, "--device", "cpu", "--bisect")
    assert said.code == 0 and "no call departs" in said.out
