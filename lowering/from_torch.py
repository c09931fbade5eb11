"""torch.export -> raw IR: one program of an unmodified nn.Module.

`torch.export(strict=False)` gives the torch.fx graph. Where that changes a tensor in place, or calls what has no row in
the tables, `run_decompositions({})` makes it functional and keeps the large ops (linear, attention, norms, gelu) whole:
it traces everything again, which takes as long as the export. Each ATen call becomes one or a few IR ops by the tables
in aten_*.py; nothing is recognised here, that is the work of the passes.

    parameters              weights by their qualified name; never materialised, so modules on the meta device will do
    buffers that change     states, and so are those that another program of the model changes (`states`)
    buffers in state_dict   weights: the checkpoint decides what they hold
    other buffers, tensors  literals up to LITERAL_BYTES; larger ones are weights whose values `constants` returns
    inputs                  values, scalars too: nothing that comes from outside becomes a number in the graph
"""

from __future__ import annotations

import gc
import operator
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from frtc.errors import FrtcError, nearest
from frtc.lowering import ir, ops
from frtc.lowering.aten import Call, Lowering, Unsupported, load
from frtc.lowering.aten_lookup import UPDATES, VERSIONS
from frtc.lowering.ir import Graph, Node, Type
from frtc.lowering.op import TypeMismatch
from frtc.lowering.provenance import locate, location, source_of

LITERAL_BYTES = 64 * 1024
DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
DATA_HINT = "make every shape and branch follow from the shapes of the inputs, not from values in tensors"
DROPPED = {"_assert_tensor_metadata.default", "_assert_scalar.default", "_assert_async.msg"}


def lower(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    input_names: Sequence[str],
    output_names: Sequence[str],
    name: str,
    *,
    variant: str = "",
    scope: str = "",
    states: Collection[str] = (),
) -> Graph:
    """The raw IR of `module.forward(*example_inputs)`.

    input_names    one per tensor of example_inputs, in the order of torch.utils._pytree
    output_names   one per tensor that forward returns
    scope          prefix (before a dot) of weight and state names
    states         qualified names of buffers that are states although this program does not change them
    """
    program = export(module, example_inputs, name)
    return translate(program, input_names, output_names, name, variant=variant, scope=scope, states=states)


def export(module: nn.Module, example_inputs: tuple[Any, ...], name: str) -> ExportedProgram:
    """The functional graph of one call. Nothing is computed: tensors are fake, parameters may be on the meta device."""
    for path, leaf in pytree.tree_flatten_with_path(example_inputs)[0]:
        if not isinstance(leaf, torch.Tensor):
            what = f"input {pytree.keystr(path)} of program {name} is {leaf!r}, which is not a tensor"
            hint = "wrap the module so that forward takes tensors only; a number that changes is a tensor of shape []"
            raise FrtcError("lowering.input", what, hint=hint)
    if module.training:
        hint = "call .eval() on it; dropout and batch statistics have no place in a compiled policy"
        raise FrtcError("lowering.training", f"the module of program {name} is in training mode", hint=hint)
    try:
        with warnings.catch_warnings(), torch.no_grad(), _no_collections():
            warnings.simplefilter("ignore")
            traced: ExportedProgram = torch.export.export(module, example_inputs, strict=False)
            return traced if is_plain(traced) else cast(ExportedProgram, traced.run_decompositions({}))
    except Exception as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        rows = [("torch", f"{type(error).__name__}: {first[0]}"), ("source", source_of(error))]
        data = "data-dependent" in str(error) or "Unbacked" in str(error)
        hint = DATA_HINT if data else "the module itself fails on tensors without values; see the line"
        raise FrtcError("lowering.export", f"torch.export cannot trace program {name}", rows, hint) from None


def is_plain(program: ExportedProgram) -> bool:
    """Are all its calls functional, and in the tables?"""
    table = load()
    calls = [n for n in program.graph.nodes if n.op not in ("placeholder", "output")]
    return all(n.target is operator.getitem or (_functional(n) and _known(n, table)) for n in calls)


