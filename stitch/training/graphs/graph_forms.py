"""A graph in other forms: inside another builder, in another precision, and as it predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.ops import onnx_code
from stitch.program import ABSENT, Array, Body, Constant, DataType, InputKind, Operation, Program

#: Attributes that hold ONNX's number of a data type.
_TYPE_ATTRIBUTES = ("to", "dtype")
#: Inputs whose values a training keeps.
KEPT_KINDS = (InputKind.PARAMETER, InputKind.STATE)


def splice(
    builder: ComputationGraphBuilder,
    graph: ComputationGraph,
    inputs: Mapping[str, SymbolicTensor],
    cast: tuple[DataType, DataType] | None = None,
) -> dict[str, SymbolicTensor]:
    """Write a graph's operations into a builder; gives its outputs by name.

    `inputs` holds a tensor of the builder for every input. `cast` puts the second data type in
    place of the first, in constants and in attributes. Raises `CompileError` where types disagree.
    """
    values = {slot.value: inputs[slot.name] for slot in graph.inputs}
    for constant in graph.constants:
        name, data = graph.values[constant.value].name, _converted(constant.data, cast)
        tensor = builder.parameter(name, data) if data.size > 1 else builder.constant(data)
        values[constant.value] = tensor
    now = builder.bodies.add_all([_retyped_body(body, cast) for body in graph.bodies])
    for operation in graph.operations:
        operands = [None if v == ABSENT else values[v] for v in operation.inputs]
        present = [v for v in operation.outputs if v != ABSENT]
        with builder.at(operation.location):
            if operation.body != ABSENT:
                body = builder.bodies.bodies[now[operation.body]]
                given = [operand for operand in operands if operand is not None]
                results: Sequence[Any] = builder.carry(
                    operation.op, operation.domain, body, given, operation.attributes
                )
                values.update(zip(operation.outputs, results, strict=True))
                continue
            results = builder.repeat(
                _retyped(operation, cast),
                operands,
                [graph.values[v].name for v in present],
                [graph.values[v].type for v in present],
            )
        values.update(zip(present, results, strict=True))
    return {slot.name: values[slot.value] for slot in graph.outputs}


def in_precision(graph: ComputationGraph, data_type: DataType) -> ComputationGraph:
    """The graph with another floating type in place of float32 throughout; placement options stay.

    Raises `CompileError` where an operator does not take the type.
    """
    cast = (DataType.FLOAT32, data_type)
    builder = ComputationGraphBuilder(graph.name)
    inputs = {}
    for i, slot in enumerate(graph.inputs):
        kind = graph.input_type(i)
        chosen = data_type if kind.data_type is cast[0] else kind.data_type
        inputs[slot.name] = builder.input(slot.name, kind.shape, chosen, slot.kind, slot.ownership)
    spliced = splice(builder, graph, inputs, cast)
    for output in graph.outputs:
        builder.output(output.name, spliced[output.name], aliases_input=output.aliases_input)
    builder.place(*graph.placement)
    return builder.build()


def _converted(data: Array, cast: tuple[DataType, DataType] | None) -> Array:
    if cast is None or data.dtype != cast[0].dtype:
        return data
    return data.astype(cast[1].dtype)


def _retyped_body(body: Body, cast: tuple[DataType, DataType] | None) -> Body:
    if cast is None:
        return body
    return replace(
        body,
        values=tuple(
            replace(value, type=replace(value.type, data_type=cast[1]))
            if value.type.data_type is cast[0]
            else value
            for value in body.values
        ),
        operations=tuple(_retyped(operation, cast) for operation in body.operations),
        constants=tuple(replace(c, data=_converted(c.data, cast)) for c in body.constants),
    )


def _retyped(operation: Operation, cast: tuple[DataType, DataType] | None) -> Operation:
    if cast is None:
        return operation
    before, after = onnx_code(cast[0]), onnx_code(cast[1])
    changed = {name: after for name in _TYPE_ATTRIBUTES if operation.attributes.get(name) == before}
    return replace(operation, attributes={**operation.attributes, **changed})


def evaluation_form(graph: ComputationGraph) -> ComputationGraph:
    """The graph with BatchNormalization out of training mode, and without next values of state."""
    state = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    return replace(
        graph,
        name=f"{graph.name}_evaluation",
        outputs=tuple(slot for slot in graph.outputs if slot.name not in state),
        operations=tuple(map(_evaluating, graph.operations)),
        placement=tuple(w for w in graph.placement if w.side == "input"),
    )


def _evaluating(operation: Operation) -> Operation:
    if operation.domain or operation.op != "BatchNormalization":
        return operation
    if not operation.attributes.get("training_mode"):
        return operation
    attributes = {**operation.attributes, "training_mode": 0}
    return replace(operation, outputs=operation.outputs[:1], attributes=attributes)


def graph_of(program: Program) -> ComputationGraph:
    """The graph that a program was before it was placed."""
    return ComputationGraph(
        program.name,
        program.inputs,
        tuple(replace(slot, aliases_input=None) for slot in program.outputs),
        tuple(replace(value, layout=None) for value in program.values),
        program.operations,
        program.constants,
        bodies=program.bodies,
    )


def with_weights(graph: ComputationGraph, values: Mapping[str, Array]) -> ComputationGraph:
    """The graph with parameters and buffers as constants, in the types that it computes in."""
    fixed = tuple(
        Constant(slot.value, values[slot.name].astype(graph.input_type(i).data_type.dtype))
        for i, slot in enumerate(graph.inputs)
        if slot.kind in KEPT_KINDS
    )
    inputs = tuple(slot for slot in graph.inputs if slot.kind not in KEPT_KINDS)
    return replace(graph, inputs=inputs, constants=(*graph.constants, *fixed))
