"""Rows by device integers: `embedding` and `index` read them, `write` puts a value into a state at such a position."""

from __future__ import annotations

from frtc.kernels.costs import moving_us
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target
from frtc.kernels.views import collapse, last_axis_is_dense, row_steps

FLOATS = ("bf16", "f16", "f32")
INTEGERS = ("i32", "i64")
THREADS = 128
MAX_GRID_Y = 65535  # CUDA programming guide, technical specifications per compute capability


def _views(site: Site) -> list[Operand]:
    return [view for view in (*site.operands, *site.results) if view is not None]


def _group(site: Site) -> int:
    """Elements in 16 bytes of the narrowest type that moves."""
    return 16 // min(DTYPES[view.dtype].itemsize for view in (_views(site)[0], site.results[0]))


def _grid(width: int, rows: int, group: int) -> tuple[int, int, int]:
    return (-(-width // (group * THREADS)), rows, 1)


def _refuse_embedding(site: Site, target: Target) -> str:
    table, ids, y = _views(site)
    if ids.dtype not in INTEGERS:
        return f"ids of type {ids.dtype}"
    scaled = site.attrs.get("scale", 1.0) != 1.0
    if (table.dtype != y.dtype or scaled) and not {table.dtype, y.dtype} <= set(FLOATS):
        return f"rows of {table.dtype} scaled or stored as {y.dtype}"
    if not (last_axis_is_dense(table, table.shape[-1]) and last_axis_is_dense(y, table.shape[-1])):
        return "rows are strided"
    steps = _embedding_steps(site)
    if steps is None:
        return "leading axes of ids and result do not step as one"
    return f"{steps[0]} rows are more than a grid has" if steps[0] > MAX_GRID_Y else ""


def _embedding_steps(site: Site) -> tuple[int, list[int]] | None:
    """(ids, steps of ids and result)."""
    _, ids, y = _views(site)
    as_rows = Operand(ids.dtype, (*ids.shape, 1), (*ids.strides, 1))
    return row_steps((*ids.shape, 1), [as_rows, Operand(y.dtype, (*y.shape[:-1], 1), y.strides)])


def _embedding_stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    table, _, _ = _views(site)
    found = _embedding_steps(site)
    assert found is not None, "refused"
    rows, (id_step, y_step) = found
    numbers = (table.shape[-1], table.strides[0], id_step, y_step)
    return (_gather(site, rows, numbers, float(site.attrs.get("scale", 1.0))),)


def _gather(site: Site, rows: int, numbers: tuple[int, ...], scale: float) -> Stage:
    table, ids, y = _views(site)
    group = _group(site)
    types = ", ".join(DTYPES[view.dtype].cuda for view in (table, ids, y))
    params = (
        Param("operand", 0), Param("operand", 1), Param("result", 0),
        *(Param("i32", number) for number in numbers), Param("f32", scale),
    )  # fmt: skip
    entry = f"frtc::gather_rows<{group}, {THREADS}, {types}>"
    return Stage("smxx_embedding.cuh", entry, _grid(numbers[0], rows, group), THREADS, 0, params, waits=True)


def _entry_width(site: Site) -> int | None:
    """Elements of one entry of the leading axis where entry and result are dense, else None."""
    table, _, y = _views(site)
    merged, steps = collapse(y.shape, [table.strides[1:], y.strides])
    if not merged:
        return 1
    return merged[0] if steps == [(1,), (1,)] else None


def _refuse_index(site: Site, target: Target) -> str:
    table, i, y = _views(site)
    if i.dtype not in INTEGERS:
        return f"an index of type {i.dtype}"
    if table.dtype != y.dtype:
        return f"entries of {table.dtype} stored as {y.dtype}"
    return "entries are strided" if _entry_width(site) is None else ""


def _index_stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    width = _entry_width(site)
    assert width is not None, "refused"
    return (_gather(site, 1, (width, _views(site)[0].strides[0], 0, 0), 1.0),)


def _blocks(site: Site) -> tuple[int, int, int, int] | None:
    """(outer, width, x's and state's steps along outer) of a value that is written at an axis: dense from there on.

    Rows that both pad to 16 bytes count as dense: the padding moves along.
    """
    state, value = _views(site)[:2]
    axis = len(state.shape) + int(site.attrs["axis"]) if state.shape else 0
    outer, outer_steps = collapse(value.shape[:axis], [value.strides[:axis], state.strides[:axis]])
    inner, inner_steps = collapse(value.shape[axis:], [value.strides[axis:], state.strides[axis:]])
    size = DTYPES[state.dtype].itemsize
    if len(inner) == 2 and inner_steps[0] == inner_steps[1] == (-(-inner[1] * size // 16) * 16 // size, 1):
        inner, inner_steps = ((inner[0] - 1) * inner_steps[0][0] + inner[1],), [(1,), (1,)]
    if len(outer) > 1 or len(inner) > 1 or (inner and inner_steps != [(1,), (1,)]):
        return None
    x_step, y_step = (outer_steps[0][0], outer_steps[1][0]) if outer else (0, 0)
    return (outer[0] if outer else 1, inner[0] if inner else 1, x_step, y_step)


def _refuse_write(site: Site, target: Target) -> str:
    at = _views(site)[2]
    if at.dtype not in INTEGERS:
        return f"a position of type {at.dtype}"
    blocks = _blocks(site)
    if blocks is None:
        return "value or state are strided behind the written axis"
    return f"{blocks[0]} blocks are more than a grid has" if blocks[0] > MAX_GRID_Y else ""


def _write_stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    """The result is the next version of the state in the same buffer: only the value's place is written."""
    state, value, at = _views(site)[:3]
    blocks = _blocks(site)
    assert blocks is not None, "refused"
    outer, width, x_step, y_step = blocks
    group = 16 // DTYPES[value.dtype].itemsize
    row = state.strides[int(site.attrs["axis"])] if state.shape else 0
    entry = f"frtc::put_rows<{group}, {THREADS}, {DTYPES[value.dtype].cuda}, {DTYPES[at.dtype].cuda}>"
    params = (
        Param("operand", 1), Param("operand", 2), Param("result", 0),
        *(Param("i32", number) for number in (width, x_step, y_step, row)),
    )  # fmt: skip
    return (Stage("smxx_embedding.cuh", entry, _grid(width, outer, group), THREADS, 0, params, waits=True),)


def _configs(site: Site, target: Target) -> list[Config]:
    return [{}]


def _cost(site: Site, config: Config, target: Target) -> float:
    moved = site.operands[1] if site.op == "write" else site.results[0]
    return moving_us((moved, moved), target)


KERNELS = (
    Kernel("smxx_embedding", "embedding", "baseline", _refuse_embedding, _configs, _cost, _embedding_stages),
    Kernel("smxx_index", "index", "baseline", _refuse_index, _configs, _cost, _index_stages),
    Kernel("smxx_write", "write", "baseline", _refuse_write, _configs, _cost, _write_stages),
)