def _functional(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable


def _known(node: fx.Node, table: Mapping[str, Lowering]) -> bool:
    return _target(node) in table or _target(node) in DROPPED


@contextmanager
def _no_collections() -> Iterator[None]:
    """Tracing makes millions of small objects and few cycles: looking for these takes a sixth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def mutated(program: ExportedProgram) -> frozenset[str]:
    """Qualified names of the buffers that the program changes."""
    return frozenset(program.graph_signature.buffers_to_mutate.values())


def constants(program: ExportedProgram, scope: str = "") -> dict[str, Node]:
    """Literals of the tensors that are neither parameters nor in the state_dict and too large to stand in the graph."""
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and not spec.persistent:
            value = _value_of(program, cast(str, spec.target))
            if isinstance(value, torch.Tensor) and value.nbytes > LITERAL_BYTES and value.device.type != "meta":
                found[_scoped(scope, cast(str, spec.target))] = literal(value)
    return found


def translate(
    program: ExportedProgram,
    input_names: Sequence[str],
    output_names: Sequence[str],
    name: str,
    *,
    variant: str = "",
    scope: str = "",
    states: Collection[str] = (),
) -> Graph:
    """The raw IR of an exported program. See `lower`."""
    return _Importer(program, name, scope, mutated(program) | set(states)).graph(input_names, output_names, variant)


def literal(value: torch.Tensor) -> Node:
    """A tensor as a literal; one number where all elements are the same."""
    flat = value.detach().to("cpu").contiguous()
    data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    width = flat.element_size()
    if value.numel() and data == data[:width] * value.numel():
        return ops.const(flat.reshape(-1)[0].item(), type_of(flat).dtype, tuple(flat.shape))
    return ops.literal(data, type_of(flat).dtype, tuple(flat.shape))


def type_of(value: torch.Tensor) -> Type:
    if value.dtype not in DTYPES:
        raise Unsupported(f"element type {str(value.dtype).removeprefix('torch.')}")
    if not all(isinstance(n, int) for n in value.shape):
        raise Unsupported(f"shape {list(value.shape)}, which depends on the data")
    return Type(DTYPES[value.dtype], tuple(value.shape))


def _scoped(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name


def _value_of(program: ExportedProgram, name: str) -> torch.Tensor | None:
    value = program.constants.get(name)
    return cast("torch.Tensor | None", value if value is not None else program.state_dict.get(name))


def _first_names(program: ExportedProgram) -> dict[str, str]:
    """Tied parameters go by the name that stands first in the state_dict: export picks any of them."""
    owner: dict[int, str] = {}
    return {name: owner.setdefault(id(value), name) for name, value in program.state_dict.items()}


class _Importer:
    """The walk over one exported graph. `values` holds the IR of each fx node (a tuple for several results)."""

    def __init__(self, program: ExportedProgram, name: str, scope: str, states: frozenset[str] | set[str]) -> None:
        self.program, self.name, self.scope = program, name, scope
        self.state_names = states
        self.table = load()
        self.first_names = _first_names(program)
        self.values: dict[fx.Node, Any] = {}
        self.states: dict[str, Node] = {}  # by qualified name
        self.placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        self.versions = self._version_chains()

    def graph(self, input_names: Sequence[str], output_names: Sequence[str], variant: str) -> Graph:
        inputs = self._leaves(input_names)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op not in ("placeholder", "output"):
                raise self._unsupported(node, node.op, "submodules and attributes have no value in a program")
        outputs, writes = self._results(output_names)
        return Graph(self.name, inputs, outputs, tuple(self.states.values()), writes, variant)

    def _leaves(self, names: Sequence[str]) -> tuple[Node, ...]:
        """Every placeholder's value; returns the inputs in calling order."""
        specs = self.program.graph_signature.input_specs
        count = sum(s.kind is InputKind.USER_INPUT for s in specs)
        if count != len(names):
            given = ", ".join(names)
            raise FrtcError("lowering.input", f"program {self.name} has {count} inputs, named are {given or 'none'}")
        inputs: list[Node] = []
        for spec in specs:
            fx_node = self.placeholders[spec.arg.name]
            try:
                type = type_of(fx_node.meta["val"])
            except Unsupported as error:
                raise self._unsupported(fx_node, f"tensor {spec.target or spec.arg.name}", str(error)) from None
            if spec.kind is InputKind.USER_INPUT:
                inputs.append(ir.input_(names[len(inputs)], type))
                self.values[fx_node] = inputs[-1]
            else:
                self.values[fx_node] = self._leaf(spec.kind, cast(str, spec.target), type, bool(spec.persistent))
        return tuple(inputs)

    def _leaf(self, kind: InputKind, name: str, type: Type, persistent: bool) -> Node:
        """The value of a parameter, a buffer or a tensor constant, by the rules at the head of this file."""
        scoped = _scoped(self.scope, name)
        value = _value_of(self.program, name)
        if kind is InputKind.BUFFER and name in self.state_names:
            if value is not None and value.device.type != "meta" and bool(value.any()):
                hint = "states start at zero; let a program write what it has to start with"
                raise FrtcError("lowering.state", f"buffer {scoped} changes and is not zero at first", hint=hint)
            self.states[name] = ir.state(scoped, type)
            return self.states[name]
        if kind is InputKind.PARAMETER or persistent:
            return ir.weight(_scoped(self.scope, self.first_names.get(name, name)), type)
        if value is None or value.device.type == "meta":
            hint = "let only parameters be on the meta device, or register the buffer as persistent"
            raise FrtcError("lowering.buffer", f"buffer {scoped} of program {self.name} has no values", hint=hint)
        return literal(value) if type.nbytes <= LITERAL_BYTES else ir.weight(scoped, type)

    def _version_chains(self) -> set[fx.Node]:
        """The updates through which each changed buffer reaches its last value: their results are its versions."""
        chains: set[fx.Node] = set()
        outputs = self.program.graph.output_node().args[0]
        for spec, last in zip(self.program.graph_signature.output_specs, cast(Any, outputs), strict=True):
            path, node = [], last
            while isinstance(node, fx.Node) and node.op == "call_function" and _target(node) in UPDATES:
                path.append(node)
                node = node.args[0]
            if spec.kind is OutputKind.BUFFER_MUTATION and isinstance(node, fx.Node) and node.op == "placeholder":
                chains.update(path)
        return chains

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self.values[node] = self.values[cast(fx.Node, node.args[0])][node.args[1]]
            return
        target = _target(node)
        if target in DROPPED:
            return
        lowering = self.table.get(target)
        if lowering is None:
            raise self._unsupported(node, target)
        try:
            self.values[node] = self._lowered(node, lowering)
        except (Unsupported, TypeMismatch) as error:
            raise self._unsupported(node, target, str(error)) from None

    def _lowered(self, node: fx.Node, lowering: Lowering) -> ir.Node | tuple[Node, ...]:
        """The IR of one call, its type checked against torch's, its new nodes located."""
        vals = node.meta["val"]
        several = isinstance(vals, (tuple, list))
        call = Call(tuple(type_of(v) for v in (vals if several else (vals,))))
        args = [self._argument(a, keep=node in self.versions and i == 0) for i, a in enumerate(node.args)]
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items()}
        result = lowering(call, *args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        for found, wanted in zip(results, call.types, strict=True):
            if found.type != wanted:
                raise Unsupported(f"torch gives {wanted}, its lowering {found.type}")
            locate(found, location(node.meta))
        return result

    def _argument(self, value: Any, keep: bool = False) -> Any:
        """fx nodes become IR nodes; a version of a state becomes its value unless `keep` says that it is updated."""
        if isinstance(value, fx.Node):
            node = self.values.get(value)
            if node is None:
                raise Unsupported("its operand has no value")
            return ops.read(node) if isinstance(node, Node) and node.op in VERSIONS and not keep else node
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(v) for v in value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unsupported("a number that depends on the data")
        return value

    def _results(self, names: Sequence[str]) -> tuple[tuple[tuple[str, Node], ...], tuple[tuple[str, Node], ...]]:
        """Named results, and the last version of every changed state."""
        specs = self.program.graph_signature.output_specs
        fx_outputs = cast(Any, self.program.graph.output_node().args[0])
        outputs: list[Node] = []
        writes: dict[str, Node] = {}
        for spec, fx_node in zip(specs, fx_outputs, strict=True):
            if spec.kind is OutputKind.BUFFER_MUTATION:
                writes[cast(str, spec.target)] = self._last_version(cast(str, spec.target), self.values[fx_node])
            elif spec.kind is OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument):
                outputs.append(self._argument(fx_node))
            elif spec.kind is not OutputKind.USER_OUTPUT:
                what = f"program {self.name} changes its input {spec.target} in place"
                raise FrtcError("lowering.mutation", what, hint="return the new value, or make the tensor a buffer")
            elif fx_node is not None:
                what = f"program {self.name} returns {fx_node!r}, which is not a tensor"
                raise FrtcError("lowering.output", what, hint="wrap the module so that forward returns tensors only")
        if len(outputs) != len(names):
            found = ", ".join(str(n.type) for n in outputs)
            what = f"program {self.name} returns {len(outputs)} tensors ({found}), named are {len(names)}"
            raise FrtcError("lowering.output", what)
        changed = ((_scoped(self.scope, k), n) for k, n in writes.items() if n.op == "write")
        return tuple(zip(names, outputs, strict=True)), tuple(changed)

    def _last_version(self, name: str, value: Node) -> Node:
        """A computed value replaces the whole state."""
        if value.op in VERSIONS:
            return value
        written: Node = ops.write(self.states[name], value, ops.const(0, "i32"), axis=-1)
        return written

    def _unsupported(self, node: fx.Node, target: str, reason: str = "") -> FrtcError:
        rows = [("program", self.name), ("where", location(node.meta) or "unknown")]
        near = nearest(target, self.table)
        rows += [("reason", reason)] if reason else [("nearest", near)] if near else []
        hint = "rewrite that line with supported ops" + ("" if reason else ", or add a row to lowering/aten_*.py")
        return FrtcError("lowering.unsupported", f"aten.{target} cannot be lowered", rows, hint)


def _target(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.")
