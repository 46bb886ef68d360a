"""Bodies as graphs, optimised and differentiated as any graph is, and graphs written into
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stitch.compiler.output_values import give_outputs_their_values
from stitch.graph import ComputationGraph, LayerMethods, SymbolicTensor
from stitch.program import ABSENT, Body, BodyPool, InputSlot, Operation, OutputSlot, Value


def operand_name(index: int) -> str:
    """What the graph of a body calls an input."""
    return f"operand_{index}"


def result_name(index: int) -> str:
    """What the graph of a body calls an output."""
    return f"result_{index}"


def graph_of_body(name: str, body: Body, bodies: Sequence[Body]) -> ComputationGraph:
    """A body as a graph; operands are all there."""
    return ComputationGraph(
        name,
        tuple(InputSlot(operand_name(i), v) for i, v in enumerate(body.inputs)),
        tuple(OutputSlot(result_name(i), v) for i, v in enumerate(body.outputs)),
        body.values,
        body.operations,
        body.constants,
        bodies=tuple(bodies),
    )


def body_of_graph(graph: ComputationGraph, pool: BodyPool) -> Body:
    """A graph as a body, beside those of a pool, which takes the bodies that it needs."""
    graph = give_outputs_their_values(graph)
    now = pool.add_all(graph.bodies, [o.body for o in graph.operations])
    return Body(
        tuple(slot.value for slot in graph.inputs),
        tuple(slot.value for slot in graph.outputs),
        graph.values,
        tuple(replace(o, body=now[o.body]) for o in graph.operations),
        graph.constants,
    )


def write_graph(
    builder: LayerMethods, graph: ComputationGraph, given: Mapping[str, SymbolicTensor]
) -> dict[str, SymbolicTensor]:
    """The outputs of a graph by name, written into a builder; `given` are the inputs that it reads,
    by theirs."""
    at = {slot.value: given[slot.name] for slot in graph.inputs if slot.name in given}
    for constant in graph.constants:
        name, data = graph.values[constant.value].name, constant.data
        known = data.size <= 1
        at[constant.value] = builder.constant(data) if known else builder.parameter(name, data)
    for operation in graph.operations:
        operands = [None if v == ABSENT else at[v] for v in operation.inputs]
        at |= write_operation(builder, operation, operands, graph.values, graph.bodies)
    return {slot.name: at[slot.value] for slot in graph.outputs if slot.value in at}


def write_operation(
    builder: LayerMethods,
    operation: Operation,
    operands: Sequence[SymbolicTensor | None],
    values: Sequence[Value],
    bodies: Sequence[Body],
) -> dict[int, SymbolicTensor]:
    """The results of an operation on other operands, by the value that each was; `values` and
    `bodies` are those of the graph that it comes from."""
    outputs = operation.outputs
    with builder.at(operation.location):
        if operation.body == ABSENT:
            while outputs[-1] == ABSENT:
                outputs = outputs[:-1]
            names = [operation.op.lower() if v == ABSENT else values[v].name for v in outputs]
            types = [None if v == ABSENT else values[v].type for v in outputs]
            made = builder.repeat(operation, operands, names, types)
        else:
            now = builder.bodies.add_all(bodies, [operation.body])
            body = builder.bodies.bodies[now[operation.body]]
            present = [operand for operand in operands if operand is not None]
            made = builder.carry(
                operation.op, operation.domain, body, present, operation.attributes
            )
    return {v: tensor for v, tensor in zip(outputs, made, strict=True) if v != ABSENT}
