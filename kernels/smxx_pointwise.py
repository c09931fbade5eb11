"""Elementwise programs as one generated kernel: any fused expression, and with an empty one any copy, cast or gather
of a strided view.

A site "pointwise" has attributes
    expr      steps in SSA form, each (op, argument, ...); argument i is operand i, or step i - operands. Besides the
              pointwise ops there are ("const", value) and ("cast", argument, dtype)
    results   the value (numbered like arguments) that each result holds, rounded once to the result's type
    shape     the shape of the results; operands broadcast to it by NumPy's rule
Values are fp32, integer or bool between the steps: a rounding in between is a cast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frtc.kernels.costs import LAUNCH_US, moving_us
from frtc.kernels.dtypes import DTYPES
from frtc.kernels.reference.pointwise import read_by
from frtc.kernels.spec import Config, Kernel, Operand, Param, Site, Stage
from frtc.kernels.targets import Target
from frtc.kernels.views import Strides, broadcast_strides, collapse

REGISTER = {
    "f32": "float", "bf16": "float", "f16": "float",
    "i64": "long long", "i32": "int", "i8": "int", "u8": "int", "bool": "bool",
}  # fmt: skip
WIDTH = ("bool", "int", "long long", "float")  # register types; arguments of one op meet in the last that occurs

COMPARE = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
LOGIC = frozenset({"and", "or", "not"})
SAME = frozenset({"add", "sub", "mul", "minimum", "maximum", "floor_div", "mod", "neg", "abs"})  # integers too
FLOAT = frozenset(
    {"div", "pow", "exp", "log", "tanh", "erf", "sin", "cos", "sqrt", "rsqrt", "floor", "sigmoid", "silu"}
    | {"gelu_tanh", "gelu_erf"}
)
NAMES = {  # where the op's name is taken in C++
    name: f"{name}_"
    for name in ("abs", "pow", "exp", "log", "tanh", "erf", "sin", "cos", "sqrt", "rsqrt", "floor", "and", "or", "not")
}
THREADS = 256
VALUES = 16  # operands and results of a kernel with several of these: in groups of 8, half of a thread's registers


@dataclass(frozen=True, slots=True)
class Value:
    """A value inside the generated loop: its C++ text and register type."""

    text: str
    register: str

    def as_(self, register: str) -> str:
        return self.text if self.register == register else f"static_cast<{register}>({self.text})"


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes that the kernel walks, and the step of each operand and result along them."""

    shape: tuple[int, ...]
    steps: Sequence[Strides]  # operands, then results


def _operands(site: Site) -> list[Operand]:
    return [operand for operand in site.operands if operand is not None]


def layout_of(site: Site) -> Layout:
    shape = tuple(site.attrs["shape"])
    views = [*_operands(site), *site.results]
    merged, steps = collapse(shape, [broadcast_strides(view, shape) for view in views])
    if not merged:  # one element
        return Layout((1,), [(0,)] * len(_operands(site)) + [(1,)] * len(site.results))
    return Layout(merged, steps)


def refuse(site: Site, target: Target) -> str:
    views = [*_operands(site), *site.results]
    for view in views:
        if view.dtype not in REGISTER:
            return f"element type {view.dtype}"
    unknown = {step[0] for step in site.attrs["expr"]} - COMPARE - LOGIC - SAME - FLOAT - {"where", "cast", "const"}
    if unknown:
        return f"no device function for {', '.join(sorted(unknown))}"
    if any(step[0] == "cast" and step[2] not in REGISTER for step in site.attrs["expr"]):
        return "a cast to an element type that kernels do not store"
    if len(site.results) > 1 and (reason := _apart(site)):
        return reason
    layout = layout_of(site)
    reach = [sum((n - 1) * abs(s) for n, s in zip(layout.shape, view, strict=True)) for view in layout.steps]
    return "offsets beyond 2^31" if max(reach, default=0) >= 2**31 or math.prod(layout.shape) >= 2**31 else ""


