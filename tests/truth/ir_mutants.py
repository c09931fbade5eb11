"""Wrong models as changes of the IR, by kind: each takes the canonical module and makes one classic mistake in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from frtc.lowering.ir import Module, Node, Repeat, make, rebuild
from frtc.lowering.ops import add, cast, concat, const, ge, lt

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


def no_time(node: Node) -> Node | None:
    """Zeros beside each action where the embedding of the time stands."""
    parts = node.operands if node.op == "concat" and node["axis"] == -1 else ()
    if len(parts) != 2 or parts[1].op != "broadcast":
        return None
    without: Node = concat(parts[0], const(0.0, parts[1].dtype, parts[1].shape), axis=-1)
    return without


def state_unseen(node: Node) -> Node | None:
    """The first key behind the padding is the state; only its own row, which has no keys behind it, still sees it."""
    first = node.operands[1].get("value") if node.op == "ge" else None
    if first is None or node.shape[-1] == first + 1:
        return None
    later: Node = ge(node.operands[0], const(first + 1, "i32"))
    return later


def state_later(node: Node) -> Node | None:
    """The state's position, the only single one that an angle is made of, is that of the first action."""
    if node.op != "cast" or node.shape != (1,) or node.operands[0].dtype != "i32":
        return None
    later: Node = cast(add(node.operands[0], 1), dtype=node.dtype)
    return later


SHARED: dict[str, Callable[[Module], Module]] = {
    "eps": everywhere(large_eps),
    "sin_cos_order": everywhere(cos_first),
    "rope_pairing": everywhere(neighbours),
    "missing_one": everywhere(plain_weight),
    "mask_one_more": everywhere(keys_off_by(1)),
    "mask_one_less": everywhere(keys_off_by(-1)),
    "step_count": one_step_less,
}
MUTANTS: dict[str, dict[str, Callable[[Module], Module]]] = {
    "pi05": {**SHARED, "second_silu": everywhere(one_silu), "dropped_gate": everywhere(no_gate)},
    "pi0": {
        **SHARED,
        "time_dropped": everywhere(no_time),
        "state_unseen": everywhere(state_unseen),
        "state_position": everywhere(state_later),
    },
}
