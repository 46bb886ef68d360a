"""Stages of a training whose weights are divided: the shards of a parallel graph, each on a device.

The graph with all shards written out is cut where the device changes, and differentiated part by
part as any training in stages. So each device updates its shards, and the sums of gradients follow:
the gradient of copies is a sum, that of a sum is copies, by the device of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stitch.compiler import cuttable
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.mesh import DividedStages, ParallelOptions, Shards
from stitch.ops import attributes_of
from stitch.parallel.lowering import Part, Shard, write_part
from stitch.parallel.parallel_graph import ParallelComputationGraph, is_parallel
from stitch.parallel.tensor_graph import divided_graph
from stitch.program import ABSENT, Array, FreeNames, InputKind, Operation
from stitch.training import (
    Trainable,
    TrainingOptions,
    loss_of,
    optimizer_from_config,
    stage_graph,
    stages_of,
)


def divided_stages(
    model: Trainable, loss: Any, optimizer: Any, options: TrainingOptions,
    parallel: ParallelOptions,
) -> DividedStages:  # fmt: skip
    """Return the stages of a training with divided weights, for `compile_stages`.

    Args:
        loss: A loss, its name, or its configuration.
        optimizer: An optimizer, its name, or its configuration.
        parallel: `tensor` and `divide` say into how many shards, and along which axes.

    Raises:
        UsageError: A name is no parameter, or an axis does not divide.
        CompileError: A weight cannot be divided so, or the graph cannot be differentiated.
    """
    pcg = divided_graph(stage_graph(model, options), parallel.tensor, parallel.divide)
    shards = _Shards(pcg)
    graph, cuts, devices = shards.graph()
    names = {name: each.names for name, each in shards.divided.items()}
    of_shards = optimizer_from_config(optimizer).for_shards(names)
    written = Trainable(graph, shards.values(model.values), graph)
    staged = stages_of(written, loss_of(loss), of_shards, options, cuts, is_prepared=True)
    return DividedStages(staged, devices, shards.divided)


class _Shards:
    """The operations on shards, with the device and the turn of each.

    In a turn each device runs one stage: values that it sends leave when the turn ends.
    """

    def __init__(self, pcg: ParallelComputationGraph) -> None:
        self.pcg, self.whole = pcg, pcg.graph
        self.slots = {slot.value: slot for slot in self.whole.inputs}
        self.constants = {constant.value for constant in self.whole.constants}
        self.divided = self._divided()
        before = {s.name: s.value for s in self.whole.inputs}
        states = [(before[s.name], s.value) for s in self.whole.outputs if s.name in before]
        #: The turn of the new value of each state, in which the state is read: a stage has both.
        self.late: dict[int, int] = {}
        for _ in range(len(states) + 2):
            self._place_all()
            late = {old: self.made.get((new, 0), (0, 0))[1] for old, new in states}
            if late == self.late:
                break
            self.late = late

    def _place_all(self) -> None:
        #: The shard that another one is: an own copy, or an input that devices read themselves.
        self.same: dict[Shard, Shard] = {}
        #: The device that makes a shard, and the turn; readers of what it sends are a turn later.
        self.made: dict[Shard, tuple[int, int]] = {}
        self.sent: set[Shard] = set()
        #: The operations by turn and device.
        self.groups: dict[tuple[int, int], list[Part]] = {}
        for operation in self.whole.operations:
            for part in self._parts(operation):
                self._place(part, int(part.device))

    def _divided(self) -> dict[str, Shards]:
        """Return the parameters of which all readers read the same shards."""
        free = FreeNames([value.name for value in self.whole.values])
        found, readers = {}, dict[int, list[Operation]]()
        for operation in self.whole.operations:
            for v in set(operation.inputs):
                readers.setdefault(v, []).append(operation)
        for v, slot in list(self.slots.items()):
            reading = readers.get(v, [])
            only = len(reading) == 1 and reading[0].op == "Repartition" and is_parallel(reading[0])
            if slot.kind is InputKind.PARAMETER and only:
                words = attributes_of(reading[0])
                axis, degree = words["axis"], words["degree"]
                assert isinstance(axis, int) and isinstance(degree, int)
                names = tuple([free.free(f"{slot.name}.shard{i}") for i in range(degree)])
                found[slot.name] = Shards(axis, names)
                self.slots[reading[0].outputs[0]] = slot
        return found

    # -- parts -------------------------------------------------------------------------------------

    def _parts(self, operation: Operation) -> Iterator[Part]:
        result = next(v for v in operation.outputs if v != ABSENT)
        count = self.pcg.shapes[result].count
        if not is_parallel(operation):
            for i in range(count):
                read = [None if v == ABSENT else self._shard(v, i) for v in operation.inputs]
                made = [None if v == ABSENT else (v, i) for v in operation.outputs]
                yield Part(operation, tuple(read), tuple(made), str(i))
            return
        (source,), words = operation.inputs, attributes_of(operation)
        if operation.op in ("Combine", "Reduction"):
            degree = self.pcg.shapes[source].count
            read = [self._shard(source, i) for i in range(degree)]
            yield Part(operation, tuple(read), ((result, 0),), "0")
        elif result in self.slots:
            return  # A divided parameter: its shards are inputs.
        elif self._is_read_anywhere(source):
            for i in range(count):
                if operation.op == "Replicate":
                    self.same[result, i] = source, 0
                else:
                    yield Part(operation, ((source, 0),), ((result, i),), str(i), i)
        elif operation.op == "Replicate":
            self.same[result, 0] = source, 0
            copy = Operation("Identity", operation.inputs, operation.outputs)
            for i in range(1, count):
                self.sent.add((result, i))
                yield Part(copy, ((source, 0),), ((result, i),), "0")
        else:
            split = Operation(
                "Split", operation.inputs, operation.outputs * count,
                {"axis": words["axis"], "num_outputs": count},
            )  # fmt: skip
            shards = [(result, i) for i in range(count)]
            self.sent.update(shards)
            yield Part(split, ((source, 0),), tuple(shards), "0")

    def _is_read_anywhere(self, value: int) -> bool:
        """Whether a value is part of the batch or constant: each device has it."""
        slot = self.slots.get(value)
        kinds = (InputKind.ACTIVATION, InputKind.KEY)
        return value in self.constants or (slot is not None and slot.kind in kinds)

    def _shard(self, value: int, number: int) -> Shard:
        return value, number if self.pcg.shapes[value].count > 1 else 0

    def _place(self, part: Part, device: int) -> None:
        """Add an operation to the first turn in which its operands are there."""
        turn = max((self.late.get(s[0], 0) for s in part.inputs if s), default=0)
        for shard in filter(None, part.inputs):
            source = self.same.get(shard, shard)
            if source in self.made:
                home, before = self.made[source]
                is_sent = home != device or source in self.sent or shard in self.same
                turn = max(turn, before + is_sent)
        self.groups.setdefault((turn, device), []).append(part)
        self.made |= dict.fromkeys(filter(None, part.outputs), (device, turn))

    # -- the graph ---------------------------------------------------------------------------------

    def values(self, wholes: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of parameters and states, those of divided ones by shard."""
        found = dict(wholes)
        for name, shards in self.divided.items():
            parts = np.split(found.pop(name), len(shards.names), shards.axis)
            found |= zip(shards.names, parts, strict=True)
        return found

    def graph(self) -> tuple[ComputationGraph, tuple[str, ...], tuple[int, ...]]:
        """Return the graph with all shards written out, where stages end, and their devices."""
        whole, builder = self.whole, ComputationGraphBuilder(self.whole.name)
        tensors = self._inputs(builder)
        last = {self.made[slot.value, 0] for slot in whole.outputs if (slot.value, 0) in self.made}
        # The prediction, and with it the loss, is in the last stage.
        order = sorted(self.groups, key=lambda key: (key[0], (key[1], key[0]) in last, key[1]))
        groups: dict[str, int] = {}
        for number, key in enumerate(order):
            for part in self.groups[key]:
                operation = part.operation
                where = f"{operation.location} shard {key[1]}" if operation.location else ""
                given = {s: tensors[self.same.get(s, s)] for s in part.inputs if s}
                with builder.at(where):
                    made = write_part(self.pcg, builder, part, given)
                for shard, tensor in zip(part.outputs, made, strict=True):
                    if shard is not None:
                        tensors[shard] = tensor
                        groups[tensor.name] = number
        for slot in whole.outputs:
            builder.output(slot.name, tensors[slot.value, 0])
        graph = cuttable(builder.build())
        return graph, *self._cuts(graph, groups, [device for _, device in order])

    def _inputs(self, builder: ComputationGraphBuilder) -> dict[Shard, Any]:
        tensors: dict[Shard, Any] = {}
        shards_of = {slot.name: v for v, slot in self.slots.items()}
        for i, slot in enumerate(self.whole.inputs):
            kind = self.whole.input_type(i)
            if slot.name not in self.divided:
                made = builder.input(slot.name, kind.shape, kind.data_type, slot.kind)
                tensors[slot.value, 0] = made
                continue
            value = shards_of[slot.name]
            kind = self.pcg.shapes[value].shard
            for number, name in enumerate(self.divided[slot.name].names):
                made = builder.input(name, kind.shape, kind.data_type, slot.kind)
                tensors[value, number] = made
        for constant in self.whole.constants:
            name = self.whole.values[constant.value].name
            tensors[constant.value, 0] = builder.parameter(name, constant.data)
        return tensors

    @staticmethod
    def _cuts(
        graph: ComputationGraph, groups: Mapping[str, int], devices: Sequence[int]
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the last node of each stage but the last, and the devices of the stages."""
        names: list[tuple[int, str]] = []
        for operation in graph.operations:
            name = next(graph.values[v].name for v in operation.outputs if v != ABSENT)
            number = groups.get(name, len(devices) - 1)
            if names and names[-1][0] == number:
                names[-1] = number, name
            else:
                names.append((number, name))
        return tuple([n for _, n in names[:-1]]), tuple([devices[k] for k, _ in names])
