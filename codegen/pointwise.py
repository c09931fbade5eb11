"""Pointwise nodes and copies as sites."""

from __future__ import annotations

from typing import Any

from frtc.kernels.spec import Operand, Site
from frtc.lowering.ir import Node
from frtc.lowering.pattern import literal
from frtc.lowering.pointwise import program


def scalar(node: Node | None) -> int | float | bool | None:
    """The number of a literal with one value, else None."""
    return None if node is None else literal(node)


def site_attrs(node: Node) -> tuple[str, dict[str, Any], list[Node]]:
    """(op, attributes, operands) of the site that computes a pointwise node. Its results say their element types."""
    fused = node if isinstance(node.type, tuple) else program(node)
    return fused.op, {k: v for k, v in fused.attrs if k != "others"}, list(fused.operands)


def copy_site(source: Operand, target: Operand) -> Site:
    """A copy between two views of one shape; converts the element type where they differ."""
    assert source.shape == target.shape, f"copy of {source.shape} to {target.shape}"
    return Site("pointwise", (source,), (target,), {"expr": (), "results": (0,), "shape": target.shape})
