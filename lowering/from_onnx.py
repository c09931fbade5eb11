"""ONNX -> raw IR: the same IR as through torch.export, so that everything behind it is the same.

    initialisers    floats with more than one element are weights under their names, the rest are literals
    shapes          must be numbers; ONNX's own shape inference finds those that the file leaves out
    attributes      floats are stored as float32; we read the shortest decimal that names it (1e-05, not 9.99999974e-06)

A row of the table is a function of a Call (the result types) and the operands, None where an optional one is absent;
attributes come by name. Most rows are the lowerings of the ATen ops that mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, ValueInfoProto, helper, numpy_helper

from frtc.errors import FrtcError, nearest
from frtc.kernels.dtypes import DTYPES, is_float
from frtc.lowering import ir, ops
from frtc.lowering.aten import Call, Result, Unsupported, broadcast, cast, load, negative, number, operands
from frtc.lowering.aten_shape import cut
from frtc.lowering.interpret import run
from frtc.lowering.ir import Graph, Node, Type
from frtc.lowering.op import Op, TypeMismatch
from frtc.lowering.provenance import locate, source_line

ATEN = load()
_NAMES = {dtype.numpy: name for name, dtype in DTYPES.items()}


def lower_onnx(model: onnx.ModelProto, name: str) -> Graph:
    """The raw IR of the model's graph. Inputs and results keep the names that the file gives them."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise FrtcError("lowering.onnx", f"the ONNX graph {name} is not valid", [("onnx", first)]) from None
    return _Importer(inferred, name).graph()


class _Importer:
    """The walk over one ONNX graph. `values` holds the IR of each named value; "" is an absent operand."""

    def __init__(self, model: onnx.ModelProto, name: str) -> None:
        self.proto, self.name = model.graph, name
        known = [*model.graph.value_info, *model.graph.input, *model.graph.output]
        self.declared: dict[str, ValueInfoProto] = {v.name: v for v in known}
        self.values: dict[str, Node | None] = {"": None}

    def graph(self) -> Graph:
        for tensor in self.proto.initializer:
            self.values[tensor.name] = _initializer(tensor.name, numpy_helper.to_array(tensor))
        inputs = []
        for value in self.proto.input:
            if value.name not in self.values:
                inputs.append(ir.input_(value.name, self._input_type(value.name)))
                self.values[value.name] = inputs[-1]
        for node in self.proto.node:
            self._call(node)
        outputs = tuple((v.name, self.values[v.name]) for v in self.proto.output)
        return Graph(self.name, tuple(inputs), outputs)  # type: ignore[arg-type]

    def _input_type(self, name: str) -> Type:
        try:
            return self._type(name)
        except Unsupported as error:
            hint = "export with fixed shapes"
            raise FrtcError("lowering.input", f"input {name} of {self.name}: {error}", hint=hint) from None

    def _type(self, name: str) -> Type:
        tensor = self.declared[name].type.tensor_type if name in self.declared else None
        if tensor is None or not tensor.HasField("shape"):
            raise Unsupported(f"the shape of {name} is not known")
        if not all(d.HasField("dim_value") for d in tensor.shape.dim):
            raise Unsupported(f"the shape of {name} is not fixed")
        return Type(_dtype(tensor.elem_type), tuple(d.dim_value for d in tensor.shape.dim))

    def _call(self, node: NodeProto) -> None:
        row = TABLE.get(node.op_type)
        if row is None:
            near = nearest(node.op_type, TABLE)
            raise self._unsupported(node, [("nearest", near)] if near else [])
        try:
            if node.op_type == "Constant":
                self.values[node.output[0]] = _constant(node)
                return
            call = Call(tuple(self._type(o) for o in node.output if o))
            args = [self.values[i] for i in node.input]
            result = row(call, *args, **_attributes(node))
            results = result if isinstance(result, tuple) else (result,)
            for wanted, found, output in zip(call.types, results, node.output, strict=False):
                if found.type != wanted:
                    raise Unsupported(f"ONNX gives {wanted}, its lowering {found.type}")
                locate(found, _location(node))
                self.values[output] = found
        except (Unsupported, TypeMismatch) as error:
            raise self._unsupported(node, [("reason", str(error))]) from None

    def _unsupported(self, node: NodeProto, rows: list[tuple[str, str]]) -> FrtcError:
        what = f"ONNX op {node.op_type} cannot be lowered"
        where = [("program", self.name), ("where", _location(node) or node.name)]
        return FrtcError("lowering.unsupported", what, where + rows, "export with other ops, or add a row to from_onnx.py")


def _dtype(code: int) -> str:
    numpy = np.dtype(helper.tensor_dtype_to_np_dtype(code))
    if numpy not in _NAMES:
        raise Unsupported(f"element type {numpy}")
    return _NAMES[numpy]


def _initializer(name: str, array: np.ndarray[Any, Any]) -> Node:
    dtype = _NAMES.get(array.dtype)
    if dtype is None:
        raise FrtcError("lowering.onnx", f"initialiser {name} has the element type {array.dtype}")
    if is_float(dtype) and array.size > 1:
        return ir.weight(name, Type(dtype, array.shape))
    return _literal(array)


