"""Inputs and outputs that are sequences or optional values, as a fixed number of tensors.

Comes in: the declared inputs of a graph and the examples given for them. Goes out: inputs that are
all tensors (an input `x` of three has `x[0]`, `x[1]` and `x[2]`), and what the names of the model
then stand for. An example decides how long a sequence is, and whether an optional value is there.
Must not know: what the graph computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import onnx

from stitch.errors import CompileError
from stitch.frontend.onnx.inputs.input_binding import Examples
from stitch.frontend.onnx.values import NOTHING, Given, TensorList
from stitch.graph import SymbolicTensor

#: For each input that is no plain tensor: the names of its tensors; None where it is left out.
Structures = Mapping[str, tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """A graph's inputs as tensors: `graph` has the fields that binding asks of a `GraphProto`."""

    graph: Any
    examples: Examples
    structures: Structures = field(default_factory=dict)

    def value(self, name: str, tensors: Mapping[str, SymbolicTensor]) -> Given:
        """What an input that is no plain tensor stands for."""
        names = self.structures[name]
        return NOTHING if names is None else TensorList(tuple(tensors[one] for one in names))


def flat_inputs(graph: Any, examples: Examples) -> FlatInputs:
    """All inputs as tensors, as the examples have them; a graph of plain tensors stays as it is.

    A structure without an example stays too: binding refuses it by name.
    """
    if all(info.type.WhichOneof("value") == "tensor_type" for info in graph.input):
        return FlatInputs(graph, examples)
    defaults = {tensor.name for tensor in graph.initializer}
    infos = [info for info in graph.input if info.name not in defaults]
    if isinstance(examples, Mapping):
        given = dict(examples)
    elif len(examples) == len(infos):
        given = {info.name: value for info, value in zip(infos, examples, strict=True)}
    else:
        return FlatInputs(graph, examples)
    structures: dict[str, tuple[str, ...] | None] = {}
    inputs: list[Any] = []
    for info in graph.input:
        kind = info.type
        if kind.WhichOneof("value") == "optional_type" and info.name in given:
            kind = kind.optional_type.elem_type
            if given[info.name] is None:
                structures[info.name] = None
                del given[info.name]
                continue
        inputs += _tensors(info, kind, given, structures)
    flat = SimpleNamespace(
        input=inputs, initializer=graph.initializer, sparse_initializer=graph.sparse_initializer
    )
    return FlatInputs(flat, given, structures)


def _tensors(
    info: Any, kind: Any, given: dict[str, Any], structures: dict[str, tuple[str, ...] | None]
) -> list[Any]:
    """The tensors of one input; their examples take the place of its own."""
    example = given.get(info.name)
    form = kind.WhichOneof("value")
    if form == "tensor_type":
        return [onnx.ValueInfoProto(name=info.name, type=kind)]
    element = kind.sequence_type.elem_type if form == "sequence_type" else None
    listed = isinstance(example, Sequence) and not isinstance(example, str | bytes)
    if element is None or element.WhichOneof("value") != "tensor_type" or not listed:
        return [info]
    elements = []
    for index, value in enumerate(given.pop(info.name)):
        one = onnx.ValueInfoProto(name=f"{info.name}[{index}]")
        # Elements may differ in shape, so the declared one says nothing.
        one.type.tensor_type.elem_type = element.tensor_type.elem_type
        given[one.name] = value
        elements.append(one)
    structures[info.name] = tuple(one.name for one in elements)
    return elements


def flat_output(name: str, value: Given, where: str) -> list[tuple[str, SymbolicTensor]]:
    """The tensors of an output: itself, or `name[0]`, `name[1]`, ... of a sequence."""
    if isinstance(value, SymbolicTensor):
        return [(name, value)]
    if isinstance(value, TensorList):
        return [(f"{name}[{index}]", item) for index, item in enumerate(value.items)]
    raise CompileError("an output is an empty optional value, which no tensor stands for",
                       where=where)  # fmt: skip
