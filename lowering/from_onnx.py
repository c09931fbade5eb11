"""ONNX -> raw IR: the same IR as through torch.export, so that everything behind it is the same.

initialisers    floats with more than one element are weights under their names, the rest are literals
shapes          must be numbers; ONNX's own shape inference finds those that the file leaves out
attributes      floats are stored as float32; we read the shortest decimal that names it (1e-05, not 9.99999974e-06)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, ValueInfoProto, helper, numpy_helper

from frtc.errors import FrtcError, nearest
from frtc.kernels.dtypes import is_float
from frtc.lowering import ir
from frtc.lowering.aten import Call, Unsupported
from frtc.lowering.ir import Graph, Node, Type
from frtc.lowering.onnx_ops import NAMES, TABLE, array_literal
from frtc.lowering.op import TypeMismatch
from frtc.lowering.provenance import locate, source_line


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
        hint = "export with other ops, or add a row to lowering/onnx_ops.py"
        return FrtcError("lowering.unsupported", what, where + rows, hint)


def _dtype(code: int) -> str:
    numpy = np.dtype(helper.tensor_dtype_to_np_dtype(code))
    if numpy not in NAMES:
        raise Unsupported(f"element type {numpy}")
    return NAMES[numpy]


def _initializer(name: str, array: np.ndarray[Any, Any]) -> Node:
    dtype = NAMES.get(array.dtype)
    if dtype is None:
        raise FrtcError("lowering.onnx", f"initialiser {name} has the element type {array.dtype}")
    if is_float(dtype) and array.size > 1:
        return ir.weight(name, Type(dtype, array.shape))
    return array_literal(array)


def _constant(node: NodeProto) -> Node:
    ((kind, value),) = ((a.name, helper.get_attribute_value(a)) for a in node.attribute)
    if kind == "value":
        return array_literal(numpy_helper.to_array(value))
    types = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    if kind not in types:
        raise Unsupported(f"constant with {kind}")
    return array_literal(np.array(value, types[kind]))


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
