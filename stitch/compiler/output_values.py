"""Output values: each output gets a value of its own, made by an operation, read as it is written.

An output that is an input, a constant, or the same value as another output becomes an `Identity`
of it. So does an output whose storage rounds (float32 kept as bf16) while other operations read the
value: they go on reading it unrounded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from stitch.graph import ComputationGraph
from stitch.program import FreeNames, Operation, OutputSlot, Value


def give_outputs_their_values(
    graph: ComputationGraph, rounded: Collection[int] = ()
) -> ComputationGraph:
    """The graph with an `Identity` before each output that needs one.

    `rounded` holds the indices of outputs whose storage type differs from their logical type.
    """
    produced = {v for operation in graph.operations for v in operation.outputs}
    read = {v for operation in graph.operations for v in operation.inputs}
    # The value itself goes to the output that nothing rounds; a rounded one would spoil it.
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


def give_unique_names(values: Sequence[Value]) -> tuple[Value, ...]:
    """The values with names that are neither empty nor taken by an earlier value."""
    # A name that a value has from the start is never given to another.
    own = {value.name: index for index, value in reversed(list(enumerate(values)))}
    names = FreeNames(own)
    return tuple([
        value
        if value.name and own[value.name] == index
        else replace(value, name=names.free(value.name or f"v{index}"))
        for index, value in enumerate(values)
    ])  # fmt: skip
