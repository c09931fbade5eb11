"""split_linears: a linear over parts side by side becomes one over what changes, and a bias from what does not.

    linear(concat(x, broadcast(t)), w, b)   ->   linear(x, w_x, linear(t, w_t, b))

Where each row holds the same t and t does not change from round to round, or by the round's number alone. The bias is
then a table with one row per round (fold_constants) or leaves the loop (hoist), and each row multiplies less.
"""

from __future__ import annotations

from frtc.lowering.ir import Graph, Module, Node, Repeat, Step, While, rebuild, walk
from frtc.lowering.ops import concat, linear, reshape, slice_
from frtc.passes.hoist import written
from frtc.passes.rewrite import record


def split_linears(module: Module) -> Module:
    changing = _changing(module.schedule, list(module.graphs))
    return module.map(lambda graph: _split(graph, changing.get(graph.name)))


def _changing(steps: tuple[Step, ...], graphs: list[Graph]) -> dict[str, set[str]]:
    """Program of a loop -> what the loop changes, beside its counter."""
    found: dict[str, set[str]] = {}
    for step in steps:
        if isinstance(step, Repeat | While):
            names = written(step, graphs) - ({step.index} if isinstance(step, Repeat) else set())
            programs = {g.name for g in graphs if written(step, [g]) & {name for name, _ in g.outputs}}
            found |= dict.fromkeys(programs, names) | _changing(step.body, graphs)
    return found


def _split(graph: Graph, changing: set[str] | None) -> Graph:
    """changing: names that change in the loop around the program; None: no loop, only constants are steady."""

    def steady(value: Node) -> bool:
        if changing is None:
            return value.is_const
        return all(n.op != "state" and not (n.op == "input" and n["name"] in changing) for n in walk([value]))

    def visit(old: Node, new: Node) -> Node:
        x = new.args[0] if new.op == "linear" and not new.is_const else None
        if x is None or x.op != "concat" or x["axis"] != -1:
            return new
        rows = [_row(part) for part in x.operands]
        moved = [row if row is not None and steady(row) else None for row in rows]
        return _parted(new, x, moved) if any(moved) and not all(moved) else new

    return rebuild(graph, visit)


def _row(part: Node) -> Node | None:
    """What every row of `part` holds, as [K]; None if rows may differ."""
    source = part.operands[0] if part.op == "broadcast" else part
    shape = part.shape[-1:]
    if source.t.size != shape[0]:
        return None
    flat: Node = source if source.shape == shape else reshape(source, shape=shape)
    return flat


def _parted(node: Node, x: Node, moved: list[Node | None]) -> Node:
    _, w, b, residual, gate = node.args[:5]
    if w is None or not w.is_const or (b is not None and len(b.shape) != 1):
        return node
    kept, at, bias = [], 0, b
    for part, row in zip(x.operands, moved, strict=True):
        columns = slice_(w, axis=-1, start=at, stop=at + part.shape[-1])
        at += part.shape[-1]
        if row is None:
            kept.append((part, columns))
        else:
            bias = linear(row, columns, bias, dtype="f32", loc=node.loc)
    parts, weights = zip(*kept, strict=True)
    inner = parts[0] if len(parts) == 1 else concat(*parts, axis=-1)
    stacked = weights[0] if len(weights) == 1 else concat(*weights, axis=-1)
    result: Node = linear(inner, stacked, bias, residual, gate, act=node["act"], dtype=node.dtype, loc=node.loc)
    record("split_linears", node, result)
    return result