def _literal(array: np.ndarray[Any, Any]) -> Node:
    dtype = _NAMES[array.dtype]
    if array.size == 1:
        return ops.const(array.reshape(-1)[0].item(), dtype, array.shape)
    return ops.literal(np.ascontiguousarray(array).tobytes(), dtype, array.shape)


def _constant(node: NodeProto) -> Node:
    ((kind, value),) = ((a.name, helper.get_attribute_value(a)) for a in node.attribute)
    if kind == "value":
        return _literal(numpy_helper.to_array(value))
    types = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    if kind not in types:
        raise Unsupported(f"constant with {kind}")
    return _literal(np.array(value, types[kind]))


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {a.name: _plain(helper.get_attribute_value(a)) for a in node.attribute}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _location(node: NodeProto) -> str:
    """Torch's exporter notes the module and the source line of each node."""
    notes = {p.key.rpartition(".")[2]: p.value for p in node.metadata_props}
    scopes = notes.get("name_scopes", "").strip("[]").replace("'", "").split(", ")
    module = scopes[-2] if len(scopes) > 1 else node.name
    return " ".join(part for part in (module, source_line(notes.get("stack_trace", ""))) if part)


# --- the table ----------------------------------------------------------------------------------------------------

Row = Callable[..., Result]


def _numbers(node: Node | None) -> list[int] | None:
    """The integers in a value that does not depend on the inputs."""
    if node is None:
        return None
    try:
        found = run(Graph("shape", (), (("out", node),)), {})["out"]
    except (KeyError, AssertionError):
        raise Unsupported("axes or bounds that depend on the data") from None
    return [int(n) for n in found.reshape(-1)]


def _pointwise(row: Op) -> Row:
    def lower(c: Call, *xs: Node, **_: object) -> Node:
        node: Node = row(*xs, dtype=c.dtype)
        return node

    return lower


def _reduce(row: Op) -> Row:
    """Axes are an operand, or an attribute in old files; none means all."""

    def lower(c: Call, x: Node, axes: Node | Sequence[int] | None = None, keepdims: int = 1, **_: object) -> Node:
        given = _numbers(axes) if isinstance(axes, Node) or axes is None else list(axes)
        found = sorted(negative(a, len(x.shape)) for a in (given or range(len(x.shape))))
        node: Node = row(x, axes=tuple(found), keepdims=bool(keepdims), dtype=c.dtype)
        return node

    return lower


def _where(c: Call, condition: Node, a: Node, b: Node) -> Node:
    node: Node = ops.where(condition, a, b, dtype=c.dtype)
    return node


def _gelu(c: Call, x: Node, approximate: str = "none") -> Result:
    return ATEN["gelu.default"](c, x, approximate=approximate)


def _clip(c: Call, x: Node, low: Node | None = None, high: Node | None = None) -> Result:
    return ATEN["clamp.default"](c, x, low, high)


def _softmax(c: Call, x: Node, axis: int = -1) -> Result:
    return ATEN["softmax.int"](c, x, axis)


