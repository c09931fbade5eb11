"""A whole program on weights that nobody trained: no checkpoint is read, so another kernel is a second away.

Weights are bytes that are ordinary numbers in every float type; time does not depend on their values. What their
expressions make of constants alone (positions, times) is there as it is, and scales of FP8 suit the other weights.
Results mean nothing, but of the same program with other kernels they are the same: of the outputs about, and of a call
within, on the same operands, exactly but for the order of its sums. A probe looks at such a call: the program up to the
one behind it, in scratch memory full of NaN, so that what is not written shows.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from frtc.codegen.build import Built
from frtc.codegen.weights import pieces
from frtc.lowering.ir import walk
from frtc.lowering.ops import OPS
from frtc.runtime.emulator import POISON, Emulator
from frtc.runtime.executor import Executor
from frtc.runtime.plan import ARENA, WEIGHTS, Program, Stage, unrolled
from frtc.runtime.plan_file import Plan, Tensor
from frtc.runtime.session import Session

Array = np.ndarray[Any, Any]
BLOCK = 64 << 20  # bytes of random weights that are drawn; on the device they are repeated
FLOATS = ("f32", "bf16", "f16", "e4m3")
E4M3, WEIGHT_RMS = 16.0, 1.2  # what values are stored times; of random bytes read as e4m3
SAMPLES, WARM_UP = 40, 5
ELEMENTS = 512  # of each result that are compared
PROBE = "probe "  # begins the names of their stages


@dataclass(frozen=True, slots=True)
class Trial:
    """kernels  site -> kernel and config, as they are in the program
    exact    (offset, bytes) of weights that are not random: made of constants alone, and scales
    inputs   of an inference, by name
    probes   site -> (program, place of the site's first call in it)
    """

    program: Program
    cubins: Mapping[str, bytes]
    kernels: Mapping[str, str]
    exact: tuple[tuple[int, bytes], ...]
    inputs: Mapping[str, Array]
    probes: Mapping[str, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the measuring process is asked: the file of a Trial, and the sites to look at."""

    path: str
    probes: tuple[str, ...]


# ---- weights that nobody trained ------------------------------------------------------------------------------------


@cache
def ordinary(nbytes: int, seed: int = 0) -> Array:
    """u8, read-only: bytes that make ordinary numbers of every float type that they are read as.

    Every second byte is 3C, 3D, BC or BD, the high byte of a bf16 or f32 from 2^-7 to 2^-3 and of an f16 from 1 to 1.5,
    either sign; an e4m3 from 1.5 to 1.625. The others are below 2 as e4m3, and low bytes elsewhere.
    """
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 256, nbytes, np.uint8)
    found[0::2] &= 0xBF
    found[1::2] = found[1::2] & 0x81 | 0x3C
    found.flags.writeable = False
    return found


