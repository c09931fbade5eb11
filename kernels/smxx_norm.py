"""Norms along the last axis, with an optional residual in front: which sites one kernel serves, and its launch."""

from __future__ import annotations

from dataclasses import dataclass

from frtc.kernels.costs import moving_us
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target
from frtc.kernels.views import last_axis_is_dense, row_steps

FLOATS = ("bf16", "f16", "f32")
MAX_THREADS = 1024
MAX_ITEMS = 4  # groups of 16 bytes a thread keeps in registers
BLOCK = 128  # threads of a block that several short rows share


@dataclass(frozen=True, slots=True)
class Roles:
    """What each operand of a site is for; indices into its operands (and results), None where absent."""

    kind: str
    x: int
    r: int | None
    gate: int | None
    w: int | None
    b: int | None
    inv: int | None
    s: int | None
    y: int
    row_scale: int | None

    def steps_order(self) -> tuple[int | None, ...]:
        return (self.x, self.r, self.gate, self.w, self.b)


def roles_of(site: Site) -> Roles:
    kind = {"rms_norm": "rms", "ada_rms_norm": "ada", "layer_norm": "layer"}.get(site.op) or str(site.attrs["kind"])
    has = [i if i < len(site.operands) and site.operands[i] is not None else None for i in range(6)]
    per_row = site.attrs.get("per_row", False)
    if site.op == "residual_norm":
        return Roles(kind, 0, 1, has[2], has[3], has[4], has[5], 0, 1, 2 if per_row else None)
    b, inv = (None, has[2]) if kind == "rms" else (has[2], has[3])
    return Roles(kind, 0, None, None, has[1], b, inv, None, 0, 1 if per_row else None)


def _at(site: Site, index: int | None) -> Operand | None:
    return None if index is None else site.operands[index]


def _views(site: Site) -> list[Operand | None]:
    """x, r, gate, w, b, s, y: those that have a row of x's width, or one for all."""
    roles = roles_of(site)
    stored = None if roles.s is None else site.results[roles.s]
    return [*(_at(site, i) for i in roles.steps_order()), stored, site.results[roles.y]]


def _row_scale(site: Site) -> Operand | None:
    """[..., 1]: the scale of each row of y."""
    index = roles_of(site).row_scale
    return None if index is None else site.results[index]


def _x(site: Site) -> Operand:
    x = site.operands[0]
    assert x is not None
    return x


def refuse(site: Site, target: Target) -> str:
    views, x = _views(site), _x(site)
    width = x.shape[-1]
    for view in views[:-1]:
        if view is not None and view.dtype not in FLOATS:
            return f"element type {view.dtype} is none of {', '.join(FLOATS)}"
    if reason := _refuse_scales(site):
        return reason
    if not all(last_axis_is_dense(view, width) for view in views):
        return "an operand's last axis is strided or broadcast"
    if row_steps(x.shape, [*views, _row_scale(site)]) is None:
        return "leading axes do not step as one through all operands"
    if not _lanes(x):
        return f"rows of {width} elements do not fit the registers of {MAX_THREADS} threads"
    return ""


def _refuse_scales(site: Site) -> str:
    """A result in e4m3 is stored with one scale that is given, or with one for each row; no other result has scales."""
    roles = roles_of(site)
    y, inv, row_scale = site.results[roles.y], _at(site, roles.inv), _row_scale(site)
    scaled = (inv is not None) + (row_scale is not None)
    if y.dtype not in (*FLOATS, "e4m3"):
        return f"element type {y.dtype} is none of {', '.join(FLOATS)}, e4m3"
    if scaled != (y.dtype == "e4m3"):
        return f"a result in {y.dtype} with {scaled} kinds of scale"
    if any(scale is not None and scale.dtype != "f32" for scale in (inv, row_scale)):
        return "a scale is not f32"
    return ""


def _group(x: Operand) -> int:
    """Elements of x in 16 bytes."""
    return 16 // DTYPES[x.dtype].itemsize


def _lanes(x: Operand) -> list[int]:
    """Threads a row, fewest groups a thread first."""
    groups = -(-x.shape[-1] // _group(x))
    if groups <= 32:
        return [1 << (groups - 1).bit_length()]
    found = [-(-groups // (32 * items)) * 32 for items in range(1, MAX_ITEMS + 1)]
    return [lanes for lanes in dict.fromkeys(found) if lanes <= MAX_THREADS]


def configs(site: Site, target: Target) -> list[Config]:
    return [dict(LANES=lanes, ROWS=max(1, BLOCK // lanes) if lanes <= 32 else 1) for lanes in _lanes(_x(site))]


def cost(site: Site, config: Config, target: Target) -> float:
    """Bytes over bandwidth after a launch; a second group a thread costs one more wait for memory."""
    items = -(-_x(site).shape[-1] // (int(config["LANES"]) * _group(_x(site))))
    return moving_us(_views(site), target) + 0.3 * (items - 1)


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    roles, views, x = roles_of(site), _views(site), _x(site)
    found = row_steps(x.shape, [*views, _row_scale(site)])
    assert found is not None, "refused"
    rows, steps = found
    types = ["frtc::Absent" if view is None else DTYPES[view.dtype].cuda for view in views]
    inner = DTYPES[str(site.attrs.get("inner", "f32"))].cuda
    numbers = [x.shape[-1], config["LANES"], config["ROWS"], _group(x)]
    per_row = str(roles.row_scale is not None).lower()
    arguments = ", ".join(map(str, [f"frtc::Norm::{roles.kind}", *numbers, *types[:5], types[6], inner, per_row]))
    params = (
        *(_pointer("operand", index) for index in roles.steps_order()),
        *(_pointer("result", index) for index in (roles.s, roles.y)),
        _pointer("operand", roles.inv), _pointer("result", roles.row_scale),
        Param("i32", rows), *(Param("i32", step) for step in steps),
        Param("f32", float(site.attrs["eps"])), Param("f32", float(site.attrs.get("offset", 0.0))),
    )  # fmt: skip
    grid = (-(-rows // config["ROWS"]), 1, 1)
    block, entry = config["LANES"] * config["ROWS"], f"frtc::norm<{arguments}>"
    return (Stage("smxx_norm.cuh", entry, grid, block, 0, params, waits=True),)


def _pointer(kind: str, index: int | None) -> Param:
    """An operand or a result, or the null pointer."""
    return Param("i64", 0) if index is None else Param(kind, index)


KERNELS = tuple(
    Kernel("smxx_norm", op, "baseline", refuse, configs, cost, stages)
    for op in ("rms_norm", "ada_rms_norm", "layer_norm", "residual_norm")
)
