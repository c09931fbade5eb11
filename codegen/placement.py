"""Placement: which memory each value of a module lives in, before anything is launched.

    module inputs            slots, filled by the caller
    module results           slots; the value that the program computes lives there, nothing is copied at the end
    between programs         the state space: each program can run again alone
    inside a program         the arena
    weights                  the weights block

A concat has no launch, and neither has a reshape that no view can express (heads side by side again after attention):
their parts are written where the whole expects them, also when another program writes a part (the prefix writes its
keys in front of the place where each denoise step writes its own). A result that is a view of some value lives inside
that value, wherever a launch writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from frtc.codegen.places import Place, new_place
from frtc.codegen.states import aliases, in_order
from frtc.lowering.ir import Graph, Module, Node, Type
from frtc.lowering.strided import Strided
from frtc.runtime.plan import ARENA, SLOT, STATE


@dataclass(slots=True)
class Placement:
    """Places of values that pass between programs, and of concats that hold such values.

    shared    name in the environment -> place
    concats   concat node -> place of the whole
    viewed    value whose views are results -> its place
    """

    shared: dict[str, Place] = field(default_factory=dict)
    concats: dict[Node, Place] = field(default_factory=dict)
    viewed: dict[Node, Place] = field(default_factory=dict)


def place_module(module: Module) -> Placement:
    """Homes for everything that is not local to one program."""
    placement = Placement()
    types = _types(module)
    for name, type in module.inputs.items():
        placement.shared[name] = new_place(SLOT, type, name)
    for outside, name in module.outputs:
        placement.shared[name] = new_place(SLOT, types[name], outside)
    _place_concats(module, placement)
    for graph in module.graphs:
        _place_viewed(graph, module, placement)
    for graph in module.graphs:
        for node in graph.nodes:
            if node.op == "reshape" and not node.is_const:
                _place_reshaped(node, types, placement)
    for name, type in types.items():
        if name not in placement.shared:
            placement.shared[name] = new_place(STATE, type)
    return placement


def _types(module: Module) -> dict[str, Type]:
    """Every name that a program writes, or keeps as a state, with its type."""
    written = {name: node.t for graph in module.graphs for name, node in graph.outputs}
    return written | {s["name"]: s.t for graph in module.graphs for s in graph.states}


def _place_concats(module: Module, placement: Placement) -> None:
    """The largest first: a smaller one may be a part of it (a state token reads what actions read, without them)."""
    found = [(g, n) for g in module.graphs for n in g.nodes if n.op == "concat" and not n.is_const]
    for _, node in sorted(found, key=lambda pair: -pair[1].t.size):
        _place_concat(node, placement)
    for graph, node in found:
        if node not in placement.concats and (place := _joint(graph, node, placement)) is not None:
            placement.concats[node] = place


def _joint(graph: Graph, node: Node, placement: Placement) -> Place | None:
    """Where the concat lies already, if its parts, inputs or results of `graph`, follow each other in one buffer."""
    results = {value: name for name, value in graph.outputs}
    names = [a["name"] if a.op == "input" else results.get(a) for a in node.operands]
    places = [placement.shared[name] for name in names if name in placement.shared]
    if len(places) < len(names):
        return None
    first = places[0]
    whole = replace(first, strided=replace(first.strided, shape=node.shape))
    return whole if [place for _, place in parts(node, whole)] == places else None


def _place_concat(node: Node, placement: Placement) -> None:
    """Let values of other programs that this concat reads live inside it."""
    free = [a for a in node.operands if a.op == "input" and a["name"] not in placement.shared]
    if not free:
        return
    whole = new_place(STATE, node.t)
    placement.concats[node] = whole
    for part, place in parts(node, whole):
        if part in free:
            placement.shared[part["name"]] = place


def _place_viewed(graph: Graph, module: Module, placement: Placement) -> None:
    """Let results that are views of a computed value live inside it, as far as only this program writes them."""
    others = {name for g in module.graphs if g is not graph for name, _ in g.outputs}
    for name, node in graph.outputs:
        source = node.args[0] if node.op == "view" else None
        if source is None or not _writes_freely(source) or name in placement.shared or name in others:
            continue
        whole = placement.viewed.get(source) or new_place(STATE, source.t)
        place = whole.view(Strided(node["shape"], node["strides"], node["offset"]))
        if place is not None:
            placement.viewed[source], placement.shared[name] = whole, place


def _place_reshaped(node: Node, types: dict[str, Type], placement: Placement) -> None:
    """Let a value of another program lie where the reshape of it is row-major."""
    for part, place in parts(node, new_place(STATE, node.t)):
        strided: Strided | None = place.strided
        while part.op == "view" and part.args[0] is not None and strided is not None:
            strided, part = _inverse(part, part.args[0], strided), part.args[0]
        free = part.op == "input" and part["name"] in types and part["name"] not in placement.shared
        if free and strided is not None:
            placement.shared[part["name"]] = Place(place.buffer, place.dtype, strided, place.step)


def parts(node: Node, whole: Place) -> list[tuple[Node, Place]]:
    """Each operand of a concat with its slice of the whole; a reshape has one part, the whole in another shape."""
    if node.op == "reshape" and node.args[0] is not None:
        strided = whole.strided.reshape(node.args[0].shape)
        return [(node.args[0], Place(whole.buffer, whole.dtype, strided, whole.step))] if strided is not None else []
    found, at, axis = [], 0, node["axis"]
    for part in node.operands:
        stop = at + part.shape[axis]
        strided = whole.strided.slice(axis, at, stop, 1)
        found.append((part, Place(whole.buffer, whole.dtype, strided, whole.step)))
        at = stop
    return found


def targets(graph: Graph, placement: Placement) -> dict[Node, Place]:
    """Where the computed values of `graph` are to be written, for those that do not simply get a place in the arena."""
    inside = set(graph.nodes)
    wanted = {node: place for node, place in placement.viewed.items() if node in inside}
    for name, node in graph.outputs:
        if _may_overwrite(graph, name, node):
            _aim(node, placement.shared[name], wanted)
    for node in reversed(graph.nodes):
        if node.op in ("concat", "reshape") and not node.is_const:
            whole = placement.concats.get(node) or wanted.get(node) or new_place(ARENA, node.t)
            wanted[node] = whole
            for part, place in parts(node, whole):
                _aim(part, place, wanted)
    return wanted


def _aim(part: Node, place: Place, wanted: dict[Node, Place]) -> None:
    """Have `part` written to `place`; through a view of a whole value, its source writes there."""
    if part.op == "view" and part.args[0] is not None:
        inverse = _inverse(part, part.args[0], place.strided)
        if inverse is not None:
            _aim(part.args[0], Place(place.buffer, place.dtype, inverse, place.step), wanted)
    elif _writes_freely(part) and part not in wanted:
        wanted[part] = place


def _inverse(view: Node, source: Node, place: Strided) -> Strided | None:
    """Where `source` must lie for its `view` to lie at `place`; None unless the view is a reshape or a permutation."""
    strided = Strided(view["shape"], view["strides"], view["offset"])
    if strided.is_packed and view.t.size == source.t.size:
        return place.reshape(source.shape)
    axes = {(n, s): step for n, s, step in zip(strided.shape, strided.strides, place.strides, strict=True) if n > 1}
    packed = Strided.packed(source.shape)
    wide = [(n, s) for n, s in zip(packed.shape, packed.strides, strict=True) if n > 1]
    if strided.offset or len(axes) != sum(n > 1 for n in strided.shape) or sorted(axes) != sorted(wide):
        return None
    strides = tuple(axes.get((n, s), 0) for n, s in zip(packed.shape, packed.strides, strict=True))
    return Strided(source.shape, strides, place.offset)


def _writes_freely(node: Node) -> bool:
    """Computed by a launch here (views, inputs and constants have a place already)."""
    return node.op not in ("input", "state", "view", "read", "write") and not node.is_const


def _may_overwrite(graph: Graph, name: str, node: Node) -> bool:
    """A loop-carried value may be written where it is read if its last reader writes it, element by element."""
    old = next((n for n in graph.inputs if n["name"] == name), None)
    if old is None:
        return True
    writer = node
    while writer.op in ("view", "item") and writer.args[0] is not None:
        writer = writer.args[0]
    if writer.op in ("concat", "reshape"):
        return False  # their parts are written before the others are read
    order = {n: i for i, n in enumerate(in_order(graph))}
    same = aliases(graph, old)
    last = max((i for n, i in order.items() if any(a in same for a in n.operands)), default=0)
    elementwise = {"linear": (3,)}.get(writer.op, ())
    inside = [i for i, a in enumerate(writer.args) if a in same]
    return last <= order[writer] and all(i in elementwise and writer.args[i] is old for i in inside)