def _apart(site: Site) -> str:
    """Why several results should have kernels of their own. It depends on types and shapes alone, so that a pass that
    makes such sites gets the answer of codegen, which knows where the results lie."""
    operands = [Operand.packed(o.dtype, *o.shape) for o in _operands(site)]
    results = [Operand.packed(o.dtype, *o.shape) for o in site.results]
    if len(operands) + len(results) > VALUES:
        return f"{len(results)} results and {len(operands)} operands are more than {VALUES} values in registers"
    width = _width(operands, results)
    for result, value in zip(results, site.attrs["results"], strict=True):
        own = [operands[i] for i in sorted(_read(site, value))]
        if (alone := _width(own, [result])) > width:
            return f"groups of {width}, where one of the results alone has groups of {alone}"
    return ""


def _width(operands: Sequence[Operand], results: Sequence[Operand]) -> int:
    """The widest groups of a kernel over these views."""
    attrs = {"expr": (), "results": (), "shape": results[0].shape}
    return _widths(Site("pointwise", tuple(operands), tuple(results), attrs))[0]


def _read(site: Site, value: int) -> frozenset[int]:
    """The operands that a value is computed from."""
    found = [frozenset({i}) for i in range(len(_operands(site)))]
    for step in site.attrs["expr"]:
        found.append(frozenset[int]().union(*(found[i] for i in read_by(step))))
    return found[value]


def configs(site: Site, target: Target) -> list[Config]:
    """Widest groups first."""
    return [dict(VEC=vec) for vec in _widths(site)]


def _widths(site: Site) -> list[int]:
    """As many neighbours as divide the last axis and fill 16 bytes of the narrowest view."""
    layout = layout_of(site)
    views = [*_operands(site), *site.results]
    dense = [view for view, steps in zip(views, layout.steps, strict=True) if steps[-1] == 1]
    widest = 16 // min((DTYPES[view.dtype].itemsize for view in dense), default=16)
    # groups over 8 elements make kernels of few threads
    return [vec for vec in (8, 4, 2, 1) if vec <= max(widest, 1) and layout.shape[-1] % vec == 0]


def cost(site: Site, config: Config, target: Target) -> float:
    """Bytes over bandwidth after a launch; narrow accesses reach less of it, and few threads hide less latency."""
    groups = math.prod(layout_of(site).shape) // int(config["VEC"])
    share = {8: 1.0, 4: 1.0, 2: 0.8, 1: 0.5}[int(config["VEC"])] * min(1.0, groups / (target.sms * 1024))
    moved = moving_us((*_operands(site), *site.results), target) - LAUNCH_US
    return LAUNCH_US + moved / max(share, 0.01)


