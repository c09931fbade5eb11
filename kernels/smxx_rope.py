"""Rotary position embedding: `rope` on any strided tensor, `rope_qkv` that splits a projection and fills a KV cache."""

from __future__ import annotations

from frtc.kernels.costs import moving_us
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target
from frtc.kernels.views import broadcast_strides, collapse, last_axis_is_dense

FLOATS = ("bf16", "f16", "f32")
THREADS = 128


def _present(site: Site) -> list[Operand]:
    """All operands and results of a site; none is optional here."""
    return [view for view in (*site.operands, *site.results) if view is not None]


def _group(half: int, widest: int) -> int:
    """Pairs a thread turns: a power of two that divides the half row, at most 16 bytes of the widest operand."""
    group = 16 // widest
    while half % group:
        group //= 2
    return group


def _refuse_views(site: Site, size: int) -> str:
    """What both kernels ask of the operands x, cos, sin and of the results, whose rows have `size` elements."""
    _, cos, sin = site.operands
    views = _present(site)
    if any(view.dtype not in FLOATS for view in views):
        return f"an element type is none of {', '.join(FLOATS)}"
    if cos is None or sin is None or cos.dtype != sin.dtype:
        return "cos and sin differ in element type"
    if size % 2 or cos.shape[-1] != size // 2:
        return f"rows of {size} elements do not match {cos.shape[-1]} angles"
    if not all(last_axis_is_dense(view, view.shape[-1]) for view in views):
        return "an operand's last axis is strided"
    return ""


def _leading(site: Site) -> tuple[tuple[int, ...], list[tuple[int, ...]]] | None:
    """(batch, head, row) extents, and the steps of x, cos, sin, y along them; None if the axes are more."""
    x, cos, sin = site.operands
    assert x is not None and cos is not None and sin is not None
    strides = [broadcast_strides(view, (*x.shape[:-1], view.shape[-1]))[:-1] for view in (x, cos, sin, site.results[0])]
    merged, steps = collapse(x.shape[:-1], strides)
    if len(merged) > 3:
        return None
    missing = 3 - len(merged)
    return (1,) * missing + merged, [(0,) * missing + view for view in steps]


def _refuse_rope(site: Site, target: Target) -> str:
    x = site.operands[0]
    assert x is not None
    reason = _refuse_views(site, x.shape[-1])
    if not reason and _leading(site) is None:
        return "more than three leading axes that do not step as one"
    return reason


def _entry(name: str, site: Site, size: int, types: list[str]) -> tuple[str, int]:
    """(template-id, groups of pairs in a row)"""
    widest = max(DTYPES[view.dtype].itemsize for view in _present(site))
    group = _group(size // 2, widest)
    interleaved = str(site.attrs.get("pairing", "half") == "interleaved").lower()
    arguments = ", ".join([interleaved, str(size), str(group), str(THREADS), *types])
    return f"frtc::{name}<{arguments}>", size // 2 // group


def _rope_stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    x, cos, _ = site.operands
    assert x is not None and cos is not None
    found = _leading(site)
    assert found is not None, "refused"
    (batch, heads, rows), steps = found
    types = [DTYPES[view.dtype].cuda for view in (x, cos, site.results[0])]
    entry, groups = _entry("rope", site, x.shape[-1], types)
    params = (
        *(Param("operand", i) for i in range(3)), Param("result", 0), Param("i32", rows),
        *(Param("i32", step) for view in steps for step in view),
    )  # fmt: skip
    grid = (-(-rows * groups // THREADS), heads, batch)
    return (Stage("smxx_rope.cuh", entry, grid, THREADS, 0, params, waits=True),)


def _head_size(site: Site) -> int:
    x = site.operands[0]
    assert x is not None
    return int(x.shape[-1]) // int(site.attrs["heads"] + 2 * site.attrs["kv_heads"])


def _refuse_qkv(site: Site, target: Target) -> str:
    x = site.operands[0]
    assert x is not None
    if len(x.shape) != 2:
        return f"x has {len(x.shape)} axes, not [rows, channels]"
    if any(result.dtype != x.dtype for result in site.results):
        return "results differ from x in element type"
    return _refuse_views(site, _head_size(site))


def _qkv_stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    x, cos, sin = site.operands
    assert x is not None and cos is not None and sin is not None
    entry, groups = _entry("rope_qkv", site, _head_size(site), [DTYPES[x.dtype].cuda, DTYPES[cos.dtype].cuda])
    rows, heads, kv_heads = x.shape[0], int(site.attrs["heads"]), int(site.attrs["kv_heads"])
    steps = [
        x.strides[0], *(broadcast_strides(angle, (rows, angle.shape[-1]))[0] for angle in (cos, sin)),
        *(step for result in site.results for step in result.strides[:2]),
    ]  # fmt: skip
    params = (
        *(Param("operand", i) for i in range(3)), *(Param("result", i) for i in range(3)),
        *(Param("i32", number) for number in (rows, heads, kv_heads, *steps)),
    )  # fmt: skip
    grid = (-(-rows * groups // THREADS), heads + 2 * kv_heads, 1)
    return (Stage("smxx_rope.cuh", entry, grid, THREADS, 0, params, waits=True),)


def _configs(site: Site, target: Target) -> list[Config]:
    return [{}]


def _cost(site: Site, config: Config, target: Target) -> float:
    return moving_us(_present(site), target)


KERNELS = (
    Kernel("smxx_rope", "rope", "baseline", _refuse_rope, _configs, _cost, _rope_stages),
    Kernel("smxx_rope_qkv", "rope_qkv", "baseline", _refuse_qkv, _configs, _cost, _qkv_stages),
)
