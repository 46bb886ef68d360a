"""PyTorch modules: an nn.Module, an fx GraphModule or an ExportedProgram as a computation graph.

Graphs of modules and functions (`symbolic_trace`) are captured again by torch.export, so one table
of ATen operators (`lowering`) serves all. Importing this module needs the package torch (an
optional extra).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import (
    ComplexTensor,
    array_of,
    check_dense,
    in_pairs,
    is_complex,
    torch_type_of,
    type_of_tensor,
)
from stitch.frontend.torch.aten_walk import lower_graph
from stitch.frontend.torch.export import Capture, Examples, exported, refused_sharing
from stitch.frontend.torch.plain_values import (
    CallStructure,
    StaticValue,
    are_tensors,
    flattened,
)
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import DataType, FreeNames, InputKind

_INPUT = torch.export.graph_signature.InputKind
_OUTPUT = torch.export.graph_signature.OutputKind


def from_fx(
    module: Any, example_inputs: Examples = (), name: str | None = None
) -> ComputationGraph:
    """The graph of a torch module at the shapes of its examples; arguments and errors as of
    `captured_module`."""
    return captured_module(module, example_inputs, name)[0]


def captured_module(
    module: Any, example_inputs: Examples = (), name: str | None = None
) -> tuple[ComputationGraph, CallStructure | None]:
    """The graph of a torch module at the shapes of its examples, and how its calls are calls of the
    graph's program; None where both take and give the same.

    `example_inputs`: tensors, arrays or descriptors, by position or by name; an exported program
    needs none. Raises `CompileError` with every unsupported operator and its source line, or with
    the line whose control flow depends on data.
    """
    title = name or _title(module)
    capture = exported(module, example_inputs)
    program = capture.program
    _refuse_mutation(program, title)
    states = _states_of(program, title)
    builder = ComputationGraphBuilder(title)
    constants = _Constants(builder)
    bindings: dict[str, Callable[[], Any]] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.target not in states:
            bindings[node.name] = _binding(program, spec, node, builder, constants)
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.target in states:
            bindings[node.name] = _state(builder, states[spec.target], _tensor_of(program, spec))
    outputs = lower_graph(
        program.graph, builder, bindings, lambda target: _attribute(program, constants, target),
        title,
    )  # fmt: skip
    declared = _declare_outputs(builder, program, outputs, states, title)
    return builder.build(), _structure(capture, declared)


def _structure(capture: Capture, outputs: tuple[int | StaticValue, ...]) -> CallStructure | None:
    """How calls of the module are calls of the program; None where both are the same, or where
    torch's graph takes or gives other values than the module."""
    (arguments, named), results = capture.arguments, capture.results
    program, inputs = capture.program, list[str | StaticValue]()
    leaves, structure = flattened(capture.arguments)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = zip(program.graph_signature.input_specs, placeholders, strict=True)
    given = [node for spec, node in specs if spec.kind is _INPUT.USER_INPUT]
    if len(given) != len(leaves) or len(flattened(results)[0]) != len(outputs):
        return None
    for node, leaf in zip(given, leaves, strict=True):
        is_slot = isinstance(node.meta.get("val"), torch.Tensor)
        inputs.append(node.name if is_slot else StaticValue(leaf))
    takes_slots = are_tensors((*arguments, *named.values()))
    takes_slots = takes_slots and inputs[len(arguments) :] == list(named)
    gives_outputs = isinstance(results, torch.Tensor) or (
        type(results) is tuple and len(results) > 1 and are_tensors(results)
    )
    if takes_slots and gives_outputs:
        return None
    return CallStructure(structure, tuple(named), tuple(inputs), results, outputs)


def _title(module: Any) -> str:
    if isinstance(module, torch.export.ExportedProgram):
        return str(type(module.graph_module).__name__)
    return type(module).__name__