def _gemm(
    c: Call,
    a: Node,
    b: Node,
    bias: Node | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803 (ONNX's spelling)
    transB: int = 0,  # noqa: N803
) -> Result:
    """alpha * a @ b + beta * bias; the usual linear layer where b is transposed"""
    a = ops.transpose(a, perm=(-1, -2)) if transA else a
    plain = alpha == beta == 1.0 and (bias is None or len(bias.shape) == 1)
    if transB and plain:
        return ATEN["linear.default"](c, a, b, bias)
    b = ops.transpose(b, perm=(-1, -2)) if transB else b
    if bias is None:
        product: Node = ops.matmul(a, b, dtype=c.dtype)
        return product if alpha == 1.0 else ops.mul(product, number(alpha, "f32"), dtype=c.dtype)  # type: ignore[no-any-return]
    return ATEN["addmm.default"](c, bias, a, b, beta=beta, alpha=alpha)


def _attention(
    c: Call,
    q: Node,
    k: Node,
    v: Node,
    mask: Node | None = None,
    past_k: Node | None = None,
    past_v: Node | None = None,
    *,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    **_: object,
) -> Result:
    """Heads as an axis of their own; query heads may share key heads."""
    if past_k is not None or past_v is not None or softcap or len(q.shape) != 4:
        raise Unsupported("attention with a cache, a soft-cap, or heads inside the last axis")
    attention = ATEN["scaled_dot_product_attention.default"]
    return attention(c, q, k, v, mask, is_causal=bool(is_causal), scale=scale, enable_gqa=True)


def _norm(row: str) -> Row:
    def lower(
        c: Call, x: Node, w: Node, b: Node | None = None, axis: int = -1, epsilon: float = 1e-5, **_: object
    ) -> Result:
        shape = x.shape[axis:]
        vectors = (w, b) if row == "layer_norm.default" else (w,)
        return ATEN[row](c, x, shape, *vectors, epsilon)

    return lower


def _gather(c: Call, x: Node, ids: Node, axis: int = 0) -> Result:
    """Entries of one axis; a row of a table is an embedding."""
    if axis in (0, -len(x.shape)) and len(x.shape) == 2:
        return ATEN["embedding.default"](c, x, ids)
    return ATEN["index.Tensor"](c, x, [None] * (axis % len(x.shape)) + [ids])


def _slice(
    c: Call, x: Node, starts: Node, stops: Node, axes: Node | None = None, steps: Node | None = None
) -> Result:
    first, last = _numbers(starts) or [], _numbers(stops) or []
    along, strides = _numbers(axes) or range(len(first)), _numbers(steps) or [1] * len(first)
    for start, stop, axis, step in zip(first, last, along, strides, strict=True):
        if step < 0:
            raise Unsupported("a slice that runs backwards")
        begin, end, _ = slice(start, stop).indices(x.shape[axis])
        x = cut(x, negative(axis, len(x.shape)), begin, max(begin, end), step)
    return x


def _split(c: Call, x: Node, sizes: Node | None = None, axis: int = 0, **_: object) -> Result:
    return ATEN["split_with_sizes.default"](c, x, None, axis)


def _shape(c: Call, x: Node, start: int = 0, end: int | None = None) -> Node:
    return _literal(np.array(x.shape[start:end], np.int64))


def _range(c: Call, start: Node, stop: Node, step: Node) -> Result:
    values = _numbers(start), _numbers(stop), _numbers(step)
    return ATEN["arange.start_step"](c, *(v[0] for v in values if v))


def _conv(c: Call, x: Node, w: Node, b: Node | None = None, **attrs: Any) -> Result:
    pads = attrs.get("pads", [0, 0, 0, 0])
    if pads[:2] != pads[2:] or attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Unsupported("convolution with uneven padding")
    group, dilation = attrs.get("group", 1), attrs.get("dilations", [1, 1])
    return ATEN["conv2d.default"](c, x, w, b, attrs.get("strides", [1, 1]), pads[:2], dilation, group)


def _concat(c: Call, *xs: Node, axis: int) -> Result:
    return ATEN["cat.default"](c, xs, axis)


def _transpose(c: Call, x: Node, perm: Sequence[int] | None = None) -> Result:
    return ATEN["permute.default"](c, x, perm or range(len(x.shape))[::-1])


def _cast(c: Call, x: Node, *_: object, **__: object) -> Node:
    return cast(x, c.dtype)


def _filled(c: Call, shape: Node, value: Any = None) -> Node:
    return ops.const(0.0 if value is None else numpy_helper.to_array(value).item(), c.dtype, c.shape)


def _compare(row: Op) -> Row:
    return lambda c, a, b: row(*operands(ops.promote(a.t, b.t), a, b))


_POINTWISE = {
    "Add": ops.add, "Sub": ops.sub, "Mul": ops.mul, "Div": ops.div, "Pow": ops.pow_, "Max": ops.maximum,
    "Min": ops.minimum, "Neg": ops.neg, "Abs": ops.abs_, "Exp": ops.exp, "Log": ops.log, "Tanh": ops.tanh,
    "Erf": ops.erf, "Sin": ops.sin, "Cos": ops.cos, "Sqrt": ops.sqrt, "Floor": ops.floor, "Sigmoid": ops.sigmoid,
    "Swish": ops.silu,
}  # fmt: skip
_COMPARE = {"Equal": ops.eq, "Less": ops.lt, "LessOrEqual": ops.le, "Greater": ops.gt, "GreaterOrEqual": ops.ge}
_LOGICAL = {"And": "logical_and.default", "Or": "logical_or.default", "Not": "logical_not.default"}
_VIEWS = ("Reshape", "Unsqueeze", "Squeeze", "Flatten")

TABLE: dict[str, Row] = {
    "Constant": lambda c: (),
    **{name: _pointwise(row) for name, row in _POINTWISE.items()},
    **{name: _compare(row) for name, row in _COMPARE.items()},
    **{name: ATEN[row] for name, row in _LOGICAL.items()},
    **{name: (lambda c, x, *_, **__: ATEN["view.default"](c, x)) for name in _VIEWS},
    **{f"Reduce{n}": _reduce(ops.OPS[f"reduce_{n.lower()}"]) for n in ("Mean", "Sum", "Max")},
    "Reciprocal": ATEN["reciprocal.default"],
    "Relu": ATEN["relu.default"],
    "Gelu": _gelu,
    "Clip": _clip,
    "Where": _where,
    "Cast": _cast,
    "CastLike": _cast,
    "Identity": _cast,
    "Softmax": _softmax,
    "MatMul": ATEN["matmul.default"],
    "Gemm": _gemm,
    "Conv": _conv,
    "Attention": _attention,
    "LayerNormalization": _norm("layer_norm.default"),
    "RMSNormalization": _norm("rms_norm.default"),
    "Gather": _gather,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Transpose": _transpose,
    "Expand": lambda c, x, shape: broadcast(x, c.shape),
    "Shape": _shape,
    "Range": _range,
    "ConstantOfShape": _filled,
}