def exact_weights(built: Built) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of every weight that no parameter is part of. ValueError: one of the others is no float."""

    def parameter(name: str) -> Array:
        raise LookupError(name)

    for entry in built.program.weights:
        made = built.expressions[entry.name]
        if any(node.op == "tensor" for node in walk([made])):
            if entry.dtype not in FLOATS:
                raise ValueError(f"random bytes are no values of weight {entry.name}, {entry.dtype}")
            continue
        values = np.concatenate(list(pieces(made, parameter)))
        stored = np.zeros(entry.stored_shape or (1,), values.dtype)
        stored[..., : values.shape[-1]] = values
        yield entry.offset, stored.tobytes()


def scales(program: Program) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of FP8's scales, so that values are about 1 and stored e4m3 about E4M3: with random ones nearly
    all are stored as 0, whatever computed them."""
    offsets, done = [entry.offset for entry in program.weights], set[int]()
    for call in (call for stage in program.stages for call in stage.calls):
        names = OPS[call.op].operands if call.op in OPS else ()
        for name, ref in zip(names, call.operands, strict=False):
            if name not in ("alpha", "inv") or ref is None or ref.space != WEIGHTS:
                continue
            entry = program.weights[bisect(offsets, ref.offset) - 1]
            x = call.operands[0]
            if entry.dtype == "f32" and x is not None and entry.offset not in done:
                done.add(entry.offset)
                gain = WEIGHT_RMS * (x.shape[-1] ** 0.5) * (E4M3 if x.dtype == "e4m3" else 1.0)
                value = E4M3 if name == "inv" else 1.0 / gain
                yield entry.offset, np.full(entry.nbytes // 4, value, np.float32).tobytes()


def known_weights(built: Built) -> tuple[tuple[int, bytes], ...]:
    """Those of exact_weights, and scales where these leave them open."""
    return tuple({**dict(scales(built.program)), **dict(exact_weights(built))}.items())


def plan_in_memory(
    program: Program, cubins: Mapping[str, bytes], exact: Iterable[tuple[int, bytes]], whole: bool
) -> Plan:
    """Nothing but a block of random weights (`whole`: all of them, with the exact ones) and the cubins."""
    nbytes = program.weights_nbytes if whole else min(BLOCK, program.weights_nbytes)
    block = ordinary(nbytes).copy()
    for offset, data in exact if whole else ():
        block[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    tensors = [Tensor(w.name, w.dtype, w.shape, 0, 0, 0) for w in program.weights]
    parts, at = [block.tobytes()], nbytes
    for name, image in cubins.items():
        tensors.append(Tensor(name, "U8", (len(image),), at, at + len(image), at + len(image)))
        parts.append(image)
        at += len(image)
    return Plan(Path("in memory"), program, "", {}, (), memoryview(b"".join(parts)), tuple(tensors), (), verified=True)


def fill_weights(session: Session, exact: Iterable[tuple[int, bytes]]) -> None:
    """Repeat the block over all weights, also over what lay behind it in memory; then the exact ones."""
    address, nbytes, filled = session.addresses[WEIGHTS], session.program.weights_nbytes, BLOCK
    with session.driver.current():
        while filled < nbytes:
            count = min(filled, nbytes - filled)
            session.driver.call("cuMemcpyDtoD", address + filled, address, count)
            filled += count
        for offset, data in exact:
            source = np.frombuffer(data, np.uint8)
            session.driver.call("cuMemcpyHtoD", address + offset, source.ctypes.data, source.nbytes)
        session.driver.call("cuCtxSynchronize")  # copies on the device are on no stream of ours


# ---- a run ----------------------------------------------------------------------------------------------------------


def run(trial: Trial, probes: Sequence[str], gpu: bool = True) -> dict[str, Any]:
    """Microseconds by part, elements of the outputs, elements of what the probes see. Not on a GPU: emulated."""
    made = {f"{PROBE}{i}": trial.probes[key] for i, key in enumerate(probes)}
    stages = [Stage(name, trial.program.stage(of).calls[: at + 2]) for name, (of, at) in made.items()]
    program = replace(trial.program, stages=(*trial.program.stages, *stages))
    plan = plan_in_memory(program, trial.cubins, trial.exact, not gpu)
    with closing(Session(plan, check_finite=False) if gpu else Emulator(plan, poison=True)) as executor:
        if isinstance(executor, Session):
            fill_weights(executor, trial.exact)
        for name, value in trial.inputs.items():
            executor.set(name, value)
        found = {key: _probe(executor, name, *made[name]) for key, name in zip(probes, made, strict=True)}
        executor.reset()
        executor.run()
        outputs = [some(executor.get(name)) for name in executor.outputs]
        timing = executor.time(SAMPLES, WARM_UP) if gpu else executor.time(1, 0)
    times = {name: spread.percentiles["p50"] for name, spread in timing.parts.items()}
    return {"times": times, "outputs": outputs, "probes": found}


def _probe(executor: Executor, name: str, program: str, at: int) -> list[list[float]]:
    """Results of the call and of the one behind it: some of that one's operands may be written too late."""
    executor.reset()
    for stage, round in unrolled(executor.program.schedule):
        if stage == program:
            break
        executor.run_stage(stage, round)
    if isinstance(executor, Session):
        arena = max(executor.program.arena_nbytes, 1)
        with executor.driver.current():
            executor.driver.call("cuMemsetD8Async", executor.addresses[ARENA], POISON, arena, executor.stream)
    executor.run_stage(name)
    calls = executor.program.stage(name).calls[at:]
    return [some(executor.peek(ref)) for call in calls for ref in call.results if 0 not in ref.shape]


def some(values: Array) -> list[float]:
    """Elements drawn at random, always the same."""
    drawn = np.random.default_rng(values.size).integers(0, values.size, min(ELEMENTS, values.size))
    return [float(x) for x in values.reshape(-1)[drawn]]


def sites_at(program: Program, sites: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, int]]:
    """Site -> (program, place) of the first call of an inference that is one. sites: those of each program's calls."""
    found: dict[str, tuple[str, int]] = {}
    for stage, _ in unrolled(program.schedule):
        for at, key in enumerate(sites.get(stage, ())):
            found.setdefault(key, (stage, at))
    return found
