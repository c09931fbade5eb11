"""Forged Plans: manifests changed and signed again. What is not sound is refused with a dotted code, never launched."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frtc.errors import FrtcError
from frtc.kernels.cubin import parameters_of
from frtc.runtime.driver import Driver
from frtc.runtime.emulator import Emulator
from frtc.runtime.manifest import ZEROS
from frtc.runtime.plan_file import Plan, open_plan
from frtc.runtime.session import Session
from tests.runtime import small_plan
from tests.runtime.null_driver import NullApi

Json = dict[str, Any]


class Forger:
    """Opens copies of a Plan whose program entry was changed and signed anew."""

    def __init__(self, folder: Path) -> None:
        original = folder / "small.plan"
        small_plan.write(original)
        raw = original.read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        self.header = json.loads(raw[8 : 8 + length])
        self.data, self.path = raw[8 + length :], folder / "forged.plan"
        self.program: Json = json.loads(self.header["__metadata__"]["program"])

    def open(self, program: Json) -> Plan:
        signed = {**program, "plan_id": ZEROS}
        text = json.dumps(signed, separators=(",", ":"))
        plan_id = hashlib.sha256(text.encode()).hexdigest()
        metadata = {"program": text.replace(ZEROS, plan_id, 1), "evidence": json.dumps({"plan_id": plan_id})}
        header = json.dumps({**self.header, "__metadata__": metadata}).encode()
        self.path.write_bytes(struct.pack("<Q", len(header)) + header + self.data)
        return open_plan(self.path)

    def changed(self, change: Callable[[Json], object]) -> Json:
        program = copy.deepcopy(self.program)
        change(program)
        return program


@pytest.fixture(scope="module")
def forger(tmp_path_factory: pytest.TempPathFactory) -> Forger:
    return Forger(tmp_path_factory.mktemp("forged"))


def test_signed_anew_it_opens(forger: Forger) -> None:
    assert forger.open(forger.program).program == small_plan.program()


# ---- one example of each rule ----------------------------------------------------------------------------------------


def put(path: str, value: Any) -> Callable[[Json], object]:
    """Set a value by its path: "program.stages.0.name"."""

    def change(program: Json) -> None:
        *way, last = (int(part) if part.isdigit() else part for part in path.split("."))
        place: Any = program
        for part in way:
            place = place[part]
        place[last] = value

    return change


LAUNCH = "program.stages.0.calls.0.launches.0"
RULES = {
    "too new": (put("schema", "frtc.plan/2"), "plan.version", "version 2 of the format, this frtc reads version 1"),
    "no schema": (put("schema", 7), "plan.invalid", "does not say which format"),
    "unknown field": (put("program.colour", "red"), "plan.invalid", "program has no valid value"),
    "field missing": (lambda p: p["program"].pop("model"), "plan.invalid", "program has no valid value"),
    "part missing": (lambda p: p.pop("files"), "plan.invalid", "no valid value"),
    "wrong type": (put("program.arena_nbytes", "512"), "plan.invalid", "program.arena_nbytes has no valid value"),
    "boolean number": (put("program.arena_nbytes", True), "plan.invalid", "program.arena_nbytes has no valid"),
    "ref index": (put("program.stages.0.calls.0.operands.0", 99), "plan.invalid", "operands[0] has no valid value"),
    "negative size": (put("program.state_nbytes", -1), "plan.invalid", "program.state_nbytes: -1 bytes"),
    "arena too small": (put("program.arena_nbytes", 256), "plan.invalid", "of arena, which has 256"),
    "weights too small": (put("program.weights_nbytes", 1024), "plan.invalid", "the weights end at"),
    "weight elsewhere": (put("program.weights.1.offset", 256), "plan.invalid", "weight b: starts at byte 256"),
    "weight unaligned": (put("program.weights.1.offset", 520), "plan.invalid", "weight b: starts at byte 520"),
    "weight named twice": (put("program.weights.1.name", "w0"), "plan.invalid", "weight names: twice"),
    "name with escape": (put("program.stages.0.name", "\x1b[2J"), "plan.invalid", "stage names: twice, empty or unp"),
    "model of two lines": (put("program.model", "m\nverified"), "plan.invalid", "not printable: 'm\\nverified'"),
    "target with escape": (put("program.target.family", "\x1b[2J"), "plan.invalid", "not printable: '\\x1b[2J'"),
    "unknown type": (put("refs.0.dtype", "f12"), "plan.invalid", "unknown element type 'f12'"),
    "unknown space": (put("refs.1.space", "heap"), "plan.invalid", "space 'heap'"),
    "unknown slot": (put("refs.0.slot", "z"), "plan.invalid", "space 'slot', slot 'z'"),
    "slot elsewhere": (put("refs.1.slot", "x"), "plan.invalid", "space 'weights', slot 'x'"),
    "out of slot": (put("refs.0.offset", 4), "plan.invalid", "bytes 4 to 100 of x, which has 96"),
    "out of weights": (put("refs.1.shape.0", 100), "plan.invalid", "of weights, which has 1280"),
    "strides": (put("refs.1.strides", [8]), "plan.invalid", "strides [8] for shape [10, 8]"),
    "negative stride": (put("refs.1.strides.0", -8), "plan.invalid", "strides [-8, 1]"),
    "unaligned": (put("refs.1.offset", 2), "plan.invalid", "offset 2 and step 0 for elements of 4 bytes"),
    "too many axes": (lambda p: p["refs"][0].update(shape=[1] * 17, strides=[0] * 17), "plan.invalid", "17 axes"),
    "step too long": (put("refs.6.step", 400), "plan.invalid", "of weights, which has 1280"),
    "huge shape": (put("refs.1.shape.0", 1 << 60), "plan.invalid", "shape ["),
    "unknown op": (put("program.stages.0.calls.0.op", "exec"), "plan.invalid", "no such op"),
    "unknown attribute": (put("program.stages.0.calls.0.attrs.shell", "x"), "plan.invalid", "attributes act, shell"),
    "too few operands": (put("program.stages.0.calls.2.operands", [5]), "plan.invalid", "1 operands"),
    "no results": (put("program.stages.0.calls.1.results", []), "plan.invalid", "computes nothing"),
    "no launches": (put("program.stages.0.calls.0.launches", []), "plan.invalid", "launches or computes nothing"),
    "writes weights": (put("program.stages.0.calls.0.results", [1]), "plan.invalid", "writes to the weights"),
    "waits for itself": (put("program.stages.0.calls.2.after", [0, 2]), "plan.invalid", "waits for call 2"),
    "waits in disorder": (put("program.stages.0.calls.2.after", [1, 0]), "plan.invalid", "waits for [1, 0]"),
    "waits for -1": (put("program.stages.0.calls.2.after", [-1, 1]), "plan.invalid", "waits for call 1, which"),
    "race": (put("program.stages.0.calls.2.after", [0]), "plan.invalid", "calls 1 (linear) and 2 (add) may run at on"),
    "scratch": (put("program.stages.1.calls.1.scratch", [480, 64]), "plan.invalid", "scratch of 64 bytes at 480"),
    "scratch race": (put("program.stages.0.calls.1.scratch", [64, 64]), "plan.invalid", "may run at once but share"),
    "counters": (put("program.stages.0.calls.1.counters", [-4, 4]), "plan.invalid", "counters of 4 bytes at -4"),
    "kernel": (put(f"{LAUNCH}.kernel", 4), "plan.invalid", "kernel 4 of 4"),
    "grid": (put(f"{LAUNCH}.grid", [1, 65536, 1]), "plan.invalid", "grid [1, 65536, 1]"),
    "grid of two": (put(f"{LAUNCH}.grid", [1, 1]), "plan.invalid", "grid has no valid value"),
    "block": (put(f"{LAUNCH}.block", 1025), "plan.invalid", "block of 1025 threads"),
    "shared memory": (put(f"{LAUNCH}.smem", 1), "plan.invalid", "1 bytes of shared memory"),
    "most shared memory": (put("program.kernels.0.smem", 1 << 20), "plan.invalid", "bytes of shared memory"),
    "blocks that meet": (put(f"{LAUNCH}.meets", True), "plan.invalid", "wait for each other, on any number of mult"),
    "calls that meet": (lambda p: [put("program.target.sms", 132)(p), *(put(f"{path}.meets", True)(p) for path in (
                            LAUNCH, LAUNCH.replace("calls.0", "calls.1")))],
                        "plan.invalid", "stage in: calls 0 (linear) and 1 (linear) may run at once"),
    "parameter kind": (put(f"{LAUNCH}.params.0", ["host", 0]), "plan.invalid", "parameter of unknown kind 'host'"),
    "parameter operand": (put(f"{LAUNCH}.params.0", ["operand", 3]), "plan.invalid", "operand parameter 3"),
    "parameter i32": (put(f"{LAUNCH}.params.4", ["i32", 1 << 31]), "plan.invalid", "i32 parameter 2147483648"),
    "parameter float": (put(f"{LAUNCH}.params.4", ["i32", 1.5]), "plan.invalid", "i32 parameter 1.5"),
    "parameter scratch": (put(f"{LAUNCH}.params.0", ["scratch", 64]), "plan.invalid", "scratch parameter 64"),
    "one parameter less": (lambda p: p["program"]["stages"][0]["calls"][0]["launches"][0]["params"].pop(),
                           "plan.invalid", "bytes, the kernel takes"),
    "parameter size": (put(f"{LAUNCH}.params.4", ["i64", 3]), "plan.invalid", "bytes, the kernel takes"),
    "no cubin": (put("program.kernels.0.cubin", "cubin.001"), "plan.invalid", "'cubin.001' is not in the file"),
    "no cubin either": (put("program.kernels.0.cubin", "tokenizer.json"), "plan.invalid", "is no cubin"),
    "symbol": (put("program.kernels.0.symbol", "main"), "plan.invalid", "cubin.000 has no kernel 'main'"),
    "another SM": (put("program.target.sm", 80), "plan.invalid", "cubin.000: is built for sm_90, the Plan for sm_80"),
    "stage of none": (put("program.schedule.0", {"stage": "out"}), "plan.invalid", "runs 'out', which is no stage"),
    "endless": (put("program.schedule.1.count", 1 << 40), "plan.invalid", "schedule: "),
    "no rounds": (put("program.schedule.1.count", 0), "plan.invalid", "repeats 0 times"),
    "empty schedule": (put("program.schedule", []), "plan.invalid", "0 launches"),
    "overlap of others": (put("program.overlap", {"stages": ["step", "in"], "after": [[]] * 5}), "plan.invalid",
                          "overlap: step, in are not the stages that run first"),
    "overlap of none": (put("program.overlap", {"stages": [], "after": []}), "plan.invalid", "overlap: of 0 stages"),
    "overlap of one": (put("program.overlap", {"stages": ["in"], "after": [[], [], [0, 1]]}), "plan.invalid",
                       "overlap: of 1 stages"),
    "overlap twice": (put("program.overlap", {"stages": ["in", "step", "step"], "after": [[]] * 7}), "plan.invalid",
                      "not the stages that run first, each once"),
    "overlap of fewer calls": (put("program.overlap", {"stages": ["in", "step"], "after": [[]] * 4}), "plan.invalid",
                               "of 4 calls what they wait for, the stages have 5"),
    "overlap in disorder": (put("program.overlap", {"stages": ["in", "step"], "after": [[], [], [1, 0], [2], [3]]}),
                            "plan.invalid", "overlap, call 2 (add): waits for [1, 0]"),
    "overlap that races": (put("program.overlap", {"stages": ["in", "step"], "after": [[], [], [0, 1], [], [3]]}),
                           "plan.invalid", "overlap: calls 2 (add) and 3 (mul) may run at once but share bytes"),
    "policy": (put("program.policy", {"schema": "frtc.policy/9"}), "policy.version", "not in a form"),
    "file name": (put("files.1.name", "w:w0"), "plan.invalid", "a name of another kind"),
    "file size": (put("files.1.nbytes", 1 << 20), "plan.damaged", "tensor tokenizer.json is not where"),
    "hash missing": (lambda p: p["sha256"].pop(), "plan.invalid", "5 hashes for 6 tensors"),
    "hash": (put("sha256.0", "0" * 64), "plan.damaged", "w:w0"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rule(forger: Forger, rule: str) -> None:
    change, code, what = RULES[rule]
    with pytest.raises(FrtcError) as caught:
        forger.open(forger.changed(change))
    assert caught.value.code == code and what in caught.value.what, caught.value


@pytest.mark.parametrize("depth", [9, 100, 5000])
def test_nested_schedule(forger: Forger, depth: int) -> None:
    """Repeats inside repeats, also deeper than Python recurses."""
    inner = '{"stage":"in"}'
    for _ in range(depth):
        inner = f'{{"count":1,"body":[{inner}]}}'
    marker = forger.changed(put("program.schedule", ["MARK"]))
    with pytest.raises(FrtcError) as caught:
        text = json.dumps(marker, separators=(",", ":")).replace('"MARK"', inner)
        _open_text(forger, text)
    assert caught.value.code in ("plan.invalid", "plan.damaged")


def _open_text(forger: Forger, text: str) -> Plan:
    signed = text.replace(forger.program["plan_id"], ZEROS, 1)
    plan_id = hashlib.sha256(signed.encode()).hexdigest()
    metadata = {"program": signed.replace(ZEROS, plan_id, 1), "evidence": "{}"}
    header = json.dumps({**forger.header, "__metadata__": metadata}).encode()
    forger.path.write_bytes(struct.pack("<Q", len(header)) + header + forger.data)
    return open_plan(forger.path)


# ---- mutations -------------------------------------------------------------------------------------------------------

FREE = {"model", "expression", "nvcc", "family", "evidence", "name"}  # texts that decide nothing
OPEN = {"attrs", "policy"}  # records with fields of their own


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of the entry with its path; open records as a whole."""
    if path:
        yield path, value
    if path and path[-1] in OPEN:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nodes(item, (*path, key))


