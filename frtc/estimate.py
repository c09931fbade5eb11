"""What an inference takes on a GPU that is not there: roofline and expected time of each stage. Runs nothing.

    Estimate.of(calls_of_module(module, target, families), target, "bf16", FITTED)
    Estimate.of(calls_of_plan(plan.program, target, families), target, "fp8", FITTED)

The expected time of a call is what its kernel's cost model says, times a factor of its kind, plus a gap for every
launch. Factors and gap are fitted to measured stages (bench/fit.py) and lie in fitted.json beside this file.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frtc.codegen.emit import Emitted, Emitter
from frtc.codegen.placement import place_module
from frtc.codegen.places import new_place
from frtc.codegen.pointwise import copy_site
from frtc.console import table
from frtc.errors import FrtcError
from frtc.kernels.catalog import CATALOG, ELSEWHERE, Choice, NoKernel
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Operand, Site, Stage
from frtc.kernels.targets import Target
from frtc.lowering.ir import Let, Module, Repeat, Run, Step, Type
from frtc.lowering.ops import OPS
from frtc.results import counters
from frtc.runtime.plan import WEIGHTS, Call, Program, Ref, unrolled
from frtc.work import GATHERS, ON_TENSOR_CORES

FEW_ROWS = 64  # a product of at most so many rows waits for its weights, one of more for the tensor cores
KINDS = ("product of few rows", "product", "attention", "moves data")
MEASURED = "measured call"  # the label of calls whose time a tactic says
LATENT_US = 3.0  # a launch takes about so long whatever it does: start, first bytes, last results; on an H200
F32_FLOPS = 256 * 1.7e9  # of an SM in a second: 128 lanes of multiply-adds at the clock under load


@dataclass(frozen=True, slots=True)
class Fitted:
    """What measurements say of the cost models.

    target, gpu   what was measured, and what the factors are taken from for every other target
    gaps_us       family -> of each launch, beside its cost; 0 where nothing is known
    factors       "baseline product" (family and kind) -> what its cost is multiplied by; 1 where nothing is known
    ceilings      target -> measured "dram" (bytes a second) and "tflops" by type, in place of the datasheet's
    held_out      configuration that was not fitted -> relative error of its estimate
    """

    target: str
    gpu: str
    source: str
    gaps_us: Mapping[str, float]
    factors: Mapping[str, float]
    ceilings: Mapping[str, Mapping[str, Any]]
    fit: tuple[str, ...]
    held_out: Mapping[str, float]

    @staticmethod
    def read(path: Path) -> Fitted:
        found = json.loads(path.read_text())
        return Fitted(**found | {"fit": tuple(found["fit"])})

    def expected_us(self, label: str, cost_us: float, launches: int) -> float:
        """Of launches of one label (Priced.label) whose kernels say that they take cost_us together."""
        gap_us = self.gaps_us.get(label.split()[0], 0.0)
        return max(0.0, self.factors.get(label, 1.0) * cost_us + gap_us * launches)


FITTED_PATH = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True, slots=True)
class Priced:
    """Equal calls of a stage.

    weights    which operands are weights
    frozen     the choice is the Plan's own; else it was made anew
    launches   of one call; count: calls in one inference
    """

    stage: str
    site: Site
    weights: tuple[bool, ...]
    choice: Choice
    launches: int
    count: int
    frozen: bool = True

    @property
    def label(self) -> str:
        """What a factor is fitted for: family and kind, or calls whose time a tactic says."""
        return MEASURED if self.choice.pick.tactic else f"{self.choice.kernel.family} {kind_of(self.site)}"

    @property
    def cost_us(self) -> float:
        """Of one call: as it was measured alone, else by the cost model."""
        tactic = self.choice.pick.tactic
        return tactic.us if tactic else self.choice.cost_us


@dataclass(frozen=True, slots=True)
class Part:
    """A stage, all its rounds together. Bytes are of every operand and result once in each call.

    bound   what most of its time goes to: "memory", "compute", or "latency": launches too small for either
    costs   label of kernels -> (microseconds by the cost model, launches)
    """

    stage: str
    rounds: int
    launches: int
    flops: float
    nbytes: float
    roofline_us: float
    expected_us: float
    bound: str
    costs: Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one inference on a target."""

    target: Target
    precision: str
    parts: tuple[Part, ...]
    prediction: bool
    notes: tuple[str, ...]

    @staticmethod
    def of(calls: Sequence[Priced], target: Target, precision: str, rounds: Mapping[str, int], fit: Fitted) -> Estimate:
        stages = dict.fromkeys(call.stage for call in calls)
        parts = tuple(_part(s, rounds.get(s, 1), [c for c in calls if c.stage == s], target, fit) for s in stages)
        prediction = target.name != fit.target or target.evidence != "run on hardware"
        where = f"{target.title}: {target.evidence}"
        if prediction:
            notes = [f"PREDICTION. {where}; the factors are those of {fit.gpu}, {fit.source}"]
        else:
            notes = [f"{where}; the factors are fitted to {fit.gpu}, {fit.source}"]
        guessed = sorted({c.label for c in calls} - fit.factors.keys() - {MEASURED})
        if guessed:
            notes.append(f"never measured, as their cost models say: {', '.join(guessed)}")
        if anew := sum(c.count for c in calls if not c.frozen):
            notes.append(f"{anew} of {sum(c.count for c in calls)} calls: kernels chosen anew, not the Plan's own")
        return Estimate(target, precision, parts, prediction, tuple(notes))

    @property
    def expected_us(self) -> float:
        return sum(p.expected_us for p in self.parts)

    @property
    def roofline_us(self) -> float:
        return sum(p.roofline_us for p in self.parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "precision": self.precision,
            "evidence": self.target.evidence,
            "prediction": self.prediction,
            "notes": list(self.notes),
            "stages": [asdict(part) for part in self.parts],
            "roofline_us": self.roofline_us,
            "expected_us": self.expected_us,
        }

    def __str__(self) -> str:
        head = ("stage", "launches", "GFLOP", "GB", "roofline ms", "expected ms", "share", "bound by")
        rows = [self._row(_named(p), [p], p.bound) for p in self.parts]
        rows.append(self._row("total", self.parts, ""))
        title = f"{self.target.name}, {self.precision}: {self.expected_us / 1e3:.2f} ms expected"
        return "\n".join([title, table([head, *rows]), *(f"  {note}" for note in self.notes)])

    def _row(self, name: str, parts: Sequence[Part], bound: str) -> tuple[str, ...]:
        launches, flops, nbytes, roofline, expected = (
            sum(getattr(p, field) for p in parts)
            for field in ("launches", "flops", "nbytes", "roofline_us", "expected_us")
        )
        share = expected / max(self.expected_us, 1e-9)
        figures = (f"{flops / 1e9:.1f}", f"{nbytes / 1e9:.3f}", f"{roofline / 1e3:.3f}", f"{expected / 1e3:.3f}")
        return (name, str(launches), *figures, f"{share:.0%}", bound)


