"""Is a Program sound? Every number that the runtime follows is checked before anything is allocated or launched.

A Plan may come from anywhere, so nothing in it is believed: sizes, offsets, indices and order are checked against one
another, and the kernels against their cubins. Types and fields were checked when the manifest was read.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

from frtc.errors import FrtcError
from frtc.kernels.cubin import parameters_of, resources_of, sm_of, waits
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.reference import REFERENCES
from frtc.kernels.smxx_frames import CUBIN, PARAMETERS, THREADS
from frtc.runtime import tensor_map
from frtc.runtime.manifest import Manifest
from frtc.runtime.plan import (
    ARENA,
    SLOT,
    SPACES,
    STATE,
    WEIGHTS,
    Call,
    Launch,
    Overlap,
    Program,
    Ref,
    Repeat,
    Run,
    Slot,
    Stage,
    joined,
    unrolled,
)
from frtc.runtime.policy import Policy, Tokens
from frtc.runtime.races import extent, race_in

ALIGN = 256  # bytes; of every weight
NBYTES_MOST = 1 << 42  # of a space
RANK_MOST = 16
LAUNCHES_MOST = 100_000  # of one inference
DEPTH_MOST = 8  # of repeats
GRID_MOST, BLOCK_MOST = (2**31 - 1, 65535, 65535), 1024  # CUDA programming guide, all compute capabilities
SMEM_MOST = 227 * 1024  # bytes of dynamic shared memory, the most of any target
REGISTERS_MOST = 65536  # of a block
EARLY_SM_LEAST = 90  # where a kernel can wait for those before it
NUMBERS = {"i32": 4, "i64": 8, "f32": 4}  # parameter kinds that hold a number, and their bytes
SIZES = {**NUMBERS, "tensormap": tensor_map.NBYTES}  # bytes of all kinds that are no addresses, which have 8
MALFORMED = (ValueError, KeyError, IndexError, OverflowError, struct.error)  # what reading an ELF that is none raises
POINTERS = ("operand", "result", "scratch", "counters")


def bad(where: str, what: str) -> FrtcError:
    return FrtcError("plan.invalid", f"{where}: {what}", hint="the Plan is damaged or forged: compile it again")


def check_manifest(manifest: Manifest) -> None:
    """Everything that can be checked without the bytes of weights and cubins."""
    program = manifest.program
    _check_sizes(program)
    _check_names(manifest)
    _check_weights(program)
    rounds = rounds_of(program)
    _check_kernels(manifest)
    for stage in program.stages:
        calls = _Calls(program, stage, rounds.get(stage.name, 1))
        for i, call in enumerate(stage.calls):
            calls.check(i, call)
        if race := race_in(stage.calls, [rounds.get(stage.name, 1)] * len(stage.calls)):
            raise bad(f"stage {stage.name}", race)
    if program.overlap:
        _check_overlap(program, program.overlap, rounds)
    if program.policy:
        _check_tokens(program, Policy.from_json(program.policy).find(Tokens))


def _check_tokens(program: Program, tokens: Tokens | None) -> None:
    """A kernel looks up any id: the policy lets none through that a table does not have."""
    for call in (call for stage in program.stages for call in stage.calls):
        table, ids = call.operands[:2] if call.op == "embedding" and tokens else (None, None)
        if tokens and table and ids and ids.slot == "tokens" and tokens.vocab > table.shape[0]:
            what = f"a vocabulary of {tokens.vocab} pieces, {call.name} looks them up in {table.shape[0]}"
            raise bad("policy", what)


def _check_sizes(program: Program) -> None:
    for name in ("weights_nbytes", "arena_nbytes", "state_nbytes"):
        if not 0 <= getattr(program, name) <= NBYTES_MOST:
            raise bad(f"program.{name}", f"{getattr(program, name)} bytes")
    if not 0 < program.target.sm < 1000 or not 0 <= program.target.min_driver < 100_000:
        raise bad("program.target", f"sm {program.target.sm}, driver {program.target.min_driver}")
    if not 0 <= program.target.sms < 10_000:
        raise bad("program.target", f"{program.target.sms} multiprocessors")


def _check_names(manifest: Manifest) -> None:
    """Names are unique, and none can be taken for another kind of tensor."""
    program = manifest.program
    slots, stages = [*program.inputs, *program.outputs], program.stages
    for kind, records in (("weight", program.weights), ("slot", slots), ("stage", stages), ("file", manifest.files)):
        names = [r.name for r in records]
        if len(set(names)) != len(names) or not all(name and name.isprintable() for name in names):
            raise bad(f"{kind} names", f"twice, empty or unprintable among {len(names)}")
    built = program.target
    for text in (program.model, built.name, built.nvcc, built.family, built.evidence):
        if not text.isprintable():
            raise bad("program", f"model and target have texts that are not printable: {text!r}")
    for file in manifest.files:
        if file.name.startswith(("w:", "__")) or not 0 <= file.nbytes <= NBYTES_MOST:
            raise bad(f"file {file.name!r}", f"a name of another kind, or {file.nbytes} bytes")
    for slot in slots:
        _check_type(f"slot {slot.name}", slot.dtype, slot.shape)


def _check_type(where: str, dtype: str, shape: Sequence[int]) -> None:
    if dtype not in DTYPES:
        raise bad(where, f"unknown element type {dtype!r}")
    size = DTYPES[dtype].itemsize
    for length in shape:
        size *= max(length, 1)
        if length < 0 or size > NBYTES_MOST:
            raise bad(where, f"shape {list(shape)}")
    if len(shape) > RANK_MOST:
        raise bad(where, f"{len(shape)} axes")


def _check_weights(program: Program) -> None:
    at = 0
    for i, weight in enumerate(program.weights):
        _check_type(f"weight {weight.name}", weight.dtype, weight.shape)
        if weight.offset % ALIGN or weight.offset < at or (i == 0 and weight.offset):
            raise bad(f"weight {weight.name}", f"starts at byte {weight.offset}, the one before it ends at {at}")
        at = weight.offset + weight.nbytes
    if at > program.weights_nbytes or (not program.weights and program.weights_nbytes):
        raise bad("program.weights_nbytes", f"{program.weights_nbytes} bytes, the weights end at {at}")


def rounds_of(program: Program) -> dict[str, int]:
    """The most rounds of any repeat directly around each stage. The schedule ends, and names stages that exist."""
    launches = {stage.name: 1 + sum(len(call.launches) for call in stage.calls) for stage in program.stages}
    rounds: dict[str, int] = {}

    def total(steps: tuple[Run | Repeat, ...], around: int, depth: int) -> int:
        count = 0
        for step in steps:
            if isinstance(step, Run):
                if step.stage not in launches:
                    raise bad("schedule", f"runs {step.stage!r}, which is no stage")
                rounds[step.stage] = max(rounds.get(step.stage, 1), around)
                count += launches[step.stage]
            elif step.count < 1 or depth == DEPTH_MOST:
                raise bad("schedule", f"repeats {step.count} times, {depth} deep")
            else:
                count += step.count * max(1, total(step.body, step.count, depth + 1))
        return count

    count = total(program.schedule, 1, 0)
    if not 0 < count <= LAUNCHES_MOST:
        raise bad("schedule", f"{count} launches")
    return rounds


def _check_kernels(manifest: Manifest) -> None:
    files = {file.name for file in manifest.files}
    for i, entry in enumerate(manifest.program.kernels):
        if entry.cubin not in files:
            raise bad(f"kernels[{i}]", f"its cubin {entry.cubin!r} is not in the file")
        if not entry.symbol or not entry.symbol.isascii() or "\0" in entry.symbol:
            raise bad(f"kernels[{i}]", f"symbol {entry.symbol!r}")
        if not 0 <= entry.smem <= SMEM_MOST:
            raise bad(f"kernels[{i}]", f"{entry.smem} bytes of shared memory")


class _Calls:
    """Checks the calls of one stage. `rounds`: how often tables may step."""

    def __init__(self, program: Program, stage: Stage, rounds: int) -> None:
        self.program, self.stage, self.rounds = program, stage, rounds
        self.sizes = {WEIGHTS: program.weights_nbytes, ARENA: program.arena_nbytes, STATE: program.state_nbytes}
        self.slots: dict[str, Slot] = {slot.name: slot for slot in (*program.inputs, *program.outputs)}

    def check(self, i: int, call: Call) -> None:
        where = f"stage {self.stage.name}, call {i} ({call.op})"
        _check_after(where, i, call.after)
        for kind, refs in (("operand", call.operands), ("result", call.results)):
            for k, ref in enumerate(refs):
                if ref is not None:
                    self._check_ref(f"{where}, {kind} {k}", ref)
        if any(ref.space == WEIGHTS for ref in call.results):
            raise bad(where, "writes to the weights")
        for name, space in (("scratch", ARENA), ("counters", STATE)):
            start, nbytes = getattr(call, name)
            if start < 0 or nbytes < 0 or start + nbytes > self.sizes[space]:
                raise bad(where, f"{name} of {nbytes} bytes at {start}, the {space} has {self.sizes[space]}")
        _check_op(where, call)
        if not call.launches or not call.results:
            raise bad(where, "launches or computes nothing")
        for launch in call.launches:
            self._check_launch(where, call, launch)

    def _check_ref(self, where: str, ref: Ref) -> None:
        named = ref.slot in self.slots if ref.space == SLOT else not ref.slot
        if ref.space not in SPACES or not named:
            raise bad(where, f"space {ref.space!r}, slot {ref.slot!r}")
        _check_type(where, ref.dtype, ref.shape)
        size = DTYPES[ref.dtype].itemsize
        if len(ref.strides) != len(ref.shape) or any(s < 0 for s in ref.strides):
            raise bad(where, f"strides {list(ref.strides)} for shape {list(ref.shape)}")
        if ref.offset < 0 or ref.step < 0 or ref.offset % size or ref.step % size:
            raise bad(where, f"offset {ref.offset} and step {ref.step} for elements of {size} bytes")
        _, start, end = extent(ref, self.rounds)
        room = self.slots[ref.slot].nbytes if ref.space == SLOT else self.sizes[ref.space]
        if end > room:
            raise bad(where, f"bytes {start} to {end} of {ref.slot or ref.space}, which has {room}")

    def _check_launch(self, where: str, call: Call, launch: Launch) -> None:
        if not 0 <= launch.kernel < len(self.program.kernels):
            raise bad(where, f"kernel {launch.kernel} of {len(self.program.kernels)}")
        if any(not 1 <= n <= most for n, most in zip(launch.grid, GRID_MOST, strict=True)):
            raise bad(where, f"grid {list(launch.grid)}")
        if not 1 <= launch.block <= BLOCK_MOST:
            raise bad(where, f"block of {launch.block} threads")
        if not 0 <= launch.smem <= self.program.kernels[launch.kernel].smem:
            raise bad(where, f"{launch.smem} bytes of shared memory")
        for kind, value in launch.params:
            if kind not in SIZES and kind not in POINTERS:
                raise bad(where, f"parameter of unknown kind {kind!r}")
            if not _fits(kind, value, call, launch):
                raise bad(where, f"{kind} parameter {value}")
        self._check_features(where, call, launch)

    def _check_features(self, where: str, call: Call, launch: Launch) -> None:
        """What only some GPUs have."""
        sm = self.program.target.sm
        if launch.early and sm < EARLY_SM_LEAST:
            raise bad(where, f"an early launch, which sm_{sm} does not have")
        if launch.meets and not self.program.target.sms:
            raise bad(where, "blocks that wait for each other, on any number of multiprocessors")
        if launch.tensormaps and sm < tensor_map.SM_LEAST:
            raise bad(where, f"tensor maps, which sm_{sm} does not have")
        for i, map in enumerate(launch.tensormaps):
            if why := tensor_map.refuse(map, call):
                raise bad(f"{where}, tensor map {i}", why)


def _fits(kind: str, value: int | float, call: Call, launch: Launch) -> bool:
    if kind == "f32":
        return True
    if type(value) is not int:
        return False
    if kind in NUMBERS:
        most = 1 << (8 * NUMBERS[kind] - 1)
        return -most <= value < most
    if kind == "tensormap":
        return 0 <= value < len(launch.tensormaps)
    if kind in ("operand", "result"):
        return 0 <= value < len(call.operands if kind == "operand" else call.results)
    return 0 <= value < max(1, (call.scratch if kind == "scratch" else call.counters)[1])


def _check_op(where: str, call: Call) -> None:
    """The op has a reference that takes these operands and attributes."""
    if call.op not in REFERENCES:
        raise bad(where, "no such op")
    try:
        signature = _signature(call.op)
        if signature:
            signature.bind(*call.operands, **call.attrs)
    except TypeError as fault:
        raise bad(where, f"{len(call.operands)} operands, attributes {', '.join(call.attrs)}: {fault}") from None


@cache
def _signature(op: str) -> inspect.Signature | None:
    try:
        return inspect.signature(REFERENCES[op])
    except ValueError:  # some functions of NumPy have none
        return None


def _check_after(where: str, i: int, after: Sequence[int]) -> None:
    if any(b <= a for a, b in pairwise(after)):
        raise bad(where, f"waits for {list(after)}, which is not in order")
    if after and not (after[0] >= 0 and after[-1] < i):
        raise bad(where, f"waits for call {after[-1]}, which does not come before it")


def _check_overlap(program: Program, overlap: Overlap, rounds: Mapping[str, int]) -> None:
    """They are the stages that run first, and what they wait for is enough."""
    names = overlap.stages
    if len(names) < 2:
        raise bad("overlap", f"of {len(names)} stages")
    if names != tuple(name for name, _ in unrolled(program.schedule)[: len(names)]) or len(set(names)) < len(names):
        raise bad("overlap", f"{', '.join(names)} are not the stages that run first, each once")
    stages = [program.stage(name) for name in names]
    often = [rounds[stage.name] for stage in stages for _ in stage.calls]
    if len(overlap.after) != len(often):
        raise bad("overlap", f"says of {len(overlap.after)} calls what they wait for, the stages have {len(often)}")
    calls = joined(stages, overlap.after)
    for i, call in enumerate(calls):
        _check_after(f"overlap, call {i} ({call.op})", i, call.after)
    if race := race_in(calls, often):
        raise bad("overlap", race)


# ---- cubins ----------------------------------------------------------------------------------------------------------


def check_cubins(program: Program, cubins: Mapping[str, bytes]) -> None:
    """Each kernel is in its cubin, which was built for the target, takes the parameters that launches give, and waits
    for those before it where a launch is early. That it does so before it touches what they wrote cannot be seen."""
    found = {name: _read_cubin(program, name, image) for name, image in cubins.items()}
    sizes, early = [], {launch.kernel for launch in _launches(program) if launch.early}
    for i, entry in enumerate(program.kernels):
        if entry.symbol not in found[entry.cubin]:
            raise bad(f"kernels[{i}]", f"{entry.cubin} has no kernel {entry.symbol!r}")
        sizes.append(_parameters(entry.cubin, cubins[entry.cubin], entry.symbol))
        if i in early and not waits(cubins[entry.cubin], entry.symbol):
            raise bad(f"kernels[{i}]", f"{entry.symbol!r} does not wait, and a launch of it is early")
    for stage in program.stages:
        for k, call in enumerate(stage.calls):
            for launch in call.launches:
                where = f"stage {stage.name}, call {k} ({call.op})"
                given = tuple(SIZES.get(kind, 8) for kind, _ in launch.params)
                if given != sizes[launch.kernel]:
                    raise bad(where, f"parameters of {given} bytes, the kernel takes {sizes[launch.kernel]}")
                entry = program.kernels[launch.kernel]
                if found[entry.cubin][entry.symbol] * launch.block > REGISTERS_MOST:
                    raise bad(where, f"{launch.block} threads need more registers than there are")


def check_frames(program: Program, image: bytes) -> None:
    """The cubin of camera frames, which no call launches: one kernel, with the parameters that the runtime gives."""
    registers = _read_cubin(program, CUBIN, image)
    if len(registers) != 1:
        raise bad(CUBIN, f"holds {len(registers)} kernels, not one")
    (symbol,) = registers
    if (found := _parameters(CUBIN, image, symbol)) != PARAMETERS:
        raise bad(CUBIN, f"takes parameters of {found} bytes, not {PARAMETERS}")
    if registers[symbol] * THREADS > REGISTERS_MOST:
        raise bad(CUBIN, f"{THREADS} threads need more registers than there are")


def _launches(program: Program) -> Iterator[Launch]:
    return (launch for stage in program.stages for call in stage.calls for launch in call.launches)


def _read_cubin(program: Program, name: str, image: bytes) -> dict[str, int]:
    """Registers of each kernel by its symbol."""
    try:
        sm, resources = sm_of(image), resources_of(image)
    except MALFORMED as fault:
        raise bad(name, f"is no cubin: {fault}") from None
    if sm != program.target.sm:
        raise bad(name, f"is built for sm_{sm}, the Plan for sm_{program.target.sm}")
    return {symbol: r.registers for symbol, r in resources.items()}


def _parameters(name: str, image: bytes, symbol: str) -> tuple[int, ...]:
    try:
        return parameters_of(image, symbol)
    except MALFORMED as fault:
        raise bad(name, f"is no cubin: {fault}") from None
