"""The distinct kernel sites of a policy at full size, from its compiled programs: no checkpoint, no weights, no GPU.

    PYTHONPATH=. python3 -m bench.sites --policy pi0 [--precision fp8] [--views 2] [--prompt 48] [--horizon 50]
                                                          a table with estimates
    PYTHONPATH=. python3 -m bench.sites --write           tests/kernels/sites.json, which the kernel tests run

The table is made with few layers, because all layers of a stack have the same sites.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.full_model import PRECISIONS, ROWS, STATIC, Shape, model_of
from frtc.codegen.emit import Emitter
from frtc.codegen.fusible import implements
from frtc.codegen.placement import place_module
from frtc.codegen.places import Place, new_place
from frtc.compiler import target_named
from frtc.kernels.catalog import CATALOG, describe, label
from frtc.kernels.spec import Operand, Site
from frtc.lowering.ir import Module, Node, Repeat, Run, fresh_nodes
from frtc.models import load_models
from frtc.passes.pipeline import Options, run_passes
from frtc.passes.precision import Precision
from frtc.passes.standard import pipeline
from frtc.runtime.plan import WEIGHTS
from frtc.trace import trace

TABLE = Path(__file__).resolve().parent.parent / "tests" / "kernels" / "sites.json"
LAYERS = 4  # first, last, and one of each kind between
SHAPES = (
    Shape("pi05"),
    *(Shape("pi0", views=views) for views in (1, 2, 3)),
    Shape("pi0", horizon=10),
    *(Shape("smolvla", views=views) for views in (1, 2, 3)),
)
# Of the Plans whose kernels are those of the target's own family, where it takes them by itself.
NATIVE_SHAPES = tuple(Shape("pi05", precision=p, horizon=n) for p in (STATIC, "bf16") for n in (50, 10))
NATIVE = "native"  # ends the names of their blocks


@dataclass(frozen=True, slots=True)
class Use:
    """A site, the stage that runs it, and how often one inference does."""

    stage: str
    site: Site
    count: int


def shallow(config: Any, layers: int) -> Any:
    """The configuration with at most so many layers in every stack, and so many entries where there is one a layer."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    stacks = {name: value for name, value in values.items() if is_dataclass(value)}
    depths = {stack.layers for stack in stacks.values()}  # type: ignore[union-attr]
    fewer = {name: replace(stack, layers=min(stack.layers, layers)) for name, stack in stacks.items()}  # type: ignore
    per_layer = {n: v[:layers] for n, v in values.items() if isinstance(v, tuple) and len(v) in depths}
    return replace(config, **fewer, **per_layer)


def precision_of(shape: Shape) -> Precision:
    return Precision("fp8" if shape.precision == ROWS else shape.precision, static=shape.precision == STATIC)


def optimised(
    shape: Shape, arch: str = "hopper", layers: int = LAYERS, families: tuple[str, ...] = ("baseline",)
) -> Module:
    """Traced on the meta device and run through all passes."""
    model, target = model_of(shape.policy), target_named(arch)
    assert model.synthetic is not None
    config = shallow(model.synthetic.sizes[shape.size](), layers)
    config = replace(config, views=shape.views, prompt=shape.prompt, horizon=shape.horizon)
    module = trace(model.name, model.stages(config, torch.bfloat16, False), model.schedule(config))
    return run_passes(module, pipeline(implements(target, families), precision_of(shape)), Options(check=0))[0]


@fresh_nodes()
def uses(
    shape: Shape, arch: str = "hopper", layers: int = LAYERS, families: tuple[str, ...] = ("baseline",)
) -> list[Use]:
    """Of the optimised module, run through codegen up to the choice of kernels."""
    module, target = optimised(shape, arch, layers, families), target_named(arch)
    loops = {s.body[0].program: s for s in module.schedule if isinstance(s, Repeat) and isinstance(s.body[0], Run)}
    placement, places = place_module(module), dict[str, Place]()

    def weight(node: Node) -> Place:
        return places.setdefault(node["name"], new_place(WEIGHTS, node.t))

    found = []
    for graph in module.graphs:
        loop = loops.get(graph.name)
        counter, rounds = (loop.index, loop.count) if loop else ("", 1)
        emitter = Emitter(graph, placement, target, CATALOG, families, counter, weight)
        found += [Use(graph.name, call.site, rounds) for call in emitter.run()]
    return found


def distinct(found: Iterable[Use]) -> list[Use]:
    """Equal sites of a stage counted together, in order of first use."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], Use] = {}
    for use in found:
        key = use.stage, to_json(use.site)
        counts[key] += use.count
        first.setdefault(key, use)
    return [replace(use, count=counts[key]) for key, use in first.items()]


def to_json(site: Site) -> str:
    """One line."""
    sides = [
        [None if o is None else (o.dtype, o.shape, o.strides) for o in side] for side in (site.operands, site.results)
    ]
    return json.dumps([site.op, *sides, dict(sorted(site.attrs.items()))])


def from_json(data: Any) -> Site:
    op, operands, results, attrs = data
    views = [None if o is None else Operand(o[0], tuple(o[1]), tuple(o[2])) for o in operands]
    return Site(op, tuple(views), tuple(Operand(d, tuple(s), tuple(t)) for d, s, t in results), _tuples(attrs))


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def table() -> str:
    """All sites of SHAPES and all of NATIVE_SHAPES, each once, under the first shape that has it."""
    own = target_named("hopper").families()
    blocks = {f"{shape.policy} {shape}": uses(shape) for shape in SHAPES}
    native = {f"{shape.policy} {shape.label} {NATIVE}": uses(shape, families=own) for shape in NATIVE_SHAPES}
    texts = [text for group in (blocks, native) for text in _blocks(group)]
    return "{\n" + ",\n".join(texts) + "\n}\n"


def _blocks(found: Mapping[str, Iterable[Use]]) -> Iterator[str]:
    seen: set[str] = set()
    for name, used in found.items():
        lines = [line for line in dict.fromkeys(to_json(use.site) for use in used) if line not in seen]
        seen.update(lines)
        body = ",\n".join(f"  {line}" for line in lines)
        yield f' "{name}": [\n{body}\n ]'


def show(shape: Shape, arch: str) -> None:
    """Every distinct site with its count, the kernel taken and the cost model's estimate."""
    target, totals, nodes = target_named(arch), defaultdict[str, float](float), Counter[str]()
    print(f"{'stage':<14} {'count':>5} {'us':>7} {'all us':>8}  kernel, site")
    for use in distinct(uses(shape, arch, layers=1000)):
        choice = CATALOG.select(use.site, target)
        totals[use.stage] += choice.cost_us * use.count
        nodes[use.stage] += len(choice.kernel.stages(use.site, choice.config, target)) * use.count
        figures = f"{use.count:5d} {choice.cost_us:7.1f} {choice.cost_us * use.count:8.0f}"
        print(f"{use.stage:<14} {figures}  {label(choice.kernel, choice.config)}: {describe(use.site)}")
    for stage, us in totals.items():
        print(f"{stage:<14} {us / 1e3:8.2f} ms estimated, {nodes[stage]} graph nodes")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="pi05", choices=list(load_models()))
    for name, default in (("views", 2), ("prompt", 48), ("horizon", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="bf16", choices=PRECISIONS)
    parser.add_argument("--arch", default="hopper")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} for all policies instead")
    arguments = parser.parse_args()
    if arguments.write:
        TABLE.write_text(table())
    else:
        sizes = (arguments.views, arguments.prompt, arguments.horizon)
        shape = Shape(arguments.policy, *sizes, precision=arguments.precision)
        show(shape, arguments.arch)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