def _named(part: Part) -> str:
    return f"{part.stage} x {part.rounds}" if part.rounds > 1 else part.stage


# ---- what a call does -----------------------------------------------------------------------------------------------


def kind_of(site: Site) -> str:
    """One of KINDS."""
    if site.op == "attention":
        return "attention"
    if site.op not in ON_TENSOR_CORES:
        return "moves data"
    x = site.operands[0]
    assert x is not None
    return "product of few rows" if math.prod(x.shape[:-1]) <= FEW_ROWS else "product"


def flops_of(site: Site) -> float:
    """Of products and attention; everything else counts as moving data."""
    if site.op not in ON_TENSOR_CORES:
        return 0.0
    types = tuple(None if view is None else Type(view.dtype, view.shape) for view in site.operands)
    results = tuple(Type(view.dtype, view.shape) for view in site.results)
    return OPS[site.op].flops_of(types, results if len(results) > 1 else results[0], site.attrs)


def nbytes_of(site: Site, weights: Sequence[bool]) -> tuple[float, float]:
    """(bytes of weights, bytes of everything else), each operand and result once, what repeats counted once."""
    sizes = [0.0 if operand is None else _nbytes(operand) for operand in site.operands]
    results = sum(map(_nbytes, site.results))
    if site.op in GATHERS:
        sizes[0] = min(sizes[0], results)
    fixed = sum(size for size, is_weight in zip(sizes, weights, strict=True) if is_weight)
    return fixed, sum(sizes) - fixed + results


