"""`frtc explain CHECKPOINT --arch GPU`: what became of every node of the model; which kernel, and why not the others.

Instead of a checkpoint it takes IR text (FILE.ir), a graph or a module, for instance one that FRTC_DUMP wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from frtc.codegen.fusible import implements
from frtc.compiler import (
    FAMILY_NAMES,
    CompileOptions,
    families_for,
    import_module,
    open_model,
    target_named,
)
from frtc.console import Progress, Result, table
from frtc.errors import FrtcError, UsageError, nearest
from frtc.explain import OUTCOMES, Chosen, Explanation, Fate, explain
from frtc.lowering.ir import Module, Run, fresh_nodes
from frtc.lowering.programs import define_weights
from frtc.lowering.text import parse, parse_module
from frtc.observation import reason
from frtc.options import add_policy_options, choices, pathname, policy_options
from frtc.passes.precision import Precision
from frtc.passes.standard import pipeline
from frtc.precision import default_kind, read_precision, require_known, require_possible, require_used
from frtc.runtime.paths import require_file
from frtc.scales_file import read_scales

SHOWN = 3  # kernels not taken; --all shows every one


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=pathname, help="folder, safetensors file, or IR text (.ir)")
    parser.add_argument("--arch", required=True, metavar="GPU")
    parser.add_argument("--node", metavar="TEXT", help="only nodes and calls whose op, call or location holds this")
    parser.add_argument("--all", action="store_true", help="every node and every kernel not taken")
    parser.add_argument("--precision", metavar="KIND", help="bf16, fp8, w8a16 or FILE.toml; default: the GPU's")
    parser.add_argument("--scales", type=pathname, metavar="FILE", help="activation scales of `frtc calibrate`, as of "
                        "`frtc compile`: they decide which sites stay in 16 bits and keep their norms")  # fmt: skip
    parser.add_argument("--family", choices=FAMILY_NAMES)
    add_policy_options(parser)


@fresh_nodes()
def run(args: argparse.Namespace) -> Result:
    target, progress = target_named(args.arch), Progress()
    families = families_for(target, args.family)
    asked = read_precision(args.precision)
    require_possible(asked, target)
    if args.scales is not None:
        require_used(asked, target, args.family)
    scales = read_scales(args.scales) if args.scales is not None else None
    if args.checkpoint.suffix == ".ir":
        if scales is not None:
            what = "--scales are of a checkpoint, and IR text does not say of which it is"
            raise UsageError("option.scales", what, hint="explain the checkpoint")
        opened, module = None, read_ir(args.checkpoint)
    else:
        opened = open_model(args.checkpoint, CompileOptions(policy_options(args), **choices(args)))
        module = import_module(opened, progress=progress)
        progress.close()
    kind, fallen = asked.kind or default_kind(target, families), scales.fallen() if scales is not None else {}
    precision = Precision(kind, dict(asked.stages), asked.keep, scales is not None, fallen)

    def named(front: Module) -> Module:
        require_known(asked, front)
        if scales is not None and opened is not None:
            scales.require(opened, front)
        return front

    found = explain(module, pipeline(implements(target, families), precision, front=named), target, families)
    wanted = args.node or ""
    _require_known(found, wanted)
    return Result(_text(found, wanted, args.all), found.data())


def _require_known(found: Explanation, wanted: str) -> None:
    """--node holds for something: what it is compared with is the same as in the text."""
    texts = [*map(_node_names, found.nodes), *map(_call_names, found.calls)]
    if wanted and not any(wanted in text for text in texts):
        words = {word.rstrip(",") for text in texts for word in text.split()}
        rows = [("nearest", nearest(wanted, words) or "none")]
        what = f"no node and no call has {wanted!r} in its op, call, location or program"
        raise UsageError("explain.node", what, rows, "leave --node out to see all calls; --all shows every node, too")


def _node_names(fate: Fate) -> str:
    return f"{fate.op} {fate.call} {fate.loc} {fate.program}"


def _call_names(call: Chosen) -> str:
    return f"{call.site} {call.call} {call.loc}"


def read_ir(path: Path) -> Module:
    """The module in a text file; a single graph becomes a module that runs it once."""
    try:
        require_file(path)
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as fault:
        raise FrtcError("input.file", f"{path} cannot be read: {reason(fault)}") from None
    if text.lstrip().startswith("module"):
        return parse_module(text)
    graph = parse(text)
    results = tuple((name, name) for name, _ in graph.outputs)
    return Module("text", (graph,), define_weights([graph]), (Run(graph.name),), results)


def _text(found: Explanation, wanted: str, whole: bool) -> str:
    counts = found.counts()
    nodes = [f for f in found.nodes if wanted in _node_names(f)]
    homes = {f.call for f in nodes}
    calls = [c for c in found.calls if c.call in homes or wanted in _call_names(c)]
    lines = [
        f"{len(found.nodes)} nodes imported",
        table([(str(counts[o]), o, about) for o, about in OUTCOMES.items()]),
    ]
    if wanted or whole:
        lines += ["nodes", table(_node(f) for f in nodes)]
    lines += [f"{len(calls)} calls", *(_call(c, whole) for c in calls)]
    return "\n".join(lines)


def _node(fate: Fate) -> tuple[str, ...]:
    return fate.program, fate.op, fate.type, fate.outcome, fate.call, " > ".join(fate.rules), fate.loc


def _call(call: Chosen, whole: bool) -> str:
    lines = [f"  {call.call}  {call.site}  # {call.loc}", f"      {call.kernel}, {call.cost_us:.1f} us estimated"]
    shown = call.rejected if whole else call.rejected[:SHOWN]
    lines += [f"        not {name}: {reason}" for name, reason in shown]
    if len(call.rejected) > len(shown):
        lines.append(f"        and {len(call.rejected) - len(shown)} more")
    return "\n".join([*lines, *(f"      {missed}" for missed in call.missed)])