def stages(site: Site, config: Config, target: Target) -> tuple[Stage, ...]:
    layout, operands = layout_of(site), _operands(site)
    vec = int(config["VEC"])
    groups = math.prod(layout.shape) // vec
    values = steps_of(site.attrs["expr"], [REGISTER[operand.dtype] for operand in operands])
    context = {
        "title": describe(site),
        "shape": "x".join(map(str, layout.shape)),
        "vec": vec,
        "threads": THREADS,
        "groups": groups,
        "parameters": ", ".join(_parameters(site)),
        "axes": _axes(layout.shape, vec),
        "operands": _loads(site, layout, config),
        "steps": [
            {"name": f"t{i}", "register": value.register, "text": value.text}
            for i, value in enumerate(values)
        ],
        "results": _stores(site, layout, values),
    }  # fmt: skip
    params = (
        *(Param("operand", i) for i, operand in enumerate(site.operands) if operand is not None),
        *(Param("result", i) for i in range(len(site.results))),
    )
    grid = (-(-groups // THREADS), 1, 1)
    return (Stage("smxx_pointwise.cu.j2", "frtc::pointwise", grid, THREADS, 0, params, context, waits=True),)


def steps_of(expr: Sequence[Sequence[Any]], registers: Sequence[str]) -> list[Value]:
    """Text and register type of every step, given the operands' register types."""
    known = [Value(f"x{i}[j]", register) for i, register in enumerate(registers)]
    found: list[Value] = []
    for op, *arguments in expr:
        if op == "const":
            value = _literal(arguments[0])
        elif op == "cast":
            x, dtype = known[arguments[0]], arguments[1]
            value = Value(f"op::cast<{REGISTER[dtype]}, {DTYPES[dtype].cuda}>({x.text})", REGISTER[dtype])
        else:
            value = _apply(op, [known[i] for i in arguments])
        found.append(value)
        known.append(Value(f"t{len(found) - 1}", value.register))
    return found


def _apply(op: str, arguments: Sequence[Value]) -> Value:
    function = f"op::{NAMES.get(op, op)}"
    condition = [arguments[0].as_("bool")] if op == "where" else []
    rest = arguments[1:] if op == "where" else arguments
    common = max((value.register for value in rest), key=WIDTH.index)
    if op in FLOAT:
        common = "float"
    elif op in LOGIC:
        common = "bool"
    elif op in SAME and common == "bool":
        common = "int"
    result = "bool" if op in COMPARE | LOGIC else common
    return Value(f"{function}({', '.join([*condition, *(value.as_(common) for value in rest)])})", result)


def _literal(value: bool | int | float) -> Value:
    if isinstance(value, bool):
        return Value(str(value).lower(), "bool")
    if isinstance(value, int):
        wide = not -(2**31) <= value < 2**31
        return Value(f"{value}ll" if wide else str(value), "long long" if wide else "int")
    number = np.float32(value)
    if not np.isfinite(number):
        return Value(f"__uint_as_float({number.view(np.uint32):#x}u)", "float")
    return Value(f"{float(number)!r}f", "float")


def _parameters(site: Site) -> list[str]:
    reads = [f"const {DTYPES[operand.dtype].cuda}* in{i}" for i, operand in enumerate(_operands(site))]
    return reads + [f"{DTYPES[result.dtype].cuda}* out{i}" for i, result in enumerate(site.results)]


def _axes(shape: Sequence[int], vec: int) -> list[dict[str, Any]]:
    """Coordinates from the last axis to the first; the last one counts groups."""
    last = len(shape) - 1
    axes = [{"name": f"i{last}", "extent": shape[last] // vec, "scale": f" * {vec}" if vec > 1 else ""}]
    return axes + [{"name": f"i{axis}", "extent": shape[axis], "scale": ""} for axis in range(last - 1, -1, -1)]


def _offset(steps: Strides) -> str:
    terms = [f"i{axis} * {step}" if step != 1 else f"i{axis}" for axis, step in enumerate(steps) if step]
    return " + ".join(terms) or "0"


def _loads(site: Site, layout: Layout, config: Config) -> list[dict[str, Any]]:
    return [
        {"name": f"x{i}", "register": REGISTER[operand.dtype], "pointer": f"in{i}",
         "step": layout.steps[i][-1], "offset": _offset(layout.steps[i])}
        for i, operand in enumerate(_operands(site))
    ]  # fmt: skip


def _stores(site: Site, layout: Layout, values: Sequence[Value]) -> list[dict[str, Any]]:
    operands = _operands(site)
    found = []
    for i, (result, source) in enumerate(zip(site.results, site.attrs["results"], strict=True)):
        steps = layout.steps[len(operands) + i]
        inside = source < len(operands)
        register = REGISTER[operands[source].dtype] if inside else values[source - len(operands)].register
        text = f"x{source}[j]" if inside else f"t{source - len(operands)}"
        if result.dtype == "bool" and register != "bool":
            text, register = f"op::cast<bool, bool>({text})", "bool"
        found.append(
            {"name": f"y{i}", "register": register, "value": text, "pointer": f"out{i}",
             "step": steps[-1], "offset": _offset(steps)}
        )  # fmt: skip
    return found


def describe(site: Site) -> str:
    """The program in one line: "y0 = mul(x0, 2.0)"."""
    operands = _operands(site)
    known = [f"x{i}" for i in range(len(operands))]
    for op, *arguments in site.attrs["expr"]:
        if op == "const":
            known.append(repr(arguments[0]))
        elif op == "cast":
            known.append(f"{arguments[1]}({known[arguments[0]]})")
        else:
            known.append(f"{op}({', '.join(known[i] for i in arguments)})")
    return ", ".join(f"y{i} = {known[source]}" for i, source in enumerate(site.attrs["results"]))


KERNELS = (Kernel("smxx_pointwise", "pointwise", "baseline", refuse, configs, cost, stages),)
