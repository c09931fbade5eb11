"""One pass, text before and text after.

    expect_pass(canonicalize, fires={"casts": 1}, before="graph g(x: bf16[4]) {...}", after="graph g(x: bf16[4]) {...}")
    expect_unchanged(canonicalize, "graph g(x: bf16[4]) {...}")

The texts are graphs or modules; a graph's weights are parameters of the same name, and its schedule runs it
once. Checked: the result's text is `after`; the rules that fired, and how often; a second run changes nothing; text to
IR and back is the identity; both sides compute the same on seeded inputs, widened and as typed (passes/check.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from textwrap import dedent

from frtc.lowering.ir import Graph, Module, Run, tensor, walk
from frtc.lowering.text import parse, parse_module, show_module
from frtc.lowering.verify import verify_module
from frtc.passes.check import compare
from frtc.passes.rewrite import FIRED, Pass

SEEDS = (0, 1, 2)


def expect_pass(one: Pass, *, before: str, after: str, fires: Mapping[str, int] | None = None) -> None:
    module, fired = as_module(before), Counter[str]()
    verify_module(module)
    result = run_counted(one, module, fired)
    verify_module(result)
    assert plain(result) == plain(as_module(after))
    if fires is not None:
        assert dict(fired) == dict(fires)
    assert plain(run_counted(one, result, Counter())) == plain(result), "a second run changes the result"
    for side in (module, result):
        assert parse_module(show_module(side)) == side, "the text does not read back"
    for seed in SEEDS:
        compare(module, result, "under test", seed)


def expect_unchanged(one: Pass, text: str, fires: Mapping[str, int] | None = None) -> None:
    """The near miss: nothing changes. `fires` may name counted reasons."""
    expect_pass(one, before=text, after=text, fires=fires or {})


def run_counted(one: Pass, module: Module, fired: Counter[str]) -> Module:
    token = FIRED.set(fired)
    try:
        return one(module)
    finally:
        FIRED.reset(token)


def as_module(text: str) -> Module:
    """The module that `text` shows, or one that runs the graph that it shows."""
    text = dedent(text).strip()
    if text.startswith("module"):
        return parse_module(text)
    graph = parse(text)
    weights = sorted((n for n in walk(graph.roots) if n.op == "weight"), key=lambda n: str(n["name"]))
    outputs = tuple((str(n["name"]), tensor(n["name"], n.t)) for n in weights)
    return Module("test", (graph,), Graph("weights", (), outputs), (Run(graph.name),))


def plain(module: Module) -> str:
    """The programs as text, without locations. (Which weights are read is in the programs.)"""
    programs = show_module(Module(module.name, module.graphs, schedule=module.schedule))
    return "\n".join(line.partition("  # ")[0] for line in programs.splitlines())
