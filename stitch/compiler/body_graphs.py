"""Conversion between bodies and graphs, and writing graphs into builders."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stitch.graph import ComputationGraph, ComputationGraphBuilder, LayerMethods, SymbolicTensor
from stitch.program import (
    ABSENT,
    Body,
    BodyPool,
    FreeNames,
    InputSlot,
    Operation,
    OutputSlot,
    Value,
)


def add_output_identities(
    graph: ComputationGraph, rounded: Collection[int] = ()
) -> ComputationGraph:
    """Insert an `Identity` so that each output is a value of its own, computed by an operation.

    Args:
        graph: The graph.
        rounded: Indices of outputs whose storage type differs from their logical type.
    """
    produced = {v for operation in graph.operations for v in operation.outputs}
    read = {v for operation in graph.operations for v in operation.inputs}
    # A shared value goes to an output that is not rounded; rounding would change the other reads.
    shared = {slot.value for i, slot in enumerate(graph.outputs) if i not in rounded}
    values, operations = list(graph.values), list(graph.operations)
    outputs: list[OutputSlot] = []
    taken: set[int] = set()
    for i, slot in enumerate(graph.outputs):
        spoils = i in rounded and (slot.value in read or slot.value in shared)
        if slot.value in produced and slot.value not in taken and not spoils:
            taken.add(slot.value)
            outputs.append(slot)
            continue
        fresh = len(values)
        values.append(Value(slot.name, graph.values[slot.value].type))
        location = f"output {slot.name}"
        operations.append(Operation("Identity", (slot.value,), (fresh,), location=location))
        outputs.append(replace(slot, value=fresh))
    return replace(
        graph, values=tuple(values), operations=tuple(operations), outputs=tuple(outputs)
    )


def program_names(graph: ComputationGraph | Body) -> list[str]:
    """Return the names of a graph's values in its program: none is empty or used twice.

    Of values of one name the first one keeps it. Values that the graph has numbered are numbered
    anew by the operations that are left: programs of equal operations have equal names, whatever
    was left out or folded before them.
    """
    values = graph.values
    bases = dict.fromkeys((constant.value for constant in graph.constants), "constant")
    for v in (v for operation in graph.operations for v in operation.outputs if v != ABSENT):
        bases[v] = _NUMBER.sub("", values[v].name)
    bases = {v: base for v, base in bases.items() if values[v].is_numbered and base}
    # Names that exist already are never given to another value.
    own = {v.name: i for i, v in reversed(list(enumerate(values))) if i not in bases}
    free = FreeNames(own)
    names = [
        value.name
        if index in bases or (value.name and own[value.name] == index)
        else free.free(value.name or f"v{index}")
        for index, value in enumerate(values)
    ]
    numbered = FreeNames((name for i, name in enumerate(names) if i not in bases), "_", 1)
    for index, base in bases.items():
        names[index] = numbered.free(base)
    return names


def named_values(graph: ComputationGraph | Body) -> tuple[Value, ...]:
    """Return the values of a graph, before placement, with their names in its program."""
    named = zip(graph.values, program_names(graph), strict=True)
    return tuple([Value(name, value.type) for value, name in named])


#: What a graph appends to a name.
_NUMBER = re.compile(r"_\d+$")


def operand_name(index: int) -> str:
    """Return the name of an input in the graph of a body."""
    return f"operand_{index}"


def result_name(index: int) -> str:
    """Return the name of an output in the graph of a body."""
    return f"result_{index}"


def graph_of_body(name: str, body: Body, bodies: Sequence[Body]) -> ComputationGraph:
    """Convert a body, all of whose operands are present, to a graph."""
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
    """Convert a graph to a body; bodies that it uses are added to the pool."""
    graph = add_output_identities(graph)
    now = pool.add_all(graph.bodies, [o.body for o in graph.operations])
    return replace(graph.as_body(), operations=remap_bodies(graph.operations, now))


def write_graph(
    builder: LayerMethods, graph: ComputationGraph, given: Mapping[str, SymbolicTensor]
) -> dict[str, SymbolicTensor]:
    """Write a graph to a builder; return its outputs by name.

    `given` maps input names to tensors; unused inputs may be missing.
    """
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
    """Write an operation with other operands; return its results by their value in `values`."""
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


def rewrite_graph(
    graph: ComputationGraph, builder: ComputationGraphBuilder,
    results_of: Callable[[Sequence[Any]], Sequence[Any]],
) -> ComputationGraph:  # fmt: skip
    """Return a graph with the slots of `graph` whose outputs `results_of` computes from inputs."""
    given = [
        builder.input(
            slot.name, graph.input_type(i).shape, graph.input_type(i).data_type, slot.kind,
            slot.ownership,
        )
        for i, slot in enumerate(graph.inputs)
    ]  # fmt: skip
    for slot, result in zip(graph.outputs, results_of(given), strict=True):
        builder.output(slot.name, result, aliases_input=slot.aliases_input)
    builder.place(*graph.placement)
    return builder.build()


def remap_bodies(operations: Sequence[Operation], now: Mapping[int, int]) -> tuple[Operation, ...]:
    """Replace the body numbers of operations."""
    return tuple(o if o.body == ABSENT else replace(o, body=now[o.body]) for o in operations)
