"""parse(show(g)) == g for every op and for random graphs; bad text is refused with the line that is wrong."""

from __future__ import annotations

import math
import random

import pytest

from frtc.errors import FrtcError
from frtc.lowering import ir, ops
from frtc.lowering.ir import Graph, Let, Module, Node, Repeat, Run, Scale, Type, While
from frtc.lowering.text import parse, parse_module, show, show_module
from frtc.lowering.verify import verify
from tests.lowering.every_op import EXAMPLES, graph_of
from tests.lowering.tiny_data import texts

VALUES = [
    0, -1, 2**62, True, False, None, 0.0, -0.0, 1.0, 1e-6, -2.5e300, 5e-324, math.inf, -math.inf, math.nan, "", "word",
    "two words", "true", "none", "nan", "1", "-inf", 'quote " and \\', "# no comment", "tab\tand\nline", "é", "a-b.c",
    (), (1,), (1, (2.0, "x", ()), None), ("a b", -1),
]  # fmt: skip


def test_every_op_is_here() -> None:
    assert set(EXAMPLES) == set(ops.OPS), "an op of the table needs an example in every_op.py"


@pytest.mark.parametrize("name", EXAMPLES)
def test_round_trip_of_every_op(name: str) -> None:
    graph = graph_of(EXAMPLES[name](), variant="prompt=48,views=2")
    verify(graph)
    text = show(graph)
    assert f" {name}(" in text
    assert parse(text) == graph
    assert show(parse(text)) == text


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_round_trip_of_attribute_values(value: object) -> None:
    node = ir.make("const", (), {"value": value}, Type("f32", ()))
    parsed = parse(show(graph_of(node))).outputs[0][1]
    assert parsed is node


@pytest.mark.parametrize(
    "scale",
    [Scale("f32"), Scale("f32", (1,), -1), Scale("e8m0", (1, 32)), Scale("e4m3", (16,), None, "tiled-128x4")],
    ids=str,
)
def test_round_trip_of_scaled_types(scale: Scale) -> None:
    graph = graph_of(ops.cast(ir.input_("x", Type("e4m3", (16, 32), scale)), dtype="f32"))
    assert parse(show(graph)) == graph


def test_names_of_values_never_collide() -> None:
    """Inputs may be called like numbered values, and like their results."""
    x, y = ir.input_("0", Type("f32", (4,))), ir.input_("1.0", Type("f32", (4,)))
    pair = ops.residual_norm(ops.add(x, y), x, kind="rms", eps=1e-6)
    total = ops.add(ops.mul(ir.item(pair, 0), y), ir.item(pair, 1))
    graph = Graph("g", (x, y), (("out", total), ("0", ir.item(pair, 1)), ("true", x)))
    assert parse(show(graph)) == graph


def test_location_is_kept_and_is_not_part_of_equality() -> None:
    text = "graph g(here: f32[4]) {\n  %0 = exp(%here) : f32[4]  # layers.0.mlp models/gemma.py:112\n  return %0\n}\n"
    graph = parse(text)
    node = graph.outputs[0][1]
    assert node.loc == "layers.0.mlp models/gemma.py:112"
    assert parse(text.replace("112", "7")).outputs[0][1] is node


def _random_graph(seed: int) -> Graph:
    """Forty nodes over three inputs and a state, several results."""
    rng = random.Random(seed)
    leaves = [ir.input_(f"in.{i}", Type(rng.choice(["f32", "bf16"]), (4, 8))) for i in range(3)]
    nodes: list[Node] = [*leaves, ir.weight("w.0", Type("bf16", (4, 8)))]
    kv = version = ir.state("kv", Type("f32", (16, 8)))
    for _ in range(40):
        a, b = rng.choice(nodes), rng.choice(nodes)
        match rng.randrange(6):
            case 0:
                nodes.append(ops.OPS[rng.choice(["exp", "neg", "silu"])](a, dtype=rng.choice(["f32", "bf16"])))
            case 1:
                nodes.append(ops.OPS[rng.choice(["add", "mul", "maximum"])](a, rng.choice([b, 0.5, -1e-5])))
            case 2:
                nodes.append(ops.where(ops.lt(a, b), a, b))
            case 3:
                pair = ops.residual_norm(a, b, kind="rms", eps=1e-6, dtype="f32")
                nodes += [ir.item(pair, 0), ir.item(pair, 1)]
            case 4:
                nodes.append(ops.transpose(ops.transpose(a, perm=(-1, -2)), perm=(-1, -2)))
            case 5:
                version = ops.write(version, ops.cast(a, dtype="f32"), ops.const(rng.randrange(12), "i32"), axis=-2)
    writes = (("kv", version),) if version is not kv else ()
    outputs = tuple((f"r.{i}", n) for i, n in enumerate(dict.fromkeys(rng.sample(nodes, 4))))
    return Graph("random", tuple(leaves), outputs, (kv,), writes)


@pytest.mark.parametrize("seed", range(30))
def test_round_trip_of_random_graphs(seed: int) -> None:
    graph = _random_graph(seed)
    verify(graph)
    assert parse(show(graph)) == graph


def test_round_trip_of_imported_programs() -> None:
    """Locations aside: equal nodes are one node, and it keeps the location it was first built with."""
    for text in texts().values():
        graph = parse(text)
        assert parse(show(graph)) == graph
        assert _code(show(graph)) == _code(text)


def _code(text: str) -> list[str]:
    return [line.partition("  #")[0] for line in text.splitlines()]