def _nbytes(view: Operand) -> float:
    extents = (n for n, stride in zip(view.shape, view.strides, strict=True) if stride or n == 0)
    return float(DTYPES[view.dtype].itemsize * math.prod(extents))


def roofline_us(call: Priced, target: Target, fit: Fitted) -> tuple[float, float]:
    """(of memory, of arithmetic) for one call. Weights come from memory, other values where they outgrow the L2."""
    ceiling = fit.ceilings.get(target.name, {})
    fixed, moved = nbytes_of(call.site, call.weights)
    nbytes = fixed + (moved if moved > target.l2 else 0.0)
    x = call.site.operands[0]
    rates = {**target.tflops, **ceiling.get("tflops", {})}
    dtype = "f32" if x is None else x.dtype
    rate = rates[dtype] * 1e12 if dtype in rates else F32_FLOPS * target.sms
    return nbytes / ceiling.get("dram", target.dram) * 1e6, flops_of(call.site) / rate * 1e6


def _part(stage: str, rounds: int, calls: Sequence[Priced], target: Target, fit: Fitted) -> Part:
    flops = nbytes = roofline = expected = 0.0
    launches, bounds, costs = 0, defaultdict[str, float](float), dict[str, tuple[float, int]]()
    for call in calls:
        memory, compute = roofline_us(call, target, fit)
        took = fit.expected_us(call.label, call.cost_us, call.launches)
        bound = "memory" if memory >= compute else "compute"
        bounds["latency" if max(memory, compute) < LATENT_US * call.launches else bound] += took * call.count
        flops += flops_of(call.site) * call.count
        nbytes += sum(nbytes_of(call.site, call.weights)) * call.count
        roofline += max(memory, compute) * call.count
        expected += took * call.count
        launches += call.launches * call.count
        us, before = costs.get(call.label, (0.0, 0))
        costs[call.label] = us + call.cost_us * call.count, before + call.launches * call.count
    return Part(stage, rounds, launches, flops, nbytes, roofline, expected, max(bounds, key=bounds.__getitem__), costs)


# ---- the calls of an inference --------------------------------------------------------------------------------------


def rounds_of_module(steps: Iterable[Step], times: int = 1) -> Counter[str]:
    """How often each program runs in one inference; a `let` is a stage of its own, as in a Plan."""
    found = Counter[str]()
    for step in steps:
        if isinstance(step, Repeat):
            found += rounds_of_module(step.body, times * step.count)
        elif isinstance(step, Run):
            found[step.program] += times
        elif isinstance(step, Let):
            found[f"let.{step.name}"] += times
        else:
            raise FrtcError("codegen.while", "nobody knows how often a loop runs whose end is decided on the device")
    return found


def rounds_of_plan(program: Program) -> Counter[str]:
    return Counter(stage for stage, _ in unrolled(program.schedule))


def calls_of_module(module: Module, target: Target, families: tuple[str, ...]) -> list[Priced]:
    """Of a module after all passes: kernels are chosen as the compiler chooses them, none is compiled."""
    return calls_of_emitted(_emitted(module, target, families), rounds_of_module(module.schedule), target)


def calls_of_emitted(
    emitted: Mapping[str, Sequence[Emitted]], rounds: Mapping[str, int], target: Target
) -> list[Priced]:
    """Of what `build` has emitted, by stage."""
    found = []
    for stage, calls in emitted.items():
        for call in calls:
            weights = tuple(p is not None and p.buffer.space == WEIGHTS for p in call.operands)
            found.append(_priced(stage, call.site, weights, call.choice, target, rounds[stage]))
    return _together(found)


def _emitted(module: Module, target: Target, families: tuple[str, ...]) -> dict[str, list[Emitted]]:
    placement, counting = place_module(module), dict(counters(module.schedule))
    found = {}
    for graph in module.graphs:
        counter = counting.get(graph.name, "")
        emitter = Emitter(graph, placement, target, CATALOG, families, counter, lambda n: new_place(WEIGHTS, n.t))
        found[graph.name] = emitter.run()
    for step in _lets(module.schedule):
        source, home = placement.shared[step.source], placement.shared[step.name]
        site = copy_site(source.operand(), home.operand())
        choice = CATALOG.select(site, target, families)
        found[f"let.{step.name}"] = [Emitted(f"let {step.name}", site, choice, (source,), (home,), None)]
    return found