def hostile(value: Any, path: tuple[Any, ...], generator: np.random.Generator) -> Any:
    """A value that cannot stand in this place."""
    wrong: list[Any] = [None, {"stage": []}, [[]], {"float": "inf"}, False]
    if isinstance(value, dict):
        wrong += [[], 7, "text", {**value, "zzz": 1}]
    elif isinstance(value, list):
        wrong += ["text", 3, [*value, "more"], [*value, {"zzz": 1}]]
    elif isinstance(value, str):
        wrong += [3, [value], 1.5] + ([] if FREE & set(path) else ["", "nonsense", value + "\0"])
    else:
        wrong += [str(value), [value], 1.5, 1 << 63, 1 << 200, -(1 << 63) - 1]
    if value is None or path[-2:-1] == ("operands",):
        wrong.remove(None)  # an absent operand
    if "params" in path and isinstance(value, str):
        wrong = ["", "nonsense", 3, None]
    return wrong[generator.integers(len(wrong))]


def mutated(program: Json, generator: np.random.Generator) -> tuple[Json, str]:
    """One hostile change somewhere; each depth of the tree is as likely as another."""
    found = [(p, v) for p, v in nodes(program) if p[0] != "plan_id"]
    depths = sorted({len(p) for p, _ in found})
    depth = depths[generator.integers(len(depths))]
    level = [(p, v) for p, v in found if len(p) == depth]
    path, value = level[generator.integers(len(level))]
    result = copy.deepcopy(program)
    place: Any = result
    for part in path[:-1]:
        place = place[part]
    if isinstance(place, dict) and path[-1] not in OPTIONAL and generator.random() < 0.2:
        del place[path[-1]]
        return result, f"{path} deleted"
    place[path[-1]] = hostile(value, path, generator)
    return result, f"{path}: {value!r:.40} -> {place[path[-1]]!r:.60}"


