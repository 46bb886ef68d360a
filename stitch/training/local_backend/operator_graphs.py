"""The graphs of tasks: an operator alone, its gradient rule, and sums of gradients.

Comes in: one operation of a graph, and which of its slots gradients flow through. Goes out: small
graphs whose slots are called after the operator's: `input0`, `output0`, `input0.grad`. Operands
that are constants are part of them. Must not know: tasks, other operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stitch.compiler import differentiate
from stitch.graph import ComputationGraph, ComputationGraphBuilder, Wish
from stitch.linker import drop_unused_values
from stitch.program import (
    ABSENT,
    Constant,
    InputKind,
    InputSlot,
    OutputSlot,
    Ownership,
    Value,
    ValueType,
)
from stitch.training.graphs import splice
from stitch.training.local_backend.task_binding import gradient_name


def input_slot(position: int) -> str:
    """What an operand's slot is called."""
    return f"input{position}"


def output_slot(position: int) -> str:
    """What a result's slot is called."""
    return f"output{position}"


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Operands that are one tensor: their gradients go into one slot, after what `adds` up."""

    positions: tuple[int, ...]
    adds: bool

    @property
    def name(self) -> str:
        """The slot of the sum: that of the first operand's gradient."""
        return gradient_name(input_slot(self.positions[0]))


def operator_graph(
    graph: ComputationGraph, index: int, kinds: Mapping[int, InputKind]
) -> ComputationGraph:
    """One operation as a graph: every operand a slot of its own, but for constants.

    `kinds`: what values are that are inputs of the graph.
    """
    operation, data = graph.operations[index], graph.constant_data()
    values: list[Value] = []
    inputs, outputs, constants, operands, results = [], [], [], [], []
    for i, v in enumerate(operation.inputs):
        operands.append(ABSENT if v == ABSENT else len(values))
        if v == ABSENT:
            continue
        if v in data:
            constants.append(Constant(len(values), data[v]))
        else:
            kind = kinds.get(v, InputKind.ACTIVATION)
            inputs.append(InputSlot(input_slot(i), len(values), kind))
        values.append(Value(input_slot(i), graph.values[v].type))
    for i, v in enumerate(operation.outputs):
        results.append(ABSENT if v == ABSENT else len(values))
        if v != ABSENT:
            outputs.append(OutputSlot(output_slot(i), len(values)))
            values.append(Value(output_slot(i), graph.values[v].type))
    alone = replace(operation, inputs=tuple(operands), outputs=tuple(results))
    return drop_unused_values(ComputationGraph(
        operation.op, tuple(inputs), tuple(outputs), tuple(values), (alone,), tuple(constants),
        bodies=graph.bodies,
    ))  # fmt: skip


def gradient_graph(
    operator: ComputationGraph, wanted: Sequence[int], flowing: Sequence[int]
) -> tuple[ComputationGraph, tuple[int, ...]]:
    """An operator's gradient rule: from the gradients of the outputs `flowing`, those of `wanted`
    operands; and to which of them something flows back."""
    rule = differentiate(
        operator,
        [input_slot(i) for i in wanted],
        outputs=[output_slot(i) for i in flowing],
        zeros=False,
    )
    reached = {name for name, _ in rule.gradients}
    return rule.backward, tuple(i for i in wanted if input_slot(i) in reached)


def summing_graph(rule: ComputationGraph, sums: Sequence[GradientSum]) -> ComputationGraph:
    """The rule with its results added to the gradients so far, in the order of the operands.

    A slot that adds is read, and its sum takes its buffer.
    """
    b = ComputationGraphBuilder(rule.name)
    given = {
        slot.name: b.input(slot.name, kind.shape, kind.data_type, slot.kind)
        for i, slot in enumerate(rule.inputs)
        for kind in (rule.input_type(i),)
    }
    kinds = {slot.name: rule.output_type(i) for i, slot in enumerate(rule.outputs)}
    so_far = {
        total.name: b.input(
            total.name, kinds[total.name].shape, kinds[total.name].data_type, InputKind.STATE,
            Ownership.DONATE,
        )
        for total in sums if total.adds
    }  # fmt: skip
    parts = splice(b, rule, given)
    for total in sums:
        first, *rest = [parts[gradient_name(input_slot(i))] for i in total.positions]
        value = so_far[total.name] + first if total.adds else first
        for part in rest:
            value = value + part
        b.output(total.name, value)
        if total.adds and not rest:
            b.wish(Wish("output", total.name, "alias", total.name))
    return b.build()


def zero_gradient(kind: ValueType) -> ComputationGraph:
    """The gradient of a weight that nothing depends on."""
    b = ComputationGraphBuilder("zeros")
    zero = b.constant(kind.data_type.dtype.type(0))
    b.output(gradient_name(input_slot(0)), b.op("Expand", zero, list(kind.shape)))
    return b.build()


def graph_key(graph: ComputationGraph) -> object:
    """Equal for graphs that differ in names of values and in lines of the user's alone."""
    return (
        graph.inputs,
        graph.outputs,
        tuple([value.type for value in graph.values]),
        tuple([
            (o.op, o.domain, o.opset, o.inputs, o.outputs, tuple(sorted(o.attributes.items())),
             o.body)
            for o in graph.operations
        ]),
        tuple([(c.value, c.data.dtype.str, c.data.tobytes()) for c in graph.constants]),
        tuple([body.meaning for body in graph.bodies]),
    )  # fmt: skip
