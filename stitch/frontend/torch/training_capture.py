"""Convert PyTorch modules for training: parameters and buffers become inputs with their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import array_of, check_dense, data_type_of
from stitch.frontend.torch.aten_walk import lower_graph
from stitch.frontend.torch.export import (
    Examples,
    blaming_examples,
    exported,
    stops_gradient,
    tensor_of,
)
from stitch.frontend.torch.lowering import KEY_NAME, detached, embedded, give_key
from stitch.frontend.torch.tensor_bytes import array_on
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType, InputKind

_INPUT = torch.export.graph_signature.InputKind
_OUTPUT = torch.export.graph_signature.OutputKind
#: Limit of NumPy's search for a byte that two arrays share.
MAX_OVERLAP_WORK = 100_000


def from_torch_for_training(
    module: Any, example_inputs: Examples = (), name: str | None = None
) -> tuple[ComputationGraph, dict[str, Array], ComputationGraph]:
    """Convert a torch module for training.

    Returns:
        The graph; the values of its PARAMETER and STATE inputs by their names in the state dict
        (views of torch's memory if possible; tied parameters are one input); and the graph of the
        module in evaluation mode.

    Raises:
        CompileError: lists each unsupported operator with its source line.
    """
    title = name or type(module).__name__
    capture = _Capture(module, example_inputs, title)
    graph, values = capture.graph_and_values()
    return (
        graph,
        values,
        evaluation_from_torch(module, example_inputs, capture.changed_buffers, title),
    )


def evaluation_from_torch(
    module: Any, example_inputs: Examples, states: Set[str], name: str | None = None
) -> ComputationGraph:
    """Return the graph of a torch module in evaluation mode, which writes no buffers.

    `states`: the buffers that training changes; they are inputs. Raises as
    `from_torch_for_training`.
    """
    title = name or type(module).__name__
    with _evaluating(module):
        twin = _Capture(module, example_inputs, f"{title}_evaluation", states)
    return twin.graph_and_values()[0]


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Set a module's evaluation mode and restore it afterwards; not of a GraphModule."""
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.fx.GraphModule):
        yield
        return
    before = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for part, training in before:
            part.training = training