class _Constants:
    """Tensors of the module as constants of the graph: the same memory, the same constant."""

    def __init__(self, builder: ComputationGraphBuilder) -> None:
        self._builder = builder
        self._made: dict[Any, SymbolicTensor | ComplexTensor] = {}
        # Keys are addresses: their tensors must stay alive.
        self._held: list[Any] = []

    def __call__(self, name: str, tensor: Any) -> SymbolicTensor | ComplexTensor:
        check_dense(tensor, f"tensor {name!r} of the module")
        view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        memory = tensor.untyped_storage().data_ptr()
        key = (memory, *view) if memory else (name, *view)
        if key not in self._made:
            self._held.append(tensor)
            with self._builder.at(f"tensor {name}"):
                constant = self._builder.parameter(name, array_of(in_pairs(tensor)))
            self._made[key] = ComplexTensor(constant) if is_complex(tensor) else constant
        return self._made[key]


def _binding(
    program: Any, spec: Any, node: Any, builder: ComputationGraphBuilder, constants: _Constants
) -> Callable[[], Any]:
    """What a placeholder stands for; inputs are declared at once, constants when they are read."""
    if spec.kind is _INPUT.USER_INPUT:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return lambda: value
        kind = type_of_tensor(value)
        with builder.at(f"input {node.name}"):
            slot = builder.input(node.name, kind.shape, kind.data_type)
        given = ComplexTensor(slot) if is_complex(value) else slot
        return lambda: given
    if spec.target in program.state_dict:
        return lambda: constants(spec.target, program.state_dict[spec.target])
    return lambda: _constant(program, constants, spec.target)


def _constant(program: Any, constants: _Constants, target: str) -> SymbolicTensor | ComplexTensor:
    tensor = program.constants.get(target)
    if not isinstance(tensor, torch.Tensor):
        raise CompileError(
            f"the module passes {target!r} into its graph, which is no tensor",
            got=type(tensor).__name__,
        )
    return constants(target, tensor)


def _attribute(program: Any, constants: _Constants, target: str) -> Any:
    value = attrgetter(target)(program.graph_module)
    return constants(target, value) if isinstance(value, torch.Tensor) else value


def _refuse_mutation(program: Any, title: str) -> None:
    """A program gives what it computes; it has no way to change what it is called with."""
    specs = program.graph_signature.output_specs
    changed = [spec for spec in specs if spec.kind is _OUTPUT.USER_INPUT_MUTATION]
    if changed:
        listed = ", ".join(str(spec.target) for spec in changed)
        raise CompileError(
            f"the module writes to its inputs when it is called: {listed}",
            where=title,
            remedy="return the new value as well and give it to the next call, or keep it in the "
            "module (register_buffer): buffers that a module writes are states of its program",
        )


def _states_of(program: Any, title: str) -> dict[str, str]:
    """The buffers and parameters that the module writes, by their targets, and the names of their
    slots. Raises `CompileError` where another name for the same bytes is read as well."""
    signature = program.graph_signature
    kinds = (_OUTPUT.BUFFER_MUTATION, _OUTPUT.PARAMETER_MUTATION)
    written = [spec.target for spec in signature.output_specs if spec.kind in kinds]
    if not written:
        return {}
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    taken = [n.name for s, n in zip(signature.input_specs, nodes, strict=True)
             if s.kind is _INPUT.USER_INPUT]  # fmt: skip
    free = FreeNames((*taken, *_output_names(program)))
    tensors = {
        spec.target: _tensor_of(program, spec)
        for spec, node in zip(signature.input_specs, nodes, strict=True)
        if spec.kind is not _INPUT.USER_INPUT and (node.users or spec.target in written)
    }
    for target in written:
        memory = tensors[target].untyped_storage().data_ptr()
        for other, tensor in tensors.items():
            if other != target and memory and tensor.untyped_storage().data_ptr() == memory:
                raise refused_sharing((target, other), title)
    return {target: free.free(target) for target in written}


def _tensor_of(program: Any, spec: Any) -> Any:
    tensor = program.state_dict.get(spec.target)
    return program.constants.get(spec.target) if tensor is None else tensor


def _state(builder: ComputationGraphBuilder, name: str, tensor: Any) -> Callable[[], Any]:
    """A buffer that the module writes: an input that begins with what the module has now."""
    initial = array_of(in_pairs(tensor))
    kind = type_of_tensor(tensor).data_type
    with builder.at(f"tensor {name}"):
        slot = builder.input(name, initial.shape, kind, InputKind.STATE)
    builder.begin_state(name, initial.copy())
    value = ComplexTensor(slot) if is_complex(tensor) else slot
    return lambda: value


