"""PyTorch modules for training: parameters and buffers become inputs, with the values they have.

Importing this module needs the package torch (an optional extra).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import array_of, check_dense, data_type_of
from stitch.frontend.torch.aten_walk import lower_graph
from stitch.frontend.torch.export import Examples, exported
from stitch.frontend.torch.lowering import KEY_NAME, give_key
from stitch.frontend.torch.tensor_bytes import array_on
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType, InputKind

_INPUT = torch.export.graph_signature.InputKind
_OUTPUT = torch.export.graph_signature.OutputKind
#: Steps in which NumPy has to decide whether two arrays share a byte.
MAX_OVERLAP_WORK = 100_000


def from_torch_for_training(
    module: Any, example_inputs: Examples = (), name: str | None = None
) -> tuple[ComputationGraph, dict[str, Array], ComputationGraph]:
    """The graph of a torch module, the values of its PARAMETER and STATE inputs by name (on torch's
    own bytes where that is possible), and the graph of the same module in evaluation mode.

    Names are those of the module's state dict; tied parameters are one input. Raises `CompileError`
    with every unsupported operator and its source line.
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
    """The graph of a torch module in evaluation mode; `states`: the buffers that training changes,
    which are inputs of it. What evaluation would write to buffers is left out. Raises as
    `from_torch_for_training`."""
    title = name or type(module).__name__
    with _evaluating(module):
        twin = _Capture(module, example_inputs, f"{title}_evaluation", states)
    return twin.graph_and_values()[0]


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """The module in evaluation mode, each part put back afterwards; a captured one stays."""
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
    """One module on its way into a builder."""

    def __init__(
        self, module: Any, examples: Examples, title: str, states: Set[str] | None = None
    ) -> None:
        """`states`: the buffers that are inputs, and nothing else of a buffer's is an output;
        None: those that the forward pass changes, and their next values."""
        self.title = title
        self.program = exported(module, examples).program
        self.builder = ComputationGraphBuilder(title)
        self.values: dict[str, Array] = {}
        self.has_key = give_key(self.program.graph)
        signature = self.program.graph_signature
        #: Buffers that the forward pass changes.
        self.changed_buffers = frozenset(signature.buffers_to_mutate.values())
        self._keeps_changes = states is None
        self._states = self.changed_buffers if states is None else states
        #: By the id of torch's parameter, which the program holds.
        self._trained_once: dict[int, SymbolicTensor] = {}
        #: The tensors that were read: name, tensor, whether a step changes it.
        self._read: list[tuple[str, Any, bool]] = []

    def graph_and_values(self) -> tuple[ComputationGraph, dict[str, Array]]:
        nodes = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        bindings: dict[str, Callable[[], Any]] = {}
        if self.has_key:
            bindings[nodes.pop(0).name] = self._key
        specs = self.program.graph_signature.input_specs
        for spec, node in zip(specs, nodes, strict=True):
            bindings[node.name] = partial(self._once, spec, node, [])
        # Inputs in the order of the module's own, whichever is read first.
        for spec, node in zip(specs, nodes, strict=True):
            if spec.kind is _INPUT.USER_INPUT and node.users:
                bindings[node.name]()
        outputs = lower_graph(
            self.program.graph, self.builder, bindings, self._attribute, self.title
        )
        _refuse_overlaps(self._read, self.title)
        self._declare(outputs)
        return self.builder.build(), self.values

    def _key(self) -> SymbolicTensor:
        return self.builder.input(KEY_NAME, (1,), DataType.INT64, InputKind.KEY)

    def _once(self, spec: Any, node: Any, values: list[Any]) -> Any:
        if not values:
            values.append(self._input(spec, node))
        return values[0]

    def _input(self, spec: Any, node: Any) -> Any:
        value = node.meta.get("val")
        if spec.kind is _INPUT.USER_INPUT:
            if not isinstance(value, torch.Tensor):
                return value
            with self.builder.at(f"input {node.name}"):
                return self.builder.input(node.name, tuple(value.shape), data_type_of(value.dtype))
        tensor = self.program.state_dict.get(spec.target)
        if tensor is None:
            tensor = self.program.constants.get(spec.target)
        if not isinstance(tensor, torch.Tensor):
            raise CompileError(f"the module passes {spec.target!r} into its graph, no tensor")
        return self._tensor(spec.target, tensor, spec.kind)

    def _tensor(self, name: str, tensor: Any, kind: Any) -> SymbolicTensor:
        check_dense(tensor, f"tensor {name!r} of the module")
        if kind is _INPUT.PARAMETER and tensor.requires_grad and tensor.is_floating_point():
            return self._trained(name, tensor)
        if name in self._states:
            return self._kept(name, tensor, InputKind.STATE)
        self._read.append((name, tensor, False))
        with self.builder.at(f"tensor {name}"):
            return self.builder.parameter(name, array_of(tensor))

    def _trained(self, name: str, tensor: Any) -> SymbolicTensor:
        """A parameter: one object is one parameter, under however many names.

        Two objects on the same bytes are two: torch's optimizers step each of them.
        """
        if id(tensor) not in self._trained_once:
            self._trained_once[id(tensor)] = self._kept(name, tensor, InputKind.PARAMETER)
        return self._trained_once[id(tensor)]

    def _kept(self, name: str, tensor: Any, kind: InputKind) -> SymbolicTensor:
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
                if self._keeps_changes:
                    self.builder.output(spec.target, value)
            elif spec.kind is not _OUTPUT.USER_OUTPUT:
                raise CompileError(
                    f"the module writes to what it is given: {spec.target}",
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
    """In torch a step that writes one tensor changes all that lie on its bytes; here they would
    go their own ways. Raises `CompileError`."""
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
                    f"{name!r} and {other!r} lie on the same bytes, and training changes them",
                    where=title,
                    expected="tensors apart, or one parameter under both names",
                    remedy="use one nn.Parameter in both places (module.b = module.a, transposed "
                    "where it is used), or clone one of the two",
                )


def _last_byte(tensor: Any) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return int(tensor.data_ptr()) + int(last + 1) * int(tensor.element_size()) - 1


def _share_memory(first: Any, second: Any) -> bool:
    """Whether two tensors whose spans overlap have a byte in common; in doubt they do."""
    # NumPy's own types know of no bound.
    decide: Any = np.shares_memory
    arrays = [array_on(tensor) for tensor in (first, second)]
    try:
        return bool(decide(*arrays, max_work=MAX_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True