def _lets(steps: Iterable[Step]) -> Iterator[Let]:
    for step in steps:
        if isinstance(step, Let):
            yield step
        elif isinstance(step, Repeat):
            yield from _lets(step.body)


def calls_of_plan(program: Program, target: Target, families: tuple[str, ...]) -> list[Priced]:
    """Of a Plan: with its own kernels for its own target; for another one they are chosen anew for the same calls.

    Raises NoKernel where the target runs none: a compile for it would have made other calls.
    """
    rounds, known = rounds_of_plan(program), dict[tuple[Any, ...], Priced]()
    found = []
    for stage in program.stages:
        for call in stage.calls:
            site, weights = site_of(call), tuple(r is not None and r.space == WEIGHTS for r in call.operands)
            own = _shapes(call) if target.name == program.target.name else ()
            key = (*_key(stage.name, site, weights), own)
            if key not in known:
                frozen = _frozen(site, own, target, families)
                choice = frozen or CATALOG.select(site, target, families)
                known[key] = _priced(stage.name, site, weights, choice, target, rounds[stage.name], frozen is not None)
            found.append(known[key])
    return _together(found)


def site_of(call: Call) -> Site:
    """The site that a call of a Plan was emitted for."""
    operands = tuple(None if r is None else _operand(r) for r in call.operands)
    return Site(call.op, operands, tuple(map(_operand, call.results)), call.attrs)


def _operand(ref: Ref) -> Operand:
    return Operand(ref.dtype, ref.shape, ref.strides)


def _shapes(call: Call) -> tuple[Any, ...]:
    """By which a kernel and its config are known again."""
    return tuple((n.grid, n.block, n.smem, n.params) for n in call.launches)


def _frozen(site: Site, own: tuple[Any, ...], target: Target, families: tuple[str, ...]) -> Choice | None:
    """The candidate that becomes these launches; None: they are of another version of the kernels."""
    today = CATALOG.select(site, target, families)  # knows what was measured
    for choice in (today, *CATALOG.candidates(site, target, families)):
        stages = choice.kernel.stages(site, choice.config, target)
        if len(stages) == len(own) and all(map(_becomes, stages, own)):
            return choice
    return None


def _becomes(stage: Stage, launch: tuple[Any, ...]) -> bool:
    """Whether it is this launch, but for the rows that the builder has found settled."""
    grid, block, smem, params = launch
    ours = [(param.kind, param.value) for param in stage.params]
    if stage.settled and len(ours) == len(params):
        ours[stage.settled[0]] = params[stage.settled[0]]
    return (stage.grid, stage.block, stage.smem, tuple(ours)) == (grid, block, smem, params)


def _priced(
    stage: str, site: Site, weights: tuple[bool, ...], choice: Choice, target: Target, count: int, frozen: bool = True
) -> Priced:
    launches = len(choice.kernel.stages(site, choice.config, target))
    return Priced(stage, site, weights, choice, launches, count, frozen)


def _together(calls: Iterable[Priced]) -> list[Priced]:
    """Equal calls of a stage as one."""
    found: dict[tuple[Any, ...], Priced] = {}
    for call in calls:
        config = (call.choice.kernel.name, tuple(call.choice.config.items()))
        key = (*_key(call.stage, call.site, call.weights), config)
        before = found[key].count if key in found else 0
        found[key] = Priced(
            call.stage, call.site, call.weights, call.choice, call.launches, before + call.count, call.frozen
        )
    return list(found.values())


def _key(stage: str, site: Site, weights: tuple[bool, ...]) -> tuple[Any, ...]:
    return stage, site.op, site.operands, site.results, repr(sorted(site.attrs.items())), weights


def refusal(error: FrtcError) -> str:
    """Why a target cannot run something, in a line: of its kernels the first says why not."""
    if not isinstance(error, NoKernel):
        return error.what
    kernel, reason = next((row for row in error.rows if not row[1].endswith(ELSEWHERE)), error.rows[0])
    return f"{error.what}: {kernel}: {reason}"
