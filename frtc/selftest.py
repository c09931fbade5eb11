"""The self-test: vectors made by the emulator when a Plan was compiled, compared where it runs.

Needs the Plan alone. A seeded observation goes through the policy's steps and the programs; after each of them its
named results are compared with a fingerprint kept in the evidence: a SHA-256, and some elements for devices that round
otherwise (a GPU; on a CPU another NumPy or processor). Their relative error stays within the bars of docs/numerics.md.
A value carried from round to round is compared by its change, so that the noise it started from hides nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from frtc import observation
from frtc.errors import CheckFailed, FrtcError
from frtc.policy import Policy
from frtc.probe import read
from frtc.runtime.plan import SLOT, WEIGHTS, Program, Ref, unrolled

Array = np.ndarray[Any, Any]
Value = tuple[str, Ref | None, Array, int]  # where, its place, what was found, elements to keep
SEED = 0
SAMPLES, MANY = 256, 8  # elements kept of a value; fewer where a program has more than MANY results
BARS = {"f32": 1e-4, "bf16": 2e-2, "w8a16": 2e-2, "fp8": 1.5e-1}  # of denoise steps, by precision; docs/numerics.md
RESULTS = {**BARS, "fp8": 5e-1}  # of other results


@dataclass(frozen=True, slots=True)
class Compared:
    """One value: `where` is "input images", "prefix k.3" or "denoise[4] x_t"; error relative, 0 if equal to the bit.

    bar   None: that of the outcome
    """

    where: str
    exact: bool
    error: float
    bar: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """bar   of the values that have none of their own"""

    values: tuple[Compared, ...]
    bar: float

    @property
    def failed(self) -> tuple[Compared, ...]:
        return tuple(v for v in self.values if not v.exact and not v.error <= self.bar_of(v))

    def bar_of(self, value: Compared) -> float:
        return self.bar if value.bar is None else value.bar

    def data(self) -> dict[str, Any]:
        return {"bar": self.bar, "values": [asdict(v) for v in self.values], "failed": [v.where for v in self.failed]}

    def failure(self) -> CheckFailed | None:
        if not self.failed:
            return None
        first = self.failed[0]
        rows = [("first", f"{first.where}: relative error {first.error:.2e}, allowed {self.bar_of(first):.1e}")]
        what = f"the self-test failed: {len(self.failed)} of {len(self.values)} values differ"
        return CheckFailed("verify.self_test", what, rows, "`frtc verify --bisect` names the first call that departs")


def make(policy: Policy, values: Mapping[str, Any], progress: Callable[[str, float], None]) -> dict[str, Any]:
    """The vectors of a Plan, by its executor (the emulator). values: where each program's results lie, as JSON."""
    prints = {where: fingerprint(array, count) for where, _, array, count in _walk(policy, values, progress)}
    return {"seed": SEED, "values": dict(values), "prints": prints}


def check(policy: Policy, progress: Callable[[str, float], None] = lambda what, share: None) -> Outcome:
    """Run the Plan's self-test on this policy's device."""
    test = policy.plan.evidence.get("self_test")
    if not isinstance(test, dict):
        hint = "compile without --no-self-test, or `frtc update PLAN CHECKPOINT -o NEW.plan --self-test`"
        raise FrtcError("verify.no_vectors", "the Plan holds no self-test vectors", hint=hint)
    try:
        outcome = _compare(policy, test, progress)
        return replace(outcome, values=(*outcome.values, *by_frames(policy)))
    except (KeyError, TypeError, ValueError, AttributeError) as fault:  # evidence is not validated when a Plan opens
        raise FrtcError("plan.damaged", f"the self-test vectors cannot be read: {fault!r}") from None


def _compare(policy: Policy, test: Mapping[str, Any], progress: Callable[[str, float], None]) -> Outcome:
    prints, compared = test["prints"], list[Compared]()
    precision = precision_of(policy.plan.program)
    step, result = BARS[precision], RESULTS[precision]
    before: dict[Ref, tuple[Array, Array]] = {}  # samples (found, expected) of what a place held the round before
    for where, ref, array, count in _unless_refused(_walk(policy, test["values"], progress)):
        kept = prints[where]
        if array is None:
            compared.append(Compared(where, False, float("inf"), result))
            continue
        exact = kept["sha256"] == _digest(array)
        found, expected = sample(array, count), _decode(kept["sample"])
        if ref is not None:
            old = before.get(ref, (0, 0))
            before[ref] = found, expected
            found, expected = found - old[0], expected - old[1]
        bar = step if "[" in where or (ref is None and where != "actions") else result
        compared.append(Compared(where, exact, 0.0 if exact else relative_error(found, expected), bar))
    if missing := prints.keys() - {c.where for c in compared}:
        raise FrtcError("plan.damaged", f"the Plan computes no {min(missing)}, which its self-test expects")
    return Outcome(tuple(compared), step)


