"""Lower a parallel graph to a placed task graph: a program for each device and turn.

Operators of a shard that run one after the other on a device are one program. Parallel operators
become values that travel, with `Slice` where a shard is divided and `Concat` or `Add` where shards
are joined. The device of a sum adds its parts in the order of the shards, whenever they arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stitch.compiler import compile_graph
from stitch.errors import UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.mesh import MachineSpecification
from stitch.ops import attributes_of
from stitch.parallel.division import TensorMapping
from stitch.parallel.parallel_graph import ParallelComputationGraph, is_parallel
from stitch.program import ABSENT, Operation, TensorDesc, host_layout
from stitch.tasks import Future, TaskGraph
from stitch.ttb import Binary

#: A shard of a value, by the value and the number of the shard.
Shard: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """An operation on a shard. Parallel operators keep their name: their operands are shards."""

    operation: Operation
    inputs: tuple[Shard | None, ...]
    outputs: tuple[Shard | None, ...]
    device: str
    #: Of `Repartition`: which part of its operand.
    number: int = 0


def lower(
    pcg: ParallelComputationGraph, mapping: TensorMapping, specification: MachineSpecification
) -> TaskGraph:
    """Return the task graph that computes a parallel graph on several devices.

    It has the inputs and outputs of the graph. Run it by `Mesh.prepare`.

    Args:
        mapping: The devices of the shards of each value that is computed, by name.

    Raises:
        UsageError: A value has no placement, another number of devices than shards, or an unknown
            device.
    """
    return _Lowering(pcg, mapping, specification).task_graph()


class _Lowering:
    def __init__(
        self, pcg: ParallelComputationGraph, mapping: TensorMapping,
        specification: MachineSpecification,
    ) -> None:  # fmt: skip
        self.pcg, self.graph, self.specification = pcg, pcg.graph, specification
        self.constants = {c.value: c.data for c in pcg.graph.constants}
        self.devices = {
            v: self._devices(v, mapping) for o in pcg.graph.operations for v in o.outputs
            if v != ABSENT
        }  # fmt: skip
        #: The shard that an equal copy stands for.
        self.same: dict[Shard, Shard] = {}
        self.parts = self._read_parts()

    def _devices(self, value: int, mapping: TensorMapping) -> Sequence[str]:
        name, count = self.graph.values[value].name, self.pcg.shapes[value].count
        placement = mapping.get(name)
        if placement is None or len(placement.devices) != count:
            raise UsageError(
                f"value {name!r} of parallel graph {self.graph.name!r} is not placed",
                expected=f"{count} devices",
                got="none" if placement is None else ", ".join(placement.devices),
            )
        for device in placement.devices:
            self.specification.entry(device)
        return placement.devices

    def _read_parts(self) -> list[Part]:
        """Return the operations of which an output depends on a result."""
        parts = list(self._parts())
        read = {self._shard(slot.value, 0) for slot in self.graph.outputs}
        kept = []
        for part in reversed(parts):
            if not read.isdisjoint(part.outputs):
                read.update(shard for shard in part.inputs if shard)
                kept.append(part)
        return kept[::-1]

    def _parts(self) -> Iterator[Part]:
        """Yield the operations on shards, in an order in which each follows its operands'."""
        home: dict[Shard, str] = {}
        for operation in self.graph.operations:
            count = max(self.pcg.shapes[v].count for v in operation.outputs if v != ABSENT)
            for i in range(count):
                for part in self._shard_parts(operation, i, home):
                    home |= {shard: part.device for shard in part.outputs if shard}
                    yield part

    def _shard_parts(
        self, operation: Operation, i: int, home: Mapping[Shard, str]
    ) -> Iterator[Part]:
        outputs = tuple([None if v == ABSENT else (v, i) for v in operation.outputs])
        device = self.devices[next(v for v in operation.outputs if v != ABSENT)][i]
        if not is_parallel(operation):
            inputs = [None if v == ABSENT else self._shard(v, i) for v in operation.inputs]
            yield Part(operation, tuple(inputs), outputs, device)
            return
        (source,), degree = operation.inputs, attributes_of(operation)["degree"]
        assert isinstance(degree, int)
        if operation.op == "Replicate" and self.pcg.shapes[source].count * degree == 1:
            # It may be an output, which is no input of a task graph.
            copy = Operation("Identity", operation.inputs, operation.outputs)
            yield Part(copy, (self._shard(source, 0),), outputs, device)
        elif operation.op == "Replicate":
            self.same[operation.outputs[0], i] = self._shard(source, i // degree)
        elif operation.op == "Repartition":
            whole = self._shard(source, i // degree)
            # Where the whole is, so that only the part travels.
            yield Part(operation, (whole,), outputs, home.get(whole, device), i % degree)
        else:
            joined = [self._shard(source, i * degree + k) for k in range(degree)]
            yield Part(operation, tuple(joined), outputs, device)

    def _shard(self, value: int, number: int) -> Shard:
        shard = value, number if self.pcg.shapes[value].count > 1 else 0
        return self.same.get(shard, shard)

    def _programs(self) -> Iterator[tuple[str, list[Part]]]:
        """Yield the operations of each program, in an order in which programs can run."""
        makers: dict[Shard, tuple[int, str]] = {}
        groups: dict[tuple[int, str], list[Part]] = {}
        for part in self.parts:
            before = [makers[shard] for shard in part.inputs if shard in makers]
            turn = max((t + (device != part.device) for t, device in before), default=0)
            groups.setdefault((turn, part.device), []).append(part)
            makers |= {shard: (turn, part.device) for shard in part.outputs if shard}
        for (_, device), parts in sorted(groups.items(), key=lambda item: item[0][0]):
            yield device, parts

    def task_graph(self) -> TaskGraph:
        graph, tasks = self.graph, TaskGraph(self.graph.name)
        futures: dict[Shard, Future] = {}
        for i, slot in enumerate(graph.inputs):
            kind = graph.input_type(i)
            desc = TensorDesc(kind.shape, host_layout(kind.data_type))
            futures[slot.value, 0] = tasks.input(desc, slot.name)
        results = [self._shard(slot.value, 0) for slot in graph.outputs]
        programs = list(self._programs())
        read = {shard for part in self.parts for shard in part.inputs}
        # The first program takes what nobody reads, so that all inputs are those of the graph.
        unread = [shard for shard in futures if shard not in read]
        for number, (device, parts) in enumerate(programs):
            later = [part for _, others in programs[number + 1 :] for part in others]
            read_later = {shard for part in later for shard in part.inputs} | set(results)
            made_here = [shard for part in parts for shard in part.outputs]
            own = [shard for shard in made_here if shard is not None and shard in read_later]
            name = f"{graph.name}_{number}"
            inputs, program = self._program(name, device, parts, own, () if number else unread)
            with tasks.on(device):
                made = tasks.call(program, *[futures[shard] for shard in inputs])
            made = made if isinstance(made, tuple) else (made,)
            futures |= zip(own, made, strict=True)
        for output, shard in zip(graph.outputs, results, strict=True):
            tasks.output(futures[shard], output.name)
        return tasks

    def _program(
        self, name: str, device: str, parts: Sequence[Part], outputs: Sequence[Shard],
        unread: Sequence[Shard],
    ) -> tuple[list[Shard], Binary]:  # fmt: skip
        """Return the inputs of a program and the program, compiled for its device."""
        builder = ComputationGraphBuilder(name)
        tensors: dict[Shard, Any] = {}
        inputs: list[Shard] = []

        def read(shard: Shard) -> None:
            value = self.graph.values[shard[0]]
            if shard[0] in self.constants:
                tensors[shard] = builder.parameter(value.name, self.constants[shard[0]])
                return
            kind = self.pcg.shapes[shard[0]].shard
            tensors[shard] = builder.input(f"{value.name}.{shard[1]}", kind.shape, kind.data_type)
            inputs.append(shard)

        for shard in unread:
            read(shard)
        for part in parts:
            for operand in part.inputs:
                if operand is not None and operand not in tensors:
                    read(operand)
            with builder.at(part.operation.location):
                made = write_part(self.pcg, builder, part, tensors)
            tensors |= {s: t for s, t in zip(part.outputs, made, strict=True) if s}
        for shard in outputs:
            builder.output(f"{self.graph.values[shard[0]].name}.{shard[1]}.out", tensors[shard])
        machine = self.specification.devices[device].machine
        program = compile_graph(builder.build(), machine).program
        return inputs, Binary((program,), machine.shape, "stitch parallel")


def write_part(
    pcg: ParallelComputationGraph, builder: ComputationGraphBuilder, part: Part,
    tensors: Mapping[Shard, Any],
) -> Sequence[Any]:  # fmt: skip
    """Write the operation of a part on the tensors of its shards; return its results."""
    operation = part.operation
    operands = [None if shard is None else tensors[shard] for shard in part.inputs]
    if not is_parallel(operation):
        if operation.body != ABSENT:
            body = pcg.graph.bodies[operation.body]
            carried = [operand for operand in operands if operand is not None]
            return builder.carry(
                operation.op, operation.domain, body, carried, operation.attributes
            )
        names = [pcg.graph.values[s[0]].name if s else "unused" for s in part.outputs]
        types = [pcg.shapes[s[0]].shard if s else None for s in part.outputs]
        return builder.repeat(operation, operands, names, types)
    if operation.op == "Reduction":
        total = operands[0]
        for operand in operands[1:]:
            total = builder.op("Add", total, operand)
        return [builder.op("Identity", total) if len(operands) == 1 else total]
    axis = attributes_of(operation)["axis"]
    assert isinstance(axis, int)
    if operation.op == "Combine":
        return [builder.op("Concat", *operands, axis=axis)]
    assert part.outputs[0] is not None
    kind = pcg.shapes[part.outputs[0][0]].shard
    size, axis = kind.shape[axis], axis % len(kind.shape)
    first = part.number * size
    return [builder.op("Slice", operands[0], [first], [first + size], [axis])]
