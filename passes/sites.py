"""The GEMM sites of a module: the products by weights that may run in 8 bits, each with one name through all passes.

A site is called after its weights ("prefix.layers.0.attn.q.weight|k.weight|v.weight"), so that what a calibration found
on the module before a target was chosen is what the passes for the target look up. In the body of a repeat a site has
one scale for each round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from frtc.lowering.ir import Module, Node, Repeat, Run, Step, walk
from frtc.passes.name_weights import common_part, unique

PRODUCTS = frozenset({"linear", "gated_linear", "linear_norm", "linear_moments", "linear_rope_qkv"})
SIXTEEN_BITS = ("bf16", "f16")


@dataclass(frozen=True, slots=True)
class GemmSite:
    """x, the first operand of `node`, times the weights.

    rounds   of the repeat around the program; None outside of one
    index    name of the input that counts them
    flops    of one inference
    """

    name: str
    program: str
    node: Node
    rounds: int | None
    index: str
    flops: float

    @property
    def x(self) -> Node:
        return self.node.operands[0]

    @property
    def scale(self) -> str:
        """Name of the activation scale of x."""
        return unnormed(self.name) if makes_up(self.node) else self.name


def sites_of(module: Module) -> tuple[GemmSite, ...]:
    """In the order of programs and of their nodes; two uses of one weight have names of their own."""
    found: list[GemmSite] = []
    loops, taken = loops_of(module), set[str]()
    for graph in module.graphs:
        index, rounds = loops.get(graph.name, ("", None))
        for node in graph.nodes:
            if is_site(node):
                name = unique(site_name(node), taken)
                found.append(GemmSite(name, graph.name, node, rounds, index, product_flops(node) * (rounds or 1)))
    return tuple(found)


def makes_up(node: Node) -> bool:
    """A product of a value before its norm."""
    return node.op != "linear_moments" and node.get("norm", "none") != "none"


UNNORMED = ".unnormed"


def unnormed(site: str) -> str:
    """Name under which the values before a site's norm have a scale."""
    return site + UNNORMED


def is_site(node: Node) -> bool:
    """A product of 16-bit values by constant weights, perhaps stored in 8 bits already."""
    if node.op not in PRODUCTS or node.is_const:
        return False
    x, *weights = node.args[0], *weights_of(node)
    return (
        x is not None
        and x.dtype in (*SIXTEEN_BITS, "e4m3")
        and all(w.is_const and w.t.rank == 2 and w.dtype in (*SIXTEEN_BITS, "e4m3") for w in weights)
    )


def weights_of(node: Node) -> list[Node]:
    """The matrices of a product: one, or gate and up."""
    operands = node.args[1:3] if node.op == "gated_linear" else node.args[1:2]
    return [w for w in operands if w is not None]


def product_flops(node: Node) -> float:
    """Of one run."""
    x = node.operands[0]
    return sum(2.0 * x.t.size * w.shape[0] for w in weights_of(node))


def site_name(node: Node) -> str:
    """The names of the weights in the order of their rows, the common part written once."""
    leaves = [n for n in walk(weights_of(node)) if n.op == "weight" and n.t.rank >= 2]
    names = list(dict.fromkeys(str(n["name"]) for n in leaves))
    shared = common_part(names)
    return shared + "|".join(name[len(shared) :] for name in names)


def loops_of(module: Module) -> dict[str, tuple[str, int]]:
    """Program -> (index, count) of the innermost repeat around it."""
    return dict(_loops(module.schedule))


def _loops(steps: tuple[Step, ...], around: Repeat | None = None) -> Iterator[tuple[str, tuple[str, int]]]:
    """(program, (index, count)) of the innermost repeat around each program that has one."""
    for step in steps:
        if isinstance(step, Run) and around is not None:
            yield step.program, (around.index, around.count)
        elif isinstance(step, Repeat):
            yield from _loops(step.body, step)
