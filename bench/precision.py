"""What bfloat16 costs at each site that a model keeps in float32: `python -m bench.precision`, on a CPU.

A *site* is what one module of a program computes in float32 while the layers run in bfloat16 (layers of one kind count
as one; what belongs to no module goes by the inputs it depends on). The model is run by the interpreter in float32;
bfloat16 is then put on by rounding operands and results of chosen ops, as a module would in that type:

    alone   error of the velocity with this site in bfloat16 and everything else in float32
    kept    with this site in float32 and everything else in bfloat16, layers and all other sites (but for positions,
            frequencies and the embedding of time, without which nothing is left to compare)
    bytes   by how much its float32 weights add to what an inference reads, at the published sizes, once passes have
            folded what they can

The rule: a site stays in float32 where its own error exceeds a tenth of the bar for a step's velocity, or where that
costs less than a thousandth of the bytes. Errors are relative, the largest over first, middle and last step.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.report import write
from frtc.codegen.fusible import implements
from frtc.compiler import CompileOptions, import_module, open_model
from frtc.kernels.dtypes import is_float
from frtc.kernels.targets import load_targets
from frtc.lowering.interpret import evaluate_weights, run
from frtc.lowering.ir import Graph, Module, Node, Repeat, Run, make, rebuild, walk
from frtc.lowering.ops import cast
from frtc.models import load_models
from frtc.models.stages import Model
from frtc.models.synthetic import write_checkpoint
from frtc.passes.check import relative_error
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.standard import pipeline
from frtc.policy_options import PolicyOptions
from frtc.trace import trace
from tests.truth.traced import Subject, subject

Array = np.ndarray[Any, np.dtype[Any]]
Key = tuple[str, str, str]  # program, module with # for layer numbers (or the inputs it depends on), op
Chosen = Callable[[Key], bool]

BAR = 2e-2  # of a step's velocity (docs/numerics.md)
RULE = "float32 where bfloat16 alone costs more than a tenth of the bar, or float32 less than a thousandth of the bytes"
NUMBERS = ("(constants)", "(of the step)", "(of the length)")  # no activations: positions, frequencies, time
FREE = 1e-3  # share of the bytes of an inference
SUBJECTS = ("pi05.golden", "pi0.golden", "pi05.pick", "pi0.pick", "smolvla.pick")
SYNTHETIC = ("pi05", "pi0", "smolvla")
LAYERS = 2  # of each stack where only widths count


@dataclass(frozen=True, slots=True)
class Measured:
    """One site on one subject: errors of the velocity."""

    alone: float
    kept: float


def stays(alone: float, share: float) -> bool:
    """The rule."""
    return alone > BAR / 10 or share < FREE


# --- sites --------------------------------------------------------------------------------------------------------


def keys(graph: Graph) -> dict[Node, Key]:
    """Where each computed float of a program belongs."""
    found: dict[Node, Key] = {}
    below: dict[Node, frozenset[str]] = {}
    for node in graph.nodes:
        own = {node["name"]} if node.op == "input" else set()
        below[node] = frozenset(own).union(*(below[a] for a in node.operands))
        if node.op in ("input", "weight", "const", "state") or isinstance(node.type, tuple) or not is_float(node.dtype):
            continue
        module = node.loc.rpartition(" ")[0]
        module = module.removeprefix(f"{graph.name}.")  # the program's module may be wrapped
        place = re.sub(r"\d+", "#", module) if module else _named_by(below[node])
        found[node] = (graph.name, place, node.op)
    return found


def _named_by(inputs: frozenset[str]) -> str:
    """What belongs to the program itself: what follows from the step alone, from the prompt's length, the rest."""
    if not inputs:
        return "(constants)"
    return "(of the step)" if inputs <= {"step"} else "(of the length)" if inputs <= {"n"} else "(itself)"