class _Capture:
    """Converts one module to a graph."""

    def __init__(
        self, module: Any, examples: Examples, title: str, states: Set[str] | None = None
    ) -> None:
        """`states`: the buffers that are inputs; None: those that the forward pass changes, whose
        next values are outputs."""
        self.title, self._source = title, (module, examples)
        self.program = exported(module, examples, trains=states is None).program
        self.builder = ComputationGraphBuilder(title)
        self.values: dict[str, Array] = {}
        self.has_key = give_key(self.program.graph)
        signature = self.program.graph_signature
        #: Buffers that the forward pass changes.
        self.changed_buffers = frozenset(signature.buffers_to_mutate.values())
        self._outputs_changes = states is None
        self._states = self.changed_buffers if states is None else states
        #: By the id of torch's parameter, which the exported program keeps alive.
        self._parameters: dict[int, SymbolicTensor] = {}
        #: The tensors that are read: name, tensor, whether a step changes it.
        self._read: list[tuple[str, Any, bool]] = []

    def graph_and_values(self) -> tuple[ComputationGraph, dict[str, Array]]:
        nodes = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        bindings: dict[str, Callable[[], Any]] = {}
        if self.has_key:
            bindings[nodes.pop(0).name] = self._key
        specs = self.program.graph_signature.input_specs
        for spec, node in zip(specs, nodes, strict=True):
            bindings[node.name] = cache(partial(self._input, spec, node))
        # Inputs have the order of the module's arguments, not that of their first use.
        for spec, node in zip(specs, nodes, strict=True):
            is_argument = spec.kind is _INPUT.USER_INPUT
            # A buffer that forward writes is a state, also if nothing reads it.
            if is_argument or (self._outputs_changes and spec.target in self.changed_buffers):
                bindings[node.name]()
        if self._outputs_changes:
            self._stop_gradients(nodes)
        with blaming_examples(*self._source):
            outputs = lower_graph(
                self.program.graph, self.builder, bindings, self._attribute, self.title
            )
        _refuse_overlaps(self._read, self.title)
        self._declare(outputs)
        return self.builder.build(), self.values

    def _stop_gradients(self, inputs: Sequence[Any]) -> None:
        """Mark the nodes through which no gradient flows to a trained parameter in torch."""
        specs = self.program.graph_signature.input_specs
        names = {
            node: spec.target for spec, node in zip(specs, inputs, strict=True)
            if spec.kind is _INPUT.PARAMETER and tensor_of(self.program, spec).requires_grad
        }  # fmt: skip
        dependent: set[Any] = {*names}
        for node in self.program.graph.nodes:
            if dependent.isdisjoint(node.all_input_nodes):
                continue
            if stops_gradient(node):
                node.target = detached
                continue
            if node.target is torch.ops.aten.embedding.default and node.args[0] in dependent:
                node.target = embedded
            dependent.add(node)
        flowing = self._read_by_outputs(lambda node: node.target is not detached)
        stopped = self._read_by_outputs(lambda node: True) - flowing
        if stopped_names := [name for node, name in names.items() if node in stopped]:
            raise CompileError(
                "forward stops all gradients of a parameter, which torch's optimizers skip",
                where=", ".join(stopped_names), remedy="requires_grad_(False) of the parameter",
            )  # fmt: skip

    def _read_by_outputs(self, passes: Callable[[Any], bool]) -> set[Any]:
        """The nodes that results of the module are computed from, through nodes that pass."""
        specs = self.program.graph_signature.output_specs
        ends = self.program.graph.output_node().args[0]
        read = {
            node for spec, node in zip(specs, ends, strict=True) if spec.kind is _OUTPUT.USER_OUTPUT
        }  # fmt: skip
        for node in reversed(self.program.graph.nodes):
            if node in read and passes(node):
                read.update(node.all_input_nodes)
        return read

    def _key(self) -> SymbolicTensor:
        return self.builder.input(KEY_NAME, (1,), DataType.INT64, InputKind.KEY)

    def _input(self, spec: Any, node: Any) -> Any:
        value = node.meta.get("val")
        if spec.kind is _INPUT.USER_INPUT:
            if not isinstance(value, torch.Tensor):
                return value
            with self.builder.at(f"input {node.name}"):
                return self.builder.input(node.name, tuple(value.shape), data_type_of(value.dtype))
        name, tensor = spec.target, tensor_of(self.program, spec)
        check_dense(tensor, f"tensor {name!r} of the module")
        is_trained = tensor.requires_grad and tensor.is_floating_point()
        if spec.kind is _INPUT.PARAMETER and is_trained:
            # One object is one parameter, under any number of names. Two objects that share memory
            # are two: torch's optimizers step each of them.
            if id(tensor) not in self._parameters:
                self._parameters[id(tensor)] = self._state(name, tensor, InputKind.PARAMETER)
            return self._parameters[id(tensor)]
        if name in self._states:
            return self._state(name, tensor, InputKind.STATE)
        self._read.append((name, tensor, False))
        with self.builder.at(f"tensor {name}"):
            return self.builder.parameter(name, array_of(tensor))

    def _state(self, name: str, tensor: Any, kind: InputKind) -> SymbolicTensor:
        self._read.append((name, tensor, True))
        self.values[name] = array_of(tensor)
        with self.builder.at(f"tensor {name}"):
            return self.builder.input(name, tuple(tensor.shape), data_type_of(tensor.dtype), kind)

    def _attribute(self, target: str) -> Any:
        value = attrgetter(target)(self.program.graph_module)
        if not isinstance(value, torch.Tensor):
            return value
        return self.builder.parameter(target, array_of(value))

    def _declare(self, outputs: Any) -> None:
        specs = self.program.graph_signature.output_specs
        results = [s for s in specs if s.kind is _OUTPUT.USER_OUTPUT]
        number = 0
        for spec, value in zip(specs, outputs, strict=True):
            if spec.kind is _OUTPUT.BUFFER_MUTATION:
                if self._outputs_changes:
                    self.builder.output(spec.target, value)
            elif spec.kind is not _OUTPUT.USER_OUTPUT:
                raise CompileError(
                    f"the module writes to its input {spec.target}",
                    where=self.title,
                    remedy="return the new value instead",
                )
            elif isinstance(value, SymbolicTensor):
                name = "output" if len(results) == 1 else f"output_{number}"
                self.builder.output(name, value)
                number += 1
        if not number:
            raise CompileError("the module returns no tensor", where=self.title)


def _refuse_overlaps(read: list[tuple[str, Any, bool]], title: str) -> None:
    """Raise `CompileError` if two tensors share memory and a step changes one of them: in torch
    the other would change too."""
    spans = sorted(
        ((t.data_ptr(), _last_byte(t), n, t, c) for n, t, c in read if t.numel()),
        key=lambda span: span[0],
    )
    for i, (_, end, name, tensor, changes) in enumerate(spans):
        for start, _, other, second, second_changes in spans[i + 1 :]:
            if start > end:
                break
            if (changes or second_changes) and _share_memory(tensor, second):
                raise CompileError(
                    f"{name!r} and {other!r} share memory, and training changes them",
                    where=title,
                    expected="tensors that do not share memory, or one parameter under both names",
                    remedy="use one nn.Parameter under both names (module.b = module.a, transposed "
                    "at its use), or clone one of the two",
                )


def _last_byte(tensor: Any) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return int(tensor.data_ptr()) + int(last + 1) * int(tensor.element_size()) - 1


def _share_memory(first: Any, second: Any) -> bool:
    """Whether two tensors share a byte; true if NumPy does not find out within its limit."""
    # NumPy's type stubs lack max_work.
    decide: Any = np.shares_memory
    arrays = [array_on(tensor) for tensor in (first, second)]
    try:
        return bool(decide(*arrays, max_work=MAX_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True
