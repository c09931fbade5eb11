"""What a target's kernels can run, as a question about IR nodes: fusing passes ask it, and never ask for the target."""

from __future__ import annotations

from collections.abc import Callable

from frtc.codegen.places import padded
from frtc.kernels.catalog import CATALOG, Catalog
from frtc.kernels.spec import Operand, Site
from frtc.kernels.targets import Target
from frtc.lowering.ir import Node, Type


def implements(
    target: Target, families: tuple[str, ...] = ("baseline",), catalog: Catalog = CATALOG
) -> Callable[[Node], bool]:
    """A predicate: does some kernel of the families run this node on the target, its operands in rows of their own?"""

    def fits(node: Node) -> bool:
        results = node.type if isinstance(node.type, tuple) else (node.t,)
        operands = tuple(None if a is None else _operand(a.t) for a in node.args)
        site = Site(node.op, operands, tuple(_operand(t) for t in results), dict(node.attrs))
        return catalog.implements(site, target, families)

    return fits


def _operand(type: Type) -> Operand:
    return Operand(type.dtype, type.shape, padded(type).strides)
