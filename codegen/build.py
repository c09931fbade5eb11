"""Build: a module after all passes becomes a Program and the cubins it launches.

Emit every program, plan memory, derive dependences, compile what is launched. Nothing here depends on the name of model
or target; two builds of the same module for the same target give equal programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from frtc.codegen.dependences import verify_no_race, with_dependences
from frtc.codegen.emit import Emitted, Emitter
from frtc.codegen.memory import Lifetime, aligned, plan_arena
from frtc.codegen.nvrtc import Job, compile_all
from frtc.codegen.overlap import leading, overlap_of
from frtc.codegen.placement import Placement, place_module
from frtc.codegen.places import Buffer, Place, new_place
from frtc.codegen.pointwise import copy_site
from frtc.codegen.settled import settled_rows
from frtc.errors import FrtcError
from frtc.kernels.catalog import CATALOG, Catalog
from frtc.kernels.spec import Stage as KernelStage
from frtc.kernels.targets import Target
from frtc.lowering.ir import Let, Module, Node, Step
from frtc.lowering.ir import Repeat as IrRepeat
from frtc.lowering.ir import Run as IrRun
from frtc.runtime import plan
from frtc.runtime.plan import Call, Entry, Launch, Program, Repeat, Run, Slot, Stage, TensorMap, WeightEntry


@dataclass(frozen=True, slots=True)
class Built:
    """A program without policy, its cubins by tensor name, and the expression of each weight."""

    program: Program
    cubins: Mapping[str, bytes]
    expressions: Mapping[str, Node]
    emitted: Mapping[str, tuple[Emitted, ...]]


def build(
    module: Module,
    target: Target,
    families: tuple[str, ...] = ("baseline",),
    catalog: Catalog = CATALOG,
    done: Callable[[float], None] = lambda share: None,
) -> Built:
    """Choose kernels, place values, compile. `done` is told which share of the kernels is compiled."""
    _require_supported(module)
    placement = place_module(module)
    weights = _Weights()
    emitted: dict[str, list[Emitted]] = {}
    loops = _loops(module.schedule)
    for graph in module.graphs:
        counter = loops[graph.name].index if graph.name in loops else ""
        emitter = Emitter(graph, placement, target, catalog, families, counter, weights.place)
        emitted[graph.name] = emitter.run()
    schedule = _schedule(module.schedule, placement, target, catalog, families, emitted)
    together = leading(schedule) if target.overlaps else ()
    arena, state = _plan_memory(emitted, placement, together)
    launched = [s for calls in emitted.values() for c in calls for s in _stages(c, target)]
    launches, entries, cubins = _compile(launched, target, done)
    rounds = {name: loop.count for name, loop in loops.items()}
    stages = {name: _stage(name, calls, target, launches, rounds.get(name, 1)) for name, calls in emitted.items()}
    known = dict(module.weights.outputs)
    expressions = {name: known[name] for name in weights.places}
    program = Program(
        model=module.name,
        target=_built_for(target, families, emitted),
        weights_nbytes=weights.nbytes,
        arena_nbytes=arena,
        state_nbytes=state,
        kernels=entries,
        weights=weights.entries(),
        inputs=tuple(Slot(name, t.dtype, t.shape) for name, t in module.inputs.items()),
        outputs=tuple(_output(module, outside, name) for outside, name in module.outputs),
        stages=tuple(stages.values()),
        schedule=schedule,
        overlap=overlap_of(together, stages, rounds),
    )
    return Built(program, cubins, expressions, {k: tuple(v) for k, v in emitted.items()})


class _Weights:
    """The weights block: one place per weight that a call reads, in order of first use."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[Node, Place]] = {}
        self.nbytes = 0

    def place(self, node: Node) -> Place:
        name = node["name"]
        if name not in self.places:
            place = new_place(plan.WEIGHTS, node.t)
            place.buffer.offset = self.nbytes
            self.nbytes += aligned(place.buffer.nbytes)
            self.places[name] = (node, place)
        return self.places[name][1]

    def entries(self) -> tuple[WeightEntry, ...]:
        return tuple(WeightEntry(name, p.buffer.offset, n.dtype, n.shape) for name, (n, p) in self.places.items())