def by_frames(policy: Policy) -> Iterator[Compared]:
    """Where the device resizes camera frames: its `images` are those of the policy's own step, bit for bit."""
    if not policy.executor.frames:
        return
    seen = observation.seeded(policy.steps, SEED)
    wanted = policy.steps.prepare(seen, draw=0).inputs["images"]
    policy.executor.take(seen)
    with suppress(CheckFailed):  # of the outputs: they were looked at
        policy.executor.run()
    strides = tuple(step // wanted.itemsize for step in wanted.strides)
    slot = policy.executor.inputs["images"]
    found = policy.executor.peek(Ref(SLOT, 0, slot.dtype, slot.shape, strides, slot="images"))
    exact = found.tobytes() == wanted.tobytes()
    yield Compared("images from frames", exact, 0.0 if exact else relative_error(found, wanted), 0.0)


def _unless_refused(walk: Iterator[Value]) -> Iterator[tuple[str, Ref | None, Array | None, int]]:
    """None for actions that the policy refuses because they are not finite: the values before show where it began."""
    try:
        yield from walk
    except FrtcError as fault:
        if fault.code != "output.nonfinite":
            raise
        yield "actions", None, None, SAMPLES


def _walk(policy: Policy, values: Mapping[str, Any], progress: Callable[[str, float], None]) -> Iterator[Value]:
    """Runs the self-test's inference stage by stage: (where, place, value, elements to keep) of inputs and results."""
    program = policy.plan.program
    prepared = policy.steps.prepare(observation.seeded(policy.steps, SEED), draw=0)
    policy.reset()
    for name, array in prepared.inputs.items():
        policy.executor.set(name, array)
        yield f"input {name}", None, array, SAMPLES
    order = unrolled(program.schedule)
    loops = {name for name, round in order if round}
    for i, (stage, round) in enumerate(order):
        progress("self-test", i / len(order))
        policy.executor.run_stage(stage, round)
        results = values.get(stage, {})
        count = SAMPLES if len(results) <= MANY else SAMPLES // MANY
        for name, data in results.items():
            where = f"{stage}[{round}] {name}" if stage in loops else f"{stage} {name}"
            ref = ref_of(data)
            yield where, ref, read(policy.executor, ref, round), count
    yield "actions", None, policy.steps.finish(policy.executor.get(policy.output), prepared), SAMPLES


def precision_of(program: Program) -> str:
    """By the coarsest type of any call: "fp8", "w8a16" (only weights are in FP8), "bf16" (f16 too) or "f32"."""
    refs = [r for s in program.stages for c in s.calls for r in (*c.operands, *c.results) if r is not None]
    types = {r.dtype for r in refs}
    if "e4m3" in types:
        return "fp8" if any(r.dtype == "e4m3" and r.space != WEIGHTS for r in refs) else "w8a16"
    return "bf16" if types & {"bf16", "f16"} else "f32"


def fingerprint(array: Array, count: int) -> dict[str, str]:
    return {"sha256": _digest(array), "sample": base64.b64encode(sample(array, count).tobytes()).decode()}


def sample(array: Array, count: int) -> Array:
    """f32 [<= count], evenly spread over the value, first and last element included."""
    flat = np.asarray(array).reshape(-1)
    at = np.linspace(0, flat.size - 1, min(count, flat.size)).astype(np.int64)
    return flat[at].astype(np.float32)


def _decode(text: str) -> Array:
    return np.frombuffer(base64.b64decode(text), np.float32)


def _digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def relative_error(found: Array, expected: Array) -> float:
    """||found - expected|| / ||expected||; anything not finite gives infinity.

    Where a reference says NaN the value is unspecified (rows of padding), and whatever was found there is right.
    """
    specified = ~np.isnan(expected)
    if np.size(expected) and not specified.any():
        return float("inf")
    a, b = np.asarray(found, np.float64)[specified], np.asarray(expected, np.float64)[specified]
    distance = float(np.linalg.norm(a - b))
    error = 0.0 if distance == 0 else distance / max(float(np.linalg.norm(b)), 1e-30)
    return error if np.isfinite(error) else float("inf")


def ref_of(data: Mapping[str, Any]) -> Ref:
    return Ref(**{**data, "shape": tuple(data["shape"]), "strides": tuple(data["strides"])})
