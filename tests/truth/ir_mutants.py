"""Eight wrong Pi0.5s as changes of the IR: each takes the canonical module and makes one classic mistake in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from frtc.lowering.ir import Module, Node, Repeat, make, rebuild
from frtc.lowering.ops import add, concat, lt

Change = Callable[[Node], Node | None]  # a node with its operands already changed -> its successor, None to keep it
NORMS = ("rms_norm", "ada_rms_norm")


def everywhere(change: Change) -> Callable[[Module], Module]:
    """The mutant that changes nodes of every program."""

    def mutate(module: Module) -> Module:
        return module.map(lambda graph: rebuild(graph, lambda old, new: change(new) or new))

    return mutate


def with_attrs(node: Node, **attrs: object) -> Node:
    return make(node.op, node.args, {**dict(node.attrs), **attrs}, node.type, node.loc)


def large_eps(node: Node) -> Node | None:
    return with_attrs(node, eps=1e-5) if node.op in NORMS else None


def one_silu(node: Node) -> Node | None:
    """The condition is linear(silu(linear(t))), without the last activation."""
    outer = node.args[0] if node.op == "silu" else None
    inner = outer.args[0] if outer is not None and outer.op == "linear" else None
    return outer if inner is not None and inner.op == "silu" else None


def cos_first(node: Node) -> Node | None:
    if node.op != "concat" or [_source(a) for a in node.operands] != ["sin", "cos"]:
        return None
    swapped: Node = concat(*reversed(node.operands), axis=node["axis"])
    return swapped


def _source(node: Node) -> str:
    return _source(node.operands[0]) if node.op == "cast" else node.op


def neighbours(node: Node) -> Node | None:
    return with_attrs(node, pairing="interleaved") if node.op == "rope" else None


def plain_weight(node: Node) -> Node | None:
    return with_attrs(node, offset=0.0) if node.op == "rms_norm" and node["offset"] == 1.0 else None


def no_gate(node: Node) -> Node | None:
    """x + y instead of x + gate * y, the gate a part of a norm's modulation."""
    if node.op != "mul" or [a.op for a in node.operands] != ["slice", "linear"]:
        return None
    return node.operands[1]


def keys_off_by(n: int) -> Change:
    def change(node: Node) -> Node | None:
        """`n` keys more are visible after the prompt's last token."""
        if node.op != "lt":
            return None
        key, length = node.operands
        moved: Node = lt(key, add(length, n))
        return moved

    return change


def one_step_less(module: Module) -> Module:
    shorter = (replace(s, count=s.count - 1) if isinstance(s, Repeat) else s for s in module.schedule)
    return replace(module, schedule=tuple(shorter))


MUTANTS: dict[str, Callable[[Module], Module]] = {
    "eps": everywhere(large_eps),
    "second_silu": everywhere(one_silu),
    "sin_cos_order": everywhere(cos_first),
    "rope_pairing": everywhere(neighbours),
    "missing_one": everywhere(plain_weight),
    "dropped_gate": everywhere(no_gate),
    "mask_one_more": everywhere(keys_off_by(1)),
    "mask_one_less": everywhere(keys_off_by(-1)),
    "step_count": one_step_less,
}
