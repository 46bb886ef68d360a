"""Convert an nn.Module, an fx GraphModule or an ExportedProgram to a computation graph.

All of them go through torch.export, so one table of ATen operators (`lowering`) serves all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import (
    ComplexTensor,
    array_of,
    check_dense,
    in_pairs,
    is_complex,
    type_of_tensor,
)
from stitch.frontend.torch.aten_walk import lower_graph
from stitch.frontend.torch.export import (
    Capture,
    Examples,
    blaming_examples,
    exported,
    exported_call,
    refused_sharing,
    tensor_of,
)
from stitch.frontend.torch.plain_values import CallStructure, StaticValue, are_tensors, flattened
from stitch.frontend.torch.symbolic_export import TorchSizes, torch_sizes
from stitch.frontend.torch.torch_internals import pytree
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import FreeNames, InputKind, SymbolicSizes, ValueType, is_symbolic

#: Converts a module with some of its Dims at static sizes: the graph and the other sizes.
StaticCapture = Callable[[Mapping[str, int]], tuple[ComputationGraph, SymbolicSizes]]
_INPUT = torch.export.graph_signature.InputKind
_OUTPUT = torch.export.graph_signature.OutputKind


def from_fx(
    module: Any, example_inputs: Examples = (), name: str | None = None
) -> ComputationGraph:
    """Return the graph of a torch module; arguments and errors as of `captured_module`."""
    return captured_module(module, example_inputs, name)[0]


def captured_module(
    module: Any, example_inputs: Examples = (), name: str | None = None
) -> tuple[ComputationGraph, CallStructure | None]:
    """Convert a torch module to a graph.

    Args:
        module: An nn.Module, a GraphModule or an ExportedProgram.
        example_inputs: Tensors, arrays or descriptors with the shapes of the graph, by position or
            by name; an ExportedProgram needs none.
        name: The graph's name, by default that of the module's class.

    Returns:
        As `_graph_of`.

    Raises:
        CompileError: lists each unsupported operator with its source line, or names the line
            whose control flow depends on data.
    """
    title = name or _title(module)
    capture = exported(module, example_inputs)
    with blaming_examples(module, example_inputs):
        return _graph_of(capture, title, None)


def captured_dynamic_module(
    module: Any, example_inputs: Examples, dynamic_shapes: Any
) -> tuple[ComputationGraph, SymbolicSizes, CallStructure | None, StaticCapture]:
    """Convert a torch module to a graph with symbolic sizes.

    Returns:
        The graph, its sizes, the mapping of calls, and a function that converts the module with
        some of its Dims at static sizes: torch.export assumes that no symbolic size is 0 or 1.

    Raises:
        CompileError: As `captured_module`, and if the module is not the same for all sizes.
        UsageError: `dynamic_shapes` does not fit the arguments.
    """
    title = _title(module)
    capture = exported(module, example_inputs, dynamic_shapes)
    dynamic = capture.dynamic
    assert dynamic is not None, "exported with dynamic shapes"
    converted = torch_sizes(capture.program, dynamic)
    graph, structure = _graph_of(capture, title, converted)
    converted.sizes.locate = lambda: title

    def at(chosen: Mapping[str, int]) -> tuple[ComputationGraph, SymbolicSizes]:
        arguments = dynamic.at(chosen)
        plain = module.module() if isinstance(module, torch.export.ExportedProgram) else module
        static = exported_call(plain, arguments.arguments, arguments)
        others = torch_sizes(static.program, arguments)
        graph, its = _graph_of(static, title, others)
        if _form_of_results(its) != _form_of_results(structure):
            raise CompileError(f"results of {title} have another structure", got=str(chosen))
        return graph, others.sizes

    return graph, converted.sizes, structure, at


def _graph_of(
    capture: Capture, title: str, sizes: TorchSizes | None
) -> tuple[ComputationGraph, CallStructure | None]:
    """Convert a torch module to a graph.

    Args:
        capture: The export of an nn.Module, a GraphModule or an ExportedProgram.
        title: The graph's name.
        sizes: The symbolic sizes of a dynamic export.

    Returns:
        The graph, and the mapping of calls of the module to calls of the graph's program; None if
        both have the same arguments and results.

    Raises:
        CompileError: lists each unsupported operator with its source line, or names the line
            whose control flow depends on data.
    """
    program = capture.program
    _refuse_mutation(program, title)
    states = _states_of(program, title)
    builder = ComputationGraphBuilder(title)
    if sizes is not None:
        sizes.sizes.locate = lambda: builder.location
    constants = _Constants(builder)
    bindings: dict[str, Callable[[], Any]] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.target not in states:
            bindings[node.name] = _binding(program, spec, node, builder, constants, sizes)
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.target in states:
            bindings[node.name] = _state(builder, states[spec.target], tensor_of(program, spec))

    def attribute(target: str) -> Any:
        value = attrgetter(target)(program.graph_module)
        return constants(target, value) if isinstance(value, torch.Tensor) else value

    outputs = lower_graph(program.graph, builder, bindings, attribute, title, sizes=sizes)
    declared = _declare_outputs(builder, program, outputs, states, title)
    return builder.build(), _structure(capture, declared)


def _structure(capture: Capture, outputs: tuple[int | StaticValue, ...]) -> CallStructure | None:
    """The mapping of calls; None if module and program have the same arguments and results, or if
    the exported graph has others than the module."""
    (arguments, named), results = capture.arguments, capture.results
    program, inputs = capture.program, list[str | StaticValue]()
    leaves, structure = flattened(capture.arguments)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = zip(program.graph_signature.input_specs, placeholders, strict=True)
    user_nodes = [node for spec, node in specs if spec.kind is _INPUT.USER_INPUT]
    if len(user_nodes) != len(leaves) or len(flattened(results)[0]) != len(outputs):
        return None
    for node, leaf in zip(user_nodes, leaves, strict=True):
        is_slot = isinstance(node.meta.get("val"), torch.Tensor)
        inputs.append(node.name if is_slot else StaticValue(leaf))
    same_arguments = are_tensors((*arguments, *named.values()))
    same_arguments = same_arguments and inputs[len(arguments) :] == list(named)
    same_results = isinstance(results, torch.Tensor) or (
        type(results) is tuple and len(results) > 1 and are_tensors(results)
    )
    if same_arguments and same_results:
        return None
    return CallStructure(structure, tuple(named), tuple(inputs), results, outputs)


def _form_of_results(structure: CallStructure | None) -> Any:
    return structure and (flattened(structure.results)[1], structure.outputs)


def _title(module: Any) -> str:
    if isinstance(module, torch.export.ExportedProgram):
        return str(type(module.graph_module).__name__)
    return type(module).__name__


#: What torch.export names a tensor that is written in the code of a module or of a submodule.
_NUMBERED = re.compile(r"(.*\.)?lifted_tensor_\d+")


class _Constants:
    """Adds tensors of the module as constants; tensors with the same view of the same memory are
    one constant."""

    def __init__(self, builder: ComputationGraphBuilder) -> None:
        self._builder = builder
        self._by_view: dict[Any, SymbolicTensor | ComplexTensor] = {}
        # Keys are addresses: their tensors must stay alive.
        self._alive: list[Any] = []

    def __call__(self, name: str, tensor: Any) -> SymbolicTensor | ComplexTensor:
        check_dense(tensor, f"tensor {name!r} of the module")
        view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        memory = tensor.untyped_storage().data_ptr()
        key = (memory, *view) if memory else (name, *view)
        if key not in self._by_view:
            self._alive.append(tensor)
            with self._builder.at(f"tensor {name}"):
                array = array_of(in_pairs(tensor))
                has_name = not _NUMBERED.fullmatch(name)
                constant = (
                    self._builder.parameter(name, array) if has_name
                    else self._builder.constant(array)
                )  # fmt: skip
            self._by_view[key] = ComplexTensor(constant) if is_complex(tensor) else constant
        return self._by_view[key]


def _binding(
    program: Any, spec: Any, node: Any, builder: ComputationGraphBuilder, constants: _Constants,
    sizes: TorchSizes | None,
) -> Callable[[], Any]:  # fmt: skip
    """The value of a placeholder: inputs are declared now, constants when they are first read."""
    if spec.kind is _INPUT.USER_INPUT:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return lambda: value
        kind = type_of_tensor(value)
        if sizes is not None:
            kind = ValueType(sizes.shape(kind.shape), kind.data_type)
        with builder.at(f"input {node.name}"):
            slot = builder.input(node.name, kind.shape, kind.data_type)
        symbolic = ComplexTensor(slot) if is_complex(value) else slot
        return lambda: symbolic
    return lambda: constants(spec.target, tensor_of(program, spec))


def _refuse_mutation(program: Any, title: str) -> None:
    """Raise `CompileError` if the module writes to its inputs."""
    specs = program.graph_signature.output_specs
    changed = [spec for spec in specs if spec.kind is _OUTPUT.USER_INPUT_MUTATION]
    if changed:
        listed = ", ".join(str(spec.target) for spec in changed)
        raise CompileError(
            f"the module writes to its inputs: {listed}",
            where=title,
            remedy="return the new value and pass it to the next call, or keep it in a buffer "
            "(register_buffer): buffers that a module writes are states of its program",
        )


def _states_of(program: Any, title: str) -> dict[str, str]:
    """Slot names of the buffers and parameters that the module writes, by target.

    Raises `CompileError` if the module also uses another tensor that shares memory with one.
    """
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
        spec.target: tensor_of(program, spec)
        for spec, node in zip(signature.input_specs, nodes, strict=True)
        if spec.kind is not _INPUT.USER_INPUT and (node.users or spec.target in written)
    }
    for target in written:
        memory = tensors[target].untyped_storage().data_ptr()
        for other, tensor in tensors.items():
            if other != target and memory and tensor.untyped_storage().data_ptr() == memory:
                raise refused_sharing((target, other), title)
    return {target: free.free(target) for target in written}


def _state(builder: ComputationGraphBuilder, name: str, tensor: Any) -> Callable[[], Any]:
    """A buffer that the module writes: a STATE input that starts with the buffer's value."""
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
    """Declare the module's results and states as outputs.

    Returns:
        For each leaf of the module's results, the number of its output or its static value.
    """
    specs = program.graph_signature.output_specs
    results = [v for s, v in zip(specs, outputs, strict=True) if s.kind is _OUTPUT.USER_OUTPUT]
    declared = 0
    leaves: list[int | StaticValue] = []
    for name, value in zip(_output_names(program), results, strict=True):
        value = int(value) if is_symbolic(value) else value
        is_number = isinstance(value, bool | int | float)
        is_tensor = isinstance(value, SymbolicTensor | ComplexTensor)
        leaves.append(declared if is_tensor else StaticValue(value))
        if not (is_tensor or is_number):
            continue
        if isinstance(value, ComplexTensor):
            raise CompileError(
                "the module returns a complex tensor; programs have no complex type",
                where=f"{title}, {name}",
                remedy="return torch.view_as_real(x), or use "
                'torch.compile(module, backend="stitch")',
            )
        result = value if isinstance(value, SymbolicTensor) else builder.constant(np.asarray(value))
        builder.output(name, result)
        declared += 1
    if not declared:
        raise CompileError("the module returns no tensor", where=title)
    for spec, value in zip(specs, outputs, strict=True):
        if spec.kind is not _OUTPUT.USER_OUTPUT:
            after = value.pairs if isinstance(value, ComplexTensor) else value
            builder.output(states[spec.target], after)
    return tuple(leaves)


def _output_names(program: Any) -> list[str]:
    """`output` for one result, `output_0` … for several, the keys of a dictionary."""
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
