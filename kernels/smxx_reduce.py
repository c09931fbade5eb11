"""Reductions over axes, running sums, softmax: which sites the kernels serve, and their launches."""

from __future__ import annotations

from frtc.kernels.costs import moving_us
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target
from frtc.kernels.views import collapse, last_axis_is_dense, row_steps

FLOATS = ("bf16", "f16", "f32")
INTEGERS = ("i64", "i32", "i8", "u8", "bool")
# Any and all of booleans are the largest and the smallest of 0 and 1.
REDUCE = {"reduce_sum": "sum", "reduce_mean": "mean", "reduce_max": "max", "reduce_any": "max", "reduce_all": "min"}
WARPS = 4
BLOCK = 128  # threads of a block that several short rows share
MAX_THREADS = 1024
MAX_ITEMS = 4  # groups of 16 bytes a thread of softmax keeps in registers
STEP_US = 0.02  # one round of loads of a warp, in flight with others


def _x(site: Site) -> Operand:
    x = site.operands[0]
    assert x is not None
    return x


def _axes(site: Site) -> list[int]:
    """The axes along which a site adds up, from 0, in order."""
    axes = site.attrs["axes"] if "axes" in site.attrs else (site.attrs["axis"],)
    return sorted(len(_x(site).shape) + int(axis) for axis in axes)


def _split(site: Site) -> tuple[int, int, int, int, int, int] | None:
    """(rows, n, steps of x from row to row and element to element, those of y); None where either is several axes."""
    x, y, axes = _x(site), site.results[0], _axes(site)
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    reduces = site.op in REDUCE
    y_steps = y.strides
    if reduces and len(y.shape) == len(kept):  # keepdims is false
        y_steps = tuple(dict(zip(kept, y.strides, strict=True)).get(axis, 0) for axis in range(len(x.shape)))
    outer, row = collapse([x.shape[a] for a in kept], [tuple(s[a] for a in kept) for s in (x.strides, y_steps)])
    inner_views = [tuple(x.strides[a] for a in axes), tuple(0 if reduces else y_steps[a] for a in axes)]
    inner, element = collapse([x.shape[a] for a in axes], inner_views)
    if len(outer) > 1 or len(inner) > 1:
        return None
    x_row, y_row = (row[0][0], row[1][0]) if outer else (0, 0)
    x_step, y_step = (element[0][0], element[1][0]) if inner else (0, 0)
    return (outer[0] if outer else 1, inner[0] if inner else 1, x_row, x_step, y_row, y_step)


def _refuse(site: Site, target: Target) -> str:
    x, y = _x(site), site.results[0]
    for view in (x, y):
        if view.dtype not in FLOATS + INTEGERS:
            return f"element type {view.dtype}"
    if x.dtype in FLOATS and y.dtype not in FLOATS:
        return f"{x.dtype} added up into {y.dtype}"
    return "leading or reduced axes do not step as one" if _split(site) is None else ""


def _sum_type(site: Site) -> str:
    """What a site adds up in. Means of integers are fp32, as their reference."""
    return "float" if _x(site).dtype in FLOATS or site.op == "reduce_mean" else "long long"


def _stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    split = _split(site)
    assert split is not None, "refused"
    rows, n, x_row, x_step, y_row, y_step = split
    types = ", ".join([_sum_type(site), DTYPES[_x(site).dtype].cuda, DTYPES[site.results[0].dtype].cuda])
    if site.op in REDUCE:
        entry = f"frtc::reduce<frtc::Reduce::{REDUCE[site.op]}, {WARPS}, {types}>"
        numbers: tuple[int, ...] = (rows, n, x_row, x_step, y_row)
    else:
        entry, numbers = f"frtc::cumsum<{WARPS}, {types}>", (rows, n, x_row, x_step, y_row, y_step)
    params = (Param("operand", 0), Param("result", 0), *(Param("i32", number) for number in numbers))
    return (Stage("smxx_reduce.cuh", entry, (-(-rows // WARPS), 1, 1), WARPS * 32, 0, params, waits=True),)


def _cost(site: Site, config: Config, target: Target) -> float:
    split = _split(site)
    assert split is not None, "refused"
    return moving_us([_x(site)], target) + STEP_US * split[1] / 32


def _refuse_softmax(site: Site, target: Target) -> str:
    x, y = _x(site), site.results[0]
    if x.dtype not in FLOATS or y.dtype not in FLOATS:
        return f"element types {x.dtype}, {y.dtype}"
    if int(site.attrs["axis"]) != -1 or not all(last_axis_is_dense(view, x.shape[-1]) for view in (x, y)):
        return "not along a dense last axis"
    if row_steps(x.shape, [x, y]) is None:
        return "leading axes do not step as one"
    return (
        "" if _softmax_configs(site, target) else f"rows of {x.shape[-1]} elements do not fit the registers of a block"
    )


def _softmax_configs(site: Site, target: Target) -> list[Config]:
    """Threads a row and rows a block; the fewest groups a thread first."""
    vec = 16 // DTYPES[_x(site).dtype].itemsize
    groups = -(-_x(site).shape[-1] // vec)
    if groups <= 32:
        lanes = 1 << (groups - 1).bit_length()
        return [dict(LANES=lanes, ROWS=BLOCK // lanes)]
    found = dict.fromkeys(-(-groups // (32 * items)) * 32 for items in range(1, MAX_ITEMS + 1))
    return [dict(LANES=lanes, ROWS=BLOCK // lanes if lanes <= 32 else 1) for lanes in found if lanes <= MAX_THREADS]


def _softmax_stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    x, y = _x(site), site.results[0]
    found = row_steps(x.shape, [x, y])
    assert found is not None, "refused"
    rows, steps = found
    lanes, per_block = int(config["LANES"]), int(config["ROWS"])
    numbers = f"{x.shape[-1]}, {lanes}, {per_block}, {16 // DTYPES[x.dtype].itemsize}"
    entry = f"frtc::softmax<{numbers}, {DTYPES[x.dtype].cuda}, {DTYPES[y.dtype].cuda}>"
    params = (Param("operand", 0), Param("result", 0), *(Param("i32", number) for number in (rows, *steps)))
    return (Stage("smxx_reduce.cuh", entry, (-(-rows // per_block), 1, 1), lanes * per_block, 0, params, waits=True),)


def _softmax_cost(site: Site, config: Config, target: Target) -> float:
    return moving_us([_x(site), site.results[0]], target)


def _configs(site: Site, target: Target) -> list[Config]:
    return [{}]


KERNELS = (
    *(Kernel("smxx_reduce", op, "baseline", _refuse, _configs, _cost, _stages) for op in REDUCE),
    Kernel("smxx_cumsum", "cumsum", "baseline", _refuse, _configs, _cost, _stages),
    Kernel("smxx_softmax", "softmax", "baseline", _refuse_softmax, _softmax_configs, _softmax_cost, _softmax_stages),
)