def _require_supported(module: Module) -> None:
    """What a Program cannot say yet."""
    names = [g.name for g in module.graphs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FrtcError("codegen.variants", f"program {twice[0]} has variants; a Plan holds one of each program")
    made = {name for g in module.graphs for name, _ in g.outputs}
    sources = [name for _, name in module.outputs]
    for outside, name in module.outputs:
        if name not in made or sources.count(name) > 1:
            why = "another result is, too" if name in made else "no program computes it"
            raise FrtcError("codegen.output", f"result {outside} cannot be {name}: {why}")


def _loops(steps: tuple[Step, ...], around: IrRepeat | None = None) -> dict[str, IrRepeat]:
    """The innermost repeat around each program that has one."""
    found: dict[str, IrRepeat] = {}
    for step in steps:
        inner = _loops(step.body, step) if isinstance(step, IrRepeat) else {}
        if isinstance(step, IrRun) and around is not None:
            inner = {step.program: around}
        for program, loop in inner.items():
            if found.setdefault(program, loop) != loop:
                raise FrtcError("codegen.loops", f"program {program} runs in two loops; give each a program of its own")
    return found


def _built_for(target: Target, families: tuple[str, ...], emitted: Mapping[str, list[Emitted]]) -> plan.BuiltFor:
    """The target, and the families that some kernel comes from."""
    used = {call.choice.kernel.family for calls in emitted.values() for call in calls}
    family = "+".join(name for name in families if name in used)
    meets = any(stage.meets for calls in emitted.values() for call in calls for stage in _stages(call, target))
    about = (target.name, target.sm, target.nvcc, target.min_driver, family, target.evidence)
    return plan.BuiltFor(*about, target.sms if meets else 0)


def _schedule(
    steps: tuple[Step, ...],
    placement: Placement,
    target: Target,
    catalog: Catalog,
    families: tuple[str, ...],
    emitted: dict[str, list[Emitted]],
) -> tuple[Run | Repeat, ...]:
    """The Plan's schedule; a `let` becomes a stage of one copy."""
    result: list[Run | Repeat] = []
    for step in steps:
        if isinstance(step, IrRun):
            result.append(Run(step.program))
        elif isinstance(step, IrRepeat):
            result.append(Repeat(step.count, _schedule(step.body, placement, target, catalog, families, emitted)))
        elif isinstance(step, Let):
            source, home = placement.shared[step.source], placement.shared[step.name]
            site = copy_site(source.operand(), home.operand())
            choice = catalog.select(site, target, families)
            emitted[f"let.{step.name}"] = [Emitted(f"let {step.name}", site, choice, (source,), (home,), None)]
            result.append(Run(f"let.{step.name}"))
        else:
            what = "a loop whose end is decided on the device cannot be compiled yet"
            raise FrtcError("codegen.while", what, [("loop", f"while {step.condition}")], "unroll it with repeat")
    return tuple(result)


def _plan_memory(
    emitted: Mapping[str, list[Emitted]], placement: Placement, together: Sequence[str]
) -> tuple[int, int]:
    """Set the offset of every buffer; sizes of the arena and of the state space. Programs that run `together` share no
    byte of the arena."""
    arena, state, taken = 0, 0, 0
    kept = [p.buffer for p in [*placement.shared.values(), *placement.concats.values()]]
    kept += [c.counters for calls in emitted.values() for c in calls if c.counters]
    for buffer in dict.fromkeys(kept):
        if buffer.space == plan.STATE and buffer.offset < 0:
            buffer.offset, state = state, state + aligned(buffer.nbytes)
    for name, calls in emitted.items():
        touched: dict[Buffer, list[int]] = {}
        for i, call in enumerate(calls):
            buffers = [p.buffer for p in (*call.operands, *call.results) if p is not None] + [call.scratch]
            for b in buffers:
                if b is not None and b.space == plan.ARENA:
                    touched.setdefault(b, []).append(i)
        offsets, size = plan_arena([Lifetime(b.nbytes, at[0], at[-1]) for b, at in touched.items()])
        base = taken if name in together else 0
        for b, offset in zip(touched, offsets, strict=True):
            b.offset = base + offset
        arena = max(arena, base + size)
        taken += size if name in together else 0
    return arena, state


def _stages(call: Emitted, target: Target) -> tuple[KernelStage, ...]:
    return call.choice.kernel.stages(call.site, call.choice.config, target)


def _compile(
    stages: list[KernelStage], target: Target, done: Callable[[float], None]
) -> tuple[dict[Job, int], tuple[Entry, ...], dict[str, bytes]]:
    """Compile each distinct kernel once: job -> index of its entry, the entries, cubins by tensor name."""
    most: dict[Job, int] = {}
    for stage in stages:
        job = Job.of(stage, target)
        most[job] = max(most.get(job, 0), stage.smem)
    compiled = compile_all(list(most), done=lambda job, share: done(share))
    names = {job: f"cubin.{i:03d}" for i, job in enumerate(most)}
    entries = tuple(Entry(names[job], c.symbol, most[job]) for job, c in zip(most, compiled, strict=True))
    cubins = {names[job]: c.image for job, c in zip(most, compiled, strict=True)}
    return {job: i for i, job in enumerate(most)}, entries, cubins


def _stage(name: str, emitted: list[Emitted], target: Target, index: Mapping[Job, int], rounds: int) -> Stage:
    stages = [_stages(e, target) for e in emitted]
    often = [rounds] * len(emitted)
    calls = with_dependences([call_of(e, target, index) for e in emitted], often)
    verify_no_race(calls, often)
    return Stage(name, _settled(calls, stages, rounds))


def _settled(calls: tuple[Call, ...], stages: list[tuple[KernelStage, ...]], rounds: int) -> tuple[Call, ...]:
    """With the rows that launches may read before they wait."""
    begun = [any(stage.begun for stage in own) for own in stages]
    found = []
    for i, (call, own) in enumerate(zip(calls, stages, strict=True)):
        launches = []
        for launch, stage in zip(call.launches, own, strict=True):
            if launch.early and stage.settled:
                at, *places = stage.settled
                params = list(launch.params)
                params[at] = ("i32", settled_rows(calls, i, places, begun, rounds))
                launch = replace(launch, params=tuple(params))
            launches.append(launch)
        found.append(replace(call, launches=tuple(launches)))
    return tuple(found)


def call_of(e: Emitted, target: Target, index: Mapping[Job, int]) -> Call:
    """The record of a call whose buffers have their offsets. index: place of each kernel among the compiled ones."""
    launches = []
    for stage in _stages(e, target):
        known = all((place := e.operands[i]) is not None and place.buffer.space == plan.WEIGHTS for i in stage.ahead)
        launches.append(_launch(stage, index[Job.of(stage, target)], target, known))
    return Call(
        name=e.name,
        op=e.site.op,
        attrs=dict(e.site.attrs),
        operands=tuple(None if p is None else p.ref() for p in e.operands),
        results=tuple(p.ref() for p in e.results),
        launches=tuple(launches),
        scratch=(e.scratch.offset, e.scratch.nbytes) if e.scratch else (0, 0),
        counters=(e.counters.offset, e.counters.nbytes) if e.counters else (0, 0),
    )


def _launch(stage: KernelStage, kernel: int, target: Target, known: bool) -> Launch:
    """It is early where the target can, the kernel waits, and what it reads before is `known`: weights.

    Nobody else may be, the reader cannot tell.
    """
    return Launch(
        kernel,
        stage.grid,
        stage.block,
        stage.smem,
        params=tuple((p.kind, p.value) for p in stage.params),
        tensormaps=tuple(
            TensorMap((m.of.kind, int(m.of.value)), m.dtype, m.extents, m.strides, m.box, m.swizzle)
            for m in stage.tensormaps
        ),
        early=stage.waits and known and "pdl" in target.has,
        meets=stage.meets,
    )


def _output(module: Module, outside: str, name: str) -> Slot:
    type = next(n.t for g in module.graphs for k, n in g.outputs if k == name)
    return Slot(outside, type.dtype, type.shape)
