"""fold_constants: what depends only on the step number becomes a table with a leading step axis.

    f(index(table, k))             -> index(f(table), k)              k counts the rounds of a repeat
    index(linear(t, w), k)[a:b]    -> index(linear(t, w[a:b]), k)

f(table) is a constant expression; it is evaluated once, in float64, when the Plan is written. That removes the time
embedding, the time MLP and every adaptive norm's modulation from the loop (one row per step, not one per token). What
depends on no input at all (RoPE tables, position embeddings) is a constant expression already.
"""

from __future__ import annotations

from frtc.lowering.ir import Graph, Module, Node, Repeat, Run, Step, rebuild
from frtc.lowering.op import TypeMismatch
from frtc.lowering.ops import OPS, POINTWISE, broadcast, index, linear, reshape, slice_
from frtc.passes.rewrite import count

# Ops whose attributes count axes from the end: a new leading axis changes nothing.
_BATCHED = frozenset(
    "linear gated_linear rms_norm layer_norm ada_rms_norm softmax cumsum slice transpose pad reduce_sum reduce_mean "
    "reduce_max reshape broadcast concat rope".split()
)


def fold_constants(module: Module) -> Module:
    loops = {program: k for k, programs in _loops(module.schedule) for program in programs}
    return module.map(lambda g: _fold(g, loops[g.name]) if g.name in loops else g)


def _loops(steps: tuple[Step, ...]) -> list[tuple[str, set[str]]]:
    """(index name, programs that it counts) of every repeat."""
    found = []
    for step in steps:
        if isinstance(step, Repeat):
            found.append((step.index, {s.program for s in step.body if isinstance(s, Run)}))
            found += _loops(step.body)
    return found


def _fold(graph: Graph, index_name: str) -> Graph:
    tables: dict[Node, Node] = {}  # node -> the same value with a leading step axis
    counters = [n for n in graph.inputs if n["name"] == index_name]

    def visit(old: Node, new: Node) -> Node:
        if not counters:
            return new
        if new.op == "index" and new.args[1] is counters[0] and new.args[0] is not None and new.args[0].is_const:
            tables[new] = new.args[0]
            return new
        operands = new.operands
        if not operands or not all(a.is_const or a in tables for a in operands) or new.is_const:
            return new
        lengths = {tables[a].shape[0] for a in operands if a in tables}
        table = _lift(new, tables, lengths.pop()) if len(lengths) == 1 else None
        if table is None:
            return new
        result: Node = index(table, counters[0], loc=new.loc)
        tables[result] = table
        count("fold_constants")
        return result

    return rebuild(graph, visit)


def _lift(node: Node, tables: dict[Node, Node], steps: int) -> Node | None:
    """`node` over tables instead of single entries; None where no rule is known."""
    if node.op not in _BATCHED | POINTWISE:
        return None
    args: list[Node | None] = [None if a is None else tables.get(a, a) for a in node.args]
    if node.op == "slice" and node["axis"] == -1 and args[0] is not None and _is_bare_linear(args[0]):
        return _narrowed(args[0], node)
    attrs = {**dict(node.attrs), "dtype": node.dtype}
    if node.op == "concat":  # parts that do not depend on the step are repeated
        args = [tables.get(a, broadcast(a, shape=(steps, *a.shape))) for a in node.operands]
    elif node.op == "reshape":
        attrs["shape"] = (steps, *node["shape"])
    elif node.op == "broadcast" or node.op in POINTWISE:  # the step axis stays in front of all others
        args = [_widened(a, b, node, tables, steps) for a, b in zip(args, node.args, strict=True)]
        if node.op == "broadcast":
            attrs["shape"] = (steps, *node["shape"])
    elif any(b in tables for b in node.args[1:] if b is not None):
        return None  # a weight that depends on the step
    try:
        lifted = OPS[node.op].build(args, attrs, node.loc)
    except TypeMismatch:
        return None
    return lifted if lifted.shape == (steps, *node.shape) else None


def _is_bare_linear(node: Node) -> bool:
    """A linear over constants with no gate or residual, its bias one value per column."""
    b = node.args[2] if node.op == "linear" else None
    return node.op == "linear" and not any(node.args[3:]) and (b is None or b.shape == node.shape[-1:])


def _narrowed(table: Node, cut: Node) -> Node:
    """The slice of a linear's columns: only the rows of the weight that it shows are multiplied."""
    x, w, b = table.args[:3]
    rows = {k: cut[k] for k in ("start", "stop", "step")}
    bias = None if b is None else slice_(b, axis=-1, **rows)
    result: Node = linear(x, slice_(w, axis=-2, **rows), bias, act=table["act"], dtype=table.dtype, loc=cut.loc)
    return result


def _widened(table: Node | None, entry: Node | None, node: Node, tables: dict[Node, Node], steps: int) -> Node | None:
    if table is None or entry is None or entry not in tables:
        return table
    ones = len(node.shape) - len(entry.shape)
    wide: Node = reshape(table, shape=(steps, *(1,) * ones, *entry.shape))
    return wide if ones else table