def islands(served: Module) -> dict[str, frozenset[Key]]:
    """Site -> its keys: where the module that runs its layers in bfloat16 computes in float32 and nothing else."""
    types: dict[Key, set[str]] = {}
    for graph in served.graphs:
        for node, key in keys(graph).items():
            types.setdefault(key, set()).add(node.dtype)
    sites: dict[str, set[Key]] = {}
    for key, dtypes in types.items():
        if "bf16" not in dtypes:
            sites.setdefault(f"{key[0]}.{key[1]}", set()).add(key)
    return {site: frozenset(found) for site, found in sites.items()}


def rounded(module: Module, chosen: Chosen) -> Module:
    """The float32 module with operands and results of the chosen ops rounded to bfloat16."""

    def change(graph: Graph) -> Graph:
        known = keys(graph)

        def visit(old: Node, new: Node) -> Node:
            if old not in known or not chosen(known[old]):
                return new
            args = [a if a is None or not is_float(a.dtype) else _bf16(a) for a in new.args]
            return _bf16(make(new.op, args, dict(new.attrs), new.type, new.loc))

        return rebuild(graph, visit)

    return module.map(change)


def _bf16(node: Node) -> Node:
    there: Node = cast(cast(node, dtype="bf16"), dtype=node.dtype)
    return there


# --- errors -------------------------------------------------------------------------------------------------------