def _module() -> Module:
    x, n = ir.input_("x", Type("f32", (4, 8))), ir.input_("go", Type("i32", ()))
    step = Graph("step", (x,), (("x", ops.linear(x, ir.weight("w", Type("f32", (8, 8))))),))
    wide = Graph("step", (x,), (("x", ops.exp(x)),), variant="wide=1")
    more = Graph("more", (n,), (("go", ops.sub(n, ops.const(1, "i32"))),))
    weights = Graph("weights", (), (("w", ops.cast(ir.tensor("model.w/0", Type("bf16", (8, 8))), dtype="f32")),))
    schedule = (Let("x", "noise"), Run("step"), Repeat(3, "k", (Run("step"), While("go", (Run("more"),)))), Run("more"))
    return Module("m", (step, wide, more), weights, schedule, (("actions", "x"), ("left", "go")))


def test_round_trip_of_modules() -> None:
    module = _module()
    assert parse_module(show_module(module)) == module


GOOD = """graph g(x: f32[4,8], n: i32[]; kv: f32[12,8]) {
  @w : f32[3,8]
  %0 = linear(%x, @w, act=silu) : f32[4,3]  # here
  %1 = residual_norm(%x, %x, eps=1e-06, kind=rms) : (f32[4,8], f32[4,8])
  %2 = write(%kv, %1.1, %n, axis=-2) : f32[12,8]
  return y=%0, s=%1.0
  write kv=%2
}
"""

# what is exchanged in GOOD, by what; the line that must be named; words of the message
BAD = [
    ("linear(", "lineer(", 3, "no op lineer"),
    ("%x, @w", "%z, @w", 3, "%z is not defined"),
    ("%x, @w", "%x, @v", 3, "@v is not defined"),
    ("act=silu", "akt=silu", 3, "no attribute akt"),
    (": f32[4,3]", ": f32[4,4]", 3, "gives f32[4,3], not f32[4,4]"),
    ("f32[3,8]", "f32[3,7]", 3, "inner sizes"),
    (", act=silu)", ", act=silu", 3, "expected"),
    ("f32[3,8]", "f33[3,8]", 2, "f33"),
    ("f32[3,8]", "f32[3,x]", 2, "x"),
    ("f32[3,8]", "f32[3,-8]", 2, "-8"),
    ("%1.1", "%1.2", 5, "%1.2"),
    ("%1.1", "%1", 5, "several results"),
    ("%1.1", "%0.0", 5, "%0.0"),
    ("%1.1", "%0", 5, "does not fit"),
    ("kind=rms", "kind=root", 4, "kind root"),
    (", kind=rms", "", 4, "kind"),
    ("%1 = ", "%0 = ", 4, "%0 is defined twice"),
    ("n: i32[]", "x: i32[]", 1, "%x is defined twice"),
    ("y=%0", "y=%9", 6, "%9 is not defined"),
    ("write kv=%2\n}", "write kv=%2", 8, "expected }"),
    ("write kv=%2", "write kv=%1", 7, "several results"),
    ("f32[4,3]  #", "f32[4,3] f32  #", 3, "end of the line"),
    ("%n, axis=-2", "%n %n, axis=-2", 5, "expected ,"),
    ("kind=rms", "kind=rms, kind=rms", 4, "twice"),
    ("graph g", "grap g", 1, "expected graph"),
    ("# here", "! here", 3, "cannot read"),
    ("eps=1e-06", "eps=1e-0606e", 4, ""),
    ("eps=1e-06", "eps=[1", 4, ""),
    ("eps=1e-06", "eps=" + "[" * 5000, 4, ""),
    ("axis=-2", "axis=-7", 5, "axis"),
    ("axis=-2", "axis=none", 5, ""),
    ("act=silu", 'act="silu', 3, "cannot read"),
]


def test_good_text_is_good() -> None:
    verify(parse(GOOD))
    assert show(parse(GOOD)) == GOOD


@pytest.mark.parametrize(("old", "new", "line", "words"), BAD)
def test_bad_text_names_the_line(old: str, new: str, line: int, words: str) -> None:
    assert GOOD.count(old) >= 1
    with pytest.raises(FrtcError) as caught:
        parse(GOOD.replace(old, new, 1))
    assert caught.value.code == "ir.syntax"
    assert f"in line {line} of the IR text" in caught.value.what
    assert words in caught.value.what


@pytest.mark.parametrize("text", ["", "\n\n", "module m", "}", "graph", "graph g(", "\x00", "graph g(x: f32[4]) {"])
def test_fragments_are_refused(text: str) -> None:
    with pytest.raises(FrtcError) as caught:
        parse(text)
    assert caught.value.code == "ir.syntax"


def test_bad_modules_are_refused() -> None:
    text = show_module(_module())
    changes = [("repeat 3", "repeat x"), ("run more", "walk more"), ("module m", "modul m"), ("while go", "while")]
    for old, new in [*changes, ("let x", "let 5x")]:
        with pytest.raises(FrtcError) as caught:
            parse_module(text.replace(old, new))
        assert caught.value.code == "ir.syntax"


@pytest.mark.parametrize("seed", range(8))
def test_damaged_text_never_crashes(seed: int) -> None:
    """Characters are changed, dropped, doubled, lines swapped: the text parses or is refused as ir.syntax."""
    rng, refused = random.Random(seed), 0
    sources = [GOOD, show(graph_of(EXAMPLES["attention"]())), show(graph_of(EXAMPLES["rope_qkv"]()))]
    for _ in range(250):
        text = list(rng.choice(sources))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(text))
            text[at : at + rng.randrange(3)] = rng.choice([*'"[]%@-9x,(\n ', ""])
        try:
            parse("".join(text))
        except FrtcError as error:
            assert error.code == "ir.syntax", error
            refused += 1
    assert refused > 100