OPTIONAL = {"after", "scratch", "counters", "step", "slot", "policy", "act"}


@pytest.mark.parametrize("part", range(4))
def test_mutations_are_refused(forger: Forger, part: int) -> None:
    """1,000 in all. Refused when the file is opened, so that nothing can be launched."""
    for seed in range(250 * part, 250 * (part + 1)):
        program, change = mutated(forger.program, np.random.default_rng(seed))
        try:
            forger.open(program)
        except FrtcError as refused:
            assert refused.code.startswith(("plan.", "policy.")), f"{seed}: {change}: {refused}"
        else:
            pytest.fail(f"seed {seed} opens: {change}")


def shuffled(program: Json, generator: np.random.Generator) -> Json:
    """A change that may be sound: numbers moved a little, items dropped, doubled or swapped, attributes replaced."""
    result = copy.deepcopy(program)
    found = [(p, v) for p, v in nodes(result) if p[0] not in ("plan_id", "sha256")]
    path, value = found[generator.integers(len(found))]
    place: Any = result
    for part in path[:-1]:
        place = place[part]
    if path[-1] in OPEN:
        place[path[-1]] = [{"act": 5}, {"act": "relu"}, {"act": ["silu"]}, {"shape": [3]}][generator.integers(4)]
    elif isinstance(value, int):
        place[path[-1]] = value + int(generator.choice([-4, -1, 1, 4, 256]))
    elif isinstance(value, list) and value:
        k = generator.integers(len(value))
        value[k : k + 1] = [[], [value[k], value[k]], [value[-1]]][generator.integers(3)]
    elif isinstance(place, dict):
        del place[path[-1]]
    return result


def test_what_still_opens_runs_or_says_why(forger: Forger) -> None:
    """Shuffled Plans: sound ones are emulated and launched within their memory, no exception but FrtcError escapes."""
    opened = 0
    for seed in range(200):
        try:
            plan = forger.open(shuffled(forger.program, np.random.default_rng(seed)))
            opened += 1
            image = bytes(plan.files()["cubin.000"])
            api = NullApi({name: parameters_of(image, name) for name in small_plan.KERNELS})
            with Session(plan, driver=Driver(api=api)) as session:
                session.warm(runs=1)
                for kernel in api.kernels.values():
                    pointers = zip(api.sizes[kernel.symbol], kernel.arguments, strict=True)
                    assert all(api.device(at, 1) for size, at in pointers if size == 8 and at)
            with np.errstate(all="ignore"):
                Emulator(plan).run()
        except FrtcError:
            pass
    assert 30 < opened < 170  # the changes are neither all refused nor all harmless