def measure(one: Subject, served: Module) -> tuple[dict[str, Measured], dict[str, float]]:
    """(sites of the model, errors of everything in bfloat16 and of the model as it serves)."""
    weights = evaluate_weights(one.module, one.tensors)
    sites = islands(served)
    islanded = frozenset().union(*sites.values())
    steps = sorted({0, len(one.x) // 2, len(one.x) - 1})
    reference = velocities(one.module, one, weights, steps)

    def error(chosen: Chosen) -> float:
        found = velocities(rounded(one.module, chosen), one, weights, steps)
        return max(relative_error(v, w) for v, w in zip(found, reference, strict=True))

    exact = frozenset(key for own in sites.values() for key in own if key[1] in NUMBERS)
    table = {}
    for site, own in sorted(sites.items()):
        kept = error(lambda key, own=own: key not in own | exact)  # type: ignore[misc]
        table[site] = Measured(error(own.__contains__), kept)
    return table, {"all": error(lambda key: key not in exact), "served": error(lambda key: key not in islanded)}


def velocities(module: Module, one: Subject, weights: Mapping[str, Array], steps: Iterable[int]) -> list[Array]:
    """The velocity at each of the steps, from the subject's own x."""
    env = dict(one.inputs)
    for step in module.schedule:
        if isinstance(step, Run):
            env |= run(module.graph(step.program), env, weights.__getitem__)
    loop = next(step for step in module.schedule if isinstance(step, Repeat))
    (body,) = (module.graph(step.program) for step in loop.body if isinstance(step, Run))
    found = ({**env, loop.index: np.array(k, np.int32), "x_t": one.x[k]} for k in steps)
    return [run(body, inputs, weights.__getitem__)["v_t"] for inputs in found]


# --- cost ---------------------------------------------------------------------------------------------------------


def shares(model: Model, served: Module) -> dict[str, float]:
    """Site -> what its float32 weights add to the bytes that an inference reads, at the published widths."""
    assert model.synthetic is not None
    full = model.synthetic.sizes["full"]()
    short = _shortened(full)
    with torch.device("meta"):
        built = dict(model.build(full, torch.bfloat16).named_parameters())
    module = trace(model.name, model.stages(short, torch.bfloat16, False), model.schedule(short))
    final, _ = run_passes(module, pipeline(implements(load_targets()["hopper"])), Options(check=0))
    rounds = {p.program: s.count for s in final.schedule if isinstance(s, Repeat) for p in s.body if isinstance(p, Run)}
    total = sum(
        p.numel() * 2 * rounds.get(name.partition(".")[0], 1) for name, p in built.items() if "embed" not in name
    )
    made = dict(final.weights.outputs)
    added: dict[str, float] = {}
    for graph in final.graphs:
        for node in (n for n in graph.nodes if n.op == "weight" and n.dtype == "f32"):
            size = node.t.size // (rounds[graph.name] if node.shape[:1] == (rounds.get(graph.name),) else 1)
            leaves = {n["key"] for n in walk([made[node["name"]]]) if n.op == "tensor"}
            for site in {re.sub(r"\d+", "#", leaf.rpartition(".")[0]) for leaf in leaves}:
                layers = _layers(full, site) / LAYERS if "#" in site else 1
                added[site] = added.get(site, 0.0) + 2 * size * rounds.get(graph.name, 1) * layers
    return {site: added.get(site, 0.0) / total for site in islands(served)}


def _shortened(config: Any) -> Any:
    """The published widths with few layers of each kind: traced like a small model."""
    stacks = {name: replace(getattr(config, name), layers=LAYERS) for name in ("vision", "prefix", "expert")}
    return replace(config, **stacks, **({"cross": config.cross[:LAYERS]} if hasattr(config, "cross") else {}))


def _layers(config: Any, site: str) -> int:
    program = site.partition(".")[0]
    layers: int = getattr(config, "expert" if program == "denoise" else program).layers
    return layers


# --- subjects -----------------------------------------------------------------------------------------------------


def synthetic(kind: str, folder: Path) -> tuple[Subject, Module]:
    """A tiny synthetic checkpoint with seeded inputs, and the module that serves it."""
    spec = load_models()[kind].synthetic
    assert spec is not None
    write_checkpoint(folder / kind, spec.layouts[0], kind=kind)
    opened = open_model(folder / kind, CompileOptions(PolicyOptions(views=1)))
    wide, served = (import_module(opened, precision, velocity=True) for precision in ("f32", "bf16"))
    rng, inputs = np.random.default_rng(0), {}
    for name, type in wide.inputs.items():
        if is_float(type.dtype):
            low = 0 if name == "images" else -1
            inputs[name] = rng.uniform(low, 1, type.shape).astype(np.float32)
        else:
            inputs[name] = rng.integers(3, 200, type.shape).astype({"u8": np.uint8}.get(type.dtype, np.int32))
    inputs["n"] = np.array(20, np.int32)
    loop = next(step for step in wide.schedule if isinstance(step, Repeat))
    x = np.stack([inputs["noise"] * np.float32(1 - 0.5 * k / loop.count) for k in range(loop.count)])
    return Subject(wide, opened.read, inputs, x, np.zeros_like(x)), served


def main() -> None:
    found: dict[str, dict[str, tuple[dict[str, Measured], dict[str, float]]]] = {}
    served: dict[str, Module] = {}
    for name in SUBJECTS:
        kind, case = name.split(".")
        served[kind] = subject(name, "bf16").module
        found.setdefault(kind, {})[case] = measure(subject(name, "f32"), served[kind])
    with tempfile.TemporaryDirectory() as folder:
        for kind in SYNTHETIC:
            one, served[kind] = synthetic(kind, Path(folder))
            found.setdefault(kind, {})["synthetic"] = measure(one, served[kind])
    result = {kind: _summary(kind, cases, served[kind]) for kind, cases in found.items()}
    print(write("precision", {"rule": RULE, "bar": BAR, "kinds": result}))


def _summary(kind: str, cases: Mapping[str, tuple[dict[str, Measured], dict[str, float]]], served: Module) -> Any:
    """Site -> errors by subject, the share of bytes, and what the rule says of the worst."""
    cost = shares(load_models()[kind], served)
    rows = {}
    for site in sorted({site for table, _ in cases.values() for site in table}):
        seen = {case: table[site] for case, (table, _) in cases.items() if site in table}
        worst = max(m.alone for m in seen.values())
        rows[site] = {
            "alone": {case: float(f"{m.alone:.1e}") for case, m in seen.items()},
            "kept": {case: float(f"{m.kept:.1e}") for case, m in seen.items()},
            "bytes": float(f"{cost.get(site, 0.0):.1e}"),
            "float32": stays(worst, cost.get(site, 0.0)),
        }
    return {"whole": {case: whole for case, (_, whole) in cases.items()}, "sites": rows}


if __name__ == "__main__":
    main()
