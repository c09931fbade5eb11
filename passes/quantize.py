"""quantize: products run in 8 bits, and the launch before each of them stores its result in FP8.

    y = norm(x); linear(y, w)  ->  static:  linear(norm(x, inv=1/s), quantize(w, c), alpha=s * c)
                                   rows:    y, s = norm(x, per_row); linear(y, quantize(w, c), alpha=c, x_scale=s)
    linear(y, w)               ->  w8a16:   linear(y, quantize(w, c), alpha=c)

s is the activation scale of the site, one for each round of a repeat, c the scale of each row of w. Producers are the
norms, attention, and products with an activation, also through views; no call that only quantises appears (with scales
per row the call of a tall product has a second launch for them). A site whose x nothing can store in FP8, or that
something else reads, stays as it is; `Note` says why.

After all fusions: it changes operands, never what is one launch. Before fuse_pointwise and name_weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from frtc.lowering.ir import Graph, Module, Node, Type, input_, item, rebuild, tensor, weight
from frtc.lowering.ops import OPS, div, index, reshape
from frtc.passes.fp8_choice import Choice
from frtc.passes.fp8_nodes import VIEWS, alpha_of, emitted, in_8_bits, with_alpha
from frtc.passes.precision import Precision
from frtc.passes.rewrite import Implements, Pass, count
from frtc.passes.sites import GemmSite, sites_of, weights_of

SCALE = "scale:"  # begins the keys of activation scales among the parameters


@dataclass(frozen=True, slots=True)
class Note:
    """What became of a site: "fp8", "w8a16" or "bf16", and why not what was asked for. scale: name of its scale."""

    site: str
    program: str
    kind: str
    flops: float
    reason: str = ""
    scale: str = ""


Told = Callable[[Note], None]


def quantize(implements: Implements, precision: Precision, told: Told = lambda note: None) -> Pass:
    """The pass; `told` hears of every site once."""
    return partial(_run, implements=implements, precision=precision, told=told)


def _run(module: Module, implements: Implements, precision: Precision, told: Told) -> Module:
    if precision.kinds == {"bf16"}:
        return module
    sites = [s for s in sites_of(module) if weights_of(s.node)[0].dtype != "e4m3"]  # not in 8 bits yet
    leaves: dict[str, Node] = {}
    graphs = []
    for graph in module.graphs:
        here = {s.node: s for s in sites if s.program == graph.name}
        choice = Choice(graph, here, implements, precision)
        for note in _notes(choice):
            told(note)
            count(f"quantize_{note.kind}")
        graphs.append(_Rewriter(choice, leaves).run())
    definitions = tuple((leaf["name"], tensor(SCALE + site, leaf.t)) for site, leaf in sorted(leaves.items()))
    known = replace(module.weights, outputs=module.weights.outputs + definitions)
    return replace(module, graphs=tuple(graphs), weights=known)


def _notes(choice: Choice) -> list[Note]:
    found = []
    for product, site in choice.sites.items():
        kind = "fp8" if product in choice.fp8 else "w8a16" if product in choice.w8 else "bf16"
        reason = choice.precision.fallen.get(site.name, choice.reasons.get(product, ""))
        found.append(Note(site.name, site.program, kind, site.flops, reason, site.scale))
    return found


@dataclass(frozen=True, slots=True)
class _Rewriter:
    """One program. leaves: activation scales by site, of all programs."""

    choice: Choice
    leaves: dict[str, Node]

    def run(self) -> Graph:
        graph = rebuild(self.choice.graph, self._visit)
        counters = [n for n in graph.nodes if n.op == "input" and n not in graph.inputs]
        return replace(graph, inputs=graph.inputs + tuple(counters))

    def _visit(self, old: Node, new: Node) -> Node:
        choice, first = self.choice, new.args[0] if new.args else None
        if old in choice.views:
            new = OPS[old.op].build([first], dict(old.attrs), old.loc)
        elif old.op == "item" and old.args[0] in choice.emits:
            assert first is not None
            new = item(first, old["index"])
        elif old in choice.fp8:
            new = self._product(old, new)
        elif old in choice.w8:
            assert first is not None
            new = in_8_bits(new, first)
        return self._producer(old, new) if old in choice.emits else new

    def _producer(self, old: Node, new: Node) -> Node:
        """The launch that stores what a product reads; a result that was alone stays first."""
        site = self.choice.emits[old]
        inv = self._entry(div(1.0, self._leaf(site)), site) if self.choice.precision.static else None
        stored = emitted(new, inv)
        return item(stored, 0) if isinstance(stored.type, tuple) and not isinstance(old.type, tuple) else stored

    def _product(self, old: Node, new: Node) -> Node:
        x = new.args[0]
        assert x is not None
        if self.choice.precision.static:
            site = self.choice.emits[self.choice.fp8[old].producer]
            product = in_8_bits(new, x, scale=self._leaf(site))
            return with_alpha(product, self._entry(alpha_of(product), site))
        producer = x
        while producer.op in VIEWS or producer.op == "item":
            assert producer.args[0] is not None
            producer = producer.args[0]
        assert isinstance(producer.type, tuple)
        scales, shape = item(producer, len(producer.type) - 1), (*x.shape[:-1], 1)
        return in_8_bits(new, x, scales if scales.shape == shape else reshape(scales, shape=shape))

    def _leaf(self, site: GemmSite) -> Node:
        leaf = weight(f"scale.{site.scale}", Type("f32", () if site.rounds is None else (site.rounds,)))
        return self.leaves.setdefault(site.scale, leaf)

    def _entry(self, table: Node, site: GemmSite) -> Node:
        """Entry of the round, where the site has one for each."""
        if site.rounds is None:
            return table
        entry: Node = index(table, input_(site.index, Type("i32", ())))
        return entry