def _declare_outputs(
    builder: ComputationGraphBuilder, program: Any, outputs: Any, states: Mapping[str, str],
    title: str,
) -> tuple[int | StaticValue, ...]:  # fmt: skip
    """Declare what the module returns, and its states; gives for each leaf of what it returns the
    number of the output, or the value."""
    specs = program.graph_signature.output_specs
    results = [v for s, v in zip(specs, outputs, strict=True) if s.kind is _OUTPUT.USER_OUTPUT]
    declared = 0
    leaves: list[int | StaticValue] = []
    for name, value in zip(_output_names(program), results, strict=True):
        is_number = isinstance(value, bool | int | float)
        is_tensor = isinstance(value, SymbolicTensor | ComplexTensor)
        leaves.append(declared if is_tensor else StaticValue(value))
        if not (is_tensor or is_number):
            continue
        if isinstance(value, ComplexTensor):
            raise CompileError(
                "the module returns complex numbers, which programs lack",
                where=f"{title}, {name}",
                remedy="return torch.view_as_real(x), or use "
                'torch.compile(module, backend="stitch")',
            )
        kept = value if isinstance(value, SymbolicTensor) else builder.constant(np.asarray(value))
        builder.output(name, kept)
        declared += 1
    if not declared:
        raise CompileError("the module returns no tensor", where=title)
    for spec, value in zip(specs, outputs, strict=True):
        if spec.kind is not _OUTPUT.USER_OUTPUT:
            after = value.pairs if isinstance(value, ComplexTensor) else value
            builder.output(states[spec.target], after)
    return tuple(leaves)


def _output_names(program: Any) -> list[str]:
    """`output` for one, `output_0` … for several, keys where the module returns a dictionary."""
    count = program.call_spec.out_spec.num_leaves
    tree = pytree.tree_unflatten(list(range(count)), program.call_spec.out_spec)
    paths, _ = pytree.tree_flatten_with_path(tree)
    names = ["_".join(_key_text(key) for key in path) for path, _ in paths]
    named = [f"output_{text}" if text.isdigit() else text for text in names]
    named = [f"output_{text}" if text and text[0].isdigit() else text for text in named]
    return [text or "output" for text in named]


def _key_text(key: Any) -> str:
    for field in ("key", "name", "idx"):
        part = getattr(key, field, None)
        if part is not None:
            return str(part)
    return str(key)


# --------------------------------------------------------------------------------------------------
# Calls of torch modules


def graph_of_call(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> ComputationGraph:
    """The graph of a call; raises `CompileError` as `from_fx`."""
    call = _Call(function, arguments, named)
    return from_fx(call, tuple(call.examples), getattr(function, "__name__", "call"))


class _Call(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A call as a module whose arguments are the tensors alone."""

    def __init__(
        self, function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._function = function
        self.examples: list[Any] = []
        self._arguments = self._marked(list(arguments))
        self._named = {name: self._marked(value) for name, value in named.items()}

    def _marked(self, value: Any) -> Any:
        """The value with a place for each tensor in it."""
        if isinstance(value, list | tuple):
            return type(value)([self._marked(item) for item in value])
        if not hasattr(value, "__torch_function__"):
            return value
        if isinstance(value, torch.Tensor):
            self.examples.append(value.detach())
        else:
            dtype = torch_type_of(DataType.from_dtype(value.dtype))
            self.examples.append(torch.zeros(value.shape, dtype=dtype))
        return _Place(len(self.examples) - 1)

    def forward(self, *tensors: Any) -> Any:
        arguments = [_filled(value, tensors) for value in self._arguments]
        named = {name: _filled(value, tensors) for name, value in self._named.items()}
        return self._function(*arguments, **named)


class _Place:
    """Where a tensor goes, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def _filled(value: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_filled(item, tensors) for item in value])
    return tensors[value.number] if isinstance(value, _Place) else value
