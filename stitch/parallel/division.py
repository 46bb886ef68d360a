"""Divide a computation graph: the parallel graph of a plan, and the device of each shard.

With r replicas a step computes r micro-batches side by side: values of the batch are r times as
long along axis 0, and divided there; parameters are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from stitch.compiler import node_ends
from stitch.errors import UsageError
from stitch.graph import ComputationGraph
from stitch.parallel.parallel_graph import ParallelComputationGraph, ParallelShape
from stitch.parallel.plans import Plan
from stitch.program import ABSENT, InputKind, Operation, Space, Value, ValueType
from stitch.training import home_space


class TensorPlacement(NamedTuple):
    """Where a value of a parallel graph is: the device of each shard, and the memory space."""

    devices: tuple[str, ...]
    space: Space


#: The placement of each value by name.
TensorMapping = Mapping[str, TensorPlacement]


def can_replicate(graph: ComputationGraph) -> bool:
    """Return whether micro-batches can be laid side by side along axis 0.

    A value of the batch without axes, an output that is no value of the batch, and a state that
    forward replaces prevent it.
    """
    batch = _of_batch(graph)
    return all(graph.values[v].type.shape for v in batch) and all(
        slot.value in batch and slot.name not in {s.name for s in graph.inputs}
        for slot in graph.outputs
    )


def _of_batch(graph: ComputationGraph) -> set[int]:
    """Return the values that depend on an input of the batch or on a key."""
    kinds = (InputKind.ACTIVATION, InputKind.KEY)
    found = {slot.value for slot in graph.inputs if slot.kind in kinds}
    for operation in graph.operations:
        if found.intersection(operation.inputs):
            found.update(v for v in operation.outputs if v != ABSENT)
    return found


def replicated(
    graph: ComputationGraph | ParallelComputationGraph, replicas: int
) -> ParallelComputationGraph:
    """Return the parallel graph of so many replicas, each of a micro-batch of `graph`.

    Raises:
        UsageError: The micro-batches of the graph cannot be laid side by side.
    """
    if isinstance(graph, ComputationGraph):
        graph = ParallelComputationGraph.whole(graph)
    pcg, graph = graph, graph.graph
    if replicas == 1:
        return pcg
    if replicas < 1 or not can_replicate(graph):
        raise UsageError(
            f"graph {graph.name!r} has no {replicas} replicas", got="a value of the batch without "
            "an axis, an output that is none, or a state that forward replaces"
            if replicas > 0 else str(replicas), remedy="replicas=1",
        )  # fmt: skip
    return _Replicas(pcg, replicas).build()


class _Replicas:
    """The parallel graph under construction."""

    def __init__(self, pcg: ParallelComputationGraph, replicas: int) -> None:
        self.pcg, self.graph, self.replicas = pcg, pcg.graph, replicas
        graph = self.graph
        self.batch = _of_batch(graph)
        kept = {slot.value for slot in graph.inputs} - self.batch
        #: Values that depend on parameters alone: equal in all replicas.
        self.copied = set(kept)
        for operation in graph.operations:
            made = set(operation.outputs) - {ABSENT}
            if set(operation.inputs) & self.copied and not made & self.batch:
                self.copied |= made
        self.values = list(graph.values)
        self.names = {value.name for value in graph.values}
        self.shapes = [self._shape(i) for i in range(len(graph.values))]

    def _shape(self, index: int) -> ParallelShape:
        shape, replicas = self.pcg.shapes[index], self.replicas
        if index in self.batch:
            size, *rest = shape.type.shape
            side_by_side = ValueType((size * replicas, *rest), shape.type.data_type)
            first, *others = shape.degrees
            return replace(shape, type=side_by_side, degrees=(first * replicas, *others))
        copies = replicas if index in self.copied else 1
        return replace(shape, copy_degree=shape.copy_degree * copies)

    def _whole(self, index: int, name: str) -> int:
        """Add a whole value of the type of a divided one."""
        kind = self.shapes[index].type
        self.values.append(Value(name, kind))
        self.shapes.append(ParallelShape.whole(kind))
        return len(self.values) - 1

    def _rename(self, index: int) -> None:
        """Give a divided value a name of its own, as the whole one has its name."""
        name = f"{self.values[index].name}.shards"
        while name in self.names:
            name += "_"
        self.names.add(name)
        self.values[index] = replace(self.values[index], name=name)

    def build(self) -> ParallelComputationGraph:
        graph, degree = self.graph, self.replicas
        inputs, outputs = [], []
        before: list[Operation] = []
        after: list[Operation] = []
        axis = {"axis": 0, "degree": degree}
        for slot in graph.inputs:
            divided, name = slot.value, graph.values[slot.value].name
            whole = self._whole(divided, name)
            self._rename(divided)
            is_batch = divided in self.batch
            op, words = ("Repartition", axis) if is_batch else ("Replicate", {"degree": degree})
            before.append(Operation(op, (whole,), (divided,), words, "stitch"))
            inputs.append(replace(slot, value=whole))
        for output in graph.outputs:
            divided, name = output.value, graph.values[output.value].name
            whole = self._whole(divided, name)
            self._rename(divided)
            after.append(Operation("Combine", (divided,), (whole,), axis, "stitch"))
            outputs.append(replace(output, value=whole, aliases_input=None))
        values = [replace(v, type=s.type) for v, s in zip(self.values, self.shapes, strict=True)]
        divided_graph = replace(
            graph, inputs=tuple(inputs), outputs=tuple(outputs), values=tuple(values),
            operations=(*before, *graph.operations, *after),
        )  # fmt: skip
        return ParallelComputationGraph(divided_graph, tuple(self.shapes), degree)


def tensor_mapping(pcg: ParallelComputationGraph, plan: Plan) -> TensorMapping:
    """Return the placement of each value of a plan's parallel graph.

    A value of one shard is on the first replica's device. Parameters are where they are read first.
    """
    graph, costs = pcg.graph, plan.costs
    if plan.degree > 1:
        machine = costs.specification.devices[plan.order[0]].machine
        return {
            value.name: TensorPlacement(
                # A whole value is on the first device of each replica.
                plan.devices(0) if shape.count == plan.replicas else plan.order[: shape.count],
                costs.spaces.get(value.name, home_space(machine)),
            )
            for value, shape in zip(graph.values, pcg.shapes, strict=True)
        }
    ends = node_ends(costs.graph)
    borders = [ends[name] for name in plan.cuts]
    stages: dict[int, int] = {}
    for at, operation in enumerate(costs.graph.operations):
        stage = sum(at >= border for border in borders)
        for v in operation.inputs:
            if v != ABSENT:  # Inputs and constants: where they are read first.
                stages.setdefault(v, stage)
        stages |= dict.fromkeys([v for v in operation.outputs if v != ABSENT], stage)
    # Divided values have the numbers of the graph; whole ones that were added have its names.
    numbers = {value.name: i for i, value in enumerate(costs.graph.values)}
    mapping = {}
    for i, (value, shape) in enumerate(zip(graph.values, pcg.shapes, strict=True)):
        original = i if i < len(costs.graph.values) else numbers[value.name]
        devices = plan.devices(stages.get(original, 0))
        if shape.count == 1:
            devices = devices[:1]
        machine = costs.specification.devices[devices[0]].machine
        name = costs.graph.values[original].name
        space = costs.spaces.get(name, home_space(machine))
        mapping[value.name] = TensorPlacement(devices, space)
    return mapping
