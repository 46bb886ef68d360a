"""What guides the search for weights to divide: a sum over the operations of a training.

The devices of a group compute the same on their shards at the same time; the first one also
computes what is whole. Programs, links and the order in which devices wait for one another are
left to the estimate (`PricedStages`). Of different machines and links the fastest count.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.machine import Machine, room_per_bank
from stitch.parallel.costs import SegmentCosts
from stitch.parallel.parallel_graph import ParallelShape, is_parallel
from stitch.parallel.tensor_graph import GraphDivision
from stitch.program import (
    ABSENT,
    Array,
    InputKind,
    Layout,
    Operation,
    TensorDesc,
    ValueType,
)
from stitch.training import (
    Parameter,
    accumulation_graph,
    home_space,
    update_graph,
)

#: A product has two in its gradient.
_BACKWARD = 2


class Terms(NamedTuple):
    """The terms of the cost of a plan, each of which only grows.

    `busy`: the seconds in which the first device computes for a micro-batch, at least. `rest`:
    about those of backward, of values that it sends and receives, and of stages that these begin.
    `update`: those of an update and of adding gradients. `nbytes`: those of parameters, sums of
    gradients and states on the first device, per bank of the default space.
    """

    busy: float = 0.0
    rest: float = 0.0
    update: float = 0.0
    nbytes: int = 0

    def plus(self, other: Terms) -> Terms:
        return Terms(
            self.busy + other.busy, self.rest + other.rest, self.update + other.update,
            self.nbytes + other.nbytes,
        )  # fmt: skip

    def seconds(self, micro_batches: int) -> float:
        """Return about the seconds of a step."""
        return self.at_least(micro_batches) + micro_batches * self.rest

    def at_least(self, micro_batches: int) -> float:
        """Return seconds that a step takes at least: those of the first device."""
        return micro_batches * self.busy + self.update


class TensorCosts:
    """The costs of plans that divide weights among `degree` devices."""

    def __init__(self, costs: SegmentCosts, degree: int, micro_batches: int) -> None:
        self.costs, self.optimizer, self.degree = costs, costs.training[2], degree
        self.graph, self.micro_batches = costs.graph, micro_batches
        self._devices = list(costs.specification.devices)
        self._machines = list(
            dict.fromkeys(e.machine for e in costs.specification.devices.values())
        )
        #: The bytes of the largest default space.
        self.room = max(m.shape.space(home_space(m)).capacity for m in self._machines)
        self._of_batch = {
            slot.value for slot in self.graph.inputs
            if slot.kind in (InputKind.ACTIVATION, InputKind.KEY)
        }  # fmt: skip
        self._seconds = costs.of_operations

    # -- terms -------------------------------------------------------------------------------------

    @cached_property
    def start(self) -> Terms:
        """The terms of any plan: the loss, and the programs of a stage."""
        last = self.costs.staged.stages[-1].loss
        assert last is not None, "the last stage has it"
        loss = min(self.costs.graph_seconds(last, each, {}) for each in self._machines)
        return Terms(busy=loss + 2 * self._launch)

    def operation(self, division: GraphDivision, operation: Operation) -> Terms:
        """Return the terms of an operation of a parallel graph, of parameters those of copies."""
        if not is_parallel(operation):
            seconds = min(self._computed(division, operation, m) for m in self._machines)
            return Terms(busy=seconds, rest=_BACKWARD * seconds)
        (source,), (result,) = operation.inputs, operation.outputs
        if source in division.parameters or source in division.known or source in self._of_batch:
            return Terms()  # `parameter` has the terms of what is sent; devices have the batch.
        if operation.op in ("Combine", "Reduction"):
            return self._sent(division.shape(source))
        # A stage of other devices begins, with programs that add gradients and update.
        terms = self._sent(division.shape(result))
        return terms._replace(rest=terms.rest + self._launch)

    def parameter(self, division: GraphDivision, value: int) -> Terms:
        """Return the terms of a parameter once all its readers are known."""
        kind = self.graph.values[value].type
        reads = [axis for v, axis in division.converted if v == value]
        is_divided = len(reads) == 1 and reads[0] is not None and value not in division.read_whole
        if is_divided:
            kind = division.shape(division.converted[value, reads[0]]).shard
        terms = Terms()
        for axis in () if is_divided else reads:
            terms = terms.plus(self._sent(division.shape(division.converted[value, axis])))
        name = self.graph.values[value].name
        update = min(self._updated(name, kind, machine) for machine in self._machines)
        nbytes = min(self._state_nbytes(name, kind, machine) for machine in self._machines)
        return terms.plus(Terms(update=update, nbytes=nbytes))

    def _sent(self, shape: ParallelShape) -> Terms:
        """Return the terms of values between the first device and the others, both ways."""
        nbytes = shape.shard.nbytes
        link = self._cached(("link", nbytes), lambda: min(
            self.costs.movement(a, b, nbytes) for a, b in permutations(self._devices, 2)
        ))  # fmt: skip
        return Terms(rest=2 * link + 2 * self._launch)

    # -- seconds -----------------------------------------------------------------------------------

    @cached_property
    def _launch(self) -> float:
        return min(self.costs.launch(m, self.costs.scratch_space(m)) for m in self._machines)

    def _cached(self, key: Hashable, seconds: Any) -> float:
        if key not in self._seconds:
            self._seconds[key] = seconds()
        return self._seconds[key]

    def _of_graph(
        self, graph: ComputationGraph, machine: Machine, near: Sequence[str] = ()
    ) -> float:
        space = self.costs.scratch_space(machine)
        seconds = self.costs.graph_seconds(graph, machine, dict.fromkeys(near, space), space)
        return max(0.0, seconds - self.costs.launch(machine, space))

    def _updated(self, name: str, kind: ValueType, machine: Machine) -> float:
        """Return the seconds to update a parameter and to add its gradients."""
        parameter = Parameter(name, kind, f"{name}.grad")
        group = self.optimizer.group_of(name)

        def seconds() -> float:
            graph = update_graph("update", [parameter], self.optimizer)
            added = accumulation_graph("sum", [parameter])
            further = (self.micro_batches - 1) * self._of_graph(added, machine)
            return self._of_graph(graph, machine) + further

        return self._cached(("update", group, kind, machine, self.micro_batches), seconds)

    def _computed(self, division: GraphDivision, operation: Operation, machine: Machine) -> float:
        """Return the seconds of an operation on a shard."""
        kinds = [None if v == ABSENT else division.shape(v).shard for v in operation.inputs]
        data = {i: self._data(division, v) for i, v in enumerate(operation.inputs)}
        known = tuple([
            (i, a.tobytes() if a.nbytes < 1024 else b"") for i, a in data.items() if a is not None
        ])  # fmt: skip
        made = tuple([division.shape(v).shard for v in operation.outputs if v != ABSENT])
        key = (
            operation.op, operation.domain, tuple(sorted(map(str, operation.attributes.items()))),
            operation.body, tuple(kinds), made, known, machine,
        )  # fmt: skip
        return self._cached(key, lambda: self._timed(operation, kinds, data, machine))

    def _data(self, division: GraphDivision, v: int) -> Array | None:
        if v in division.known:
            return division.known[v]
        return next((c.data for c in division.constants if c.value == v), None)

    def _timed(
        self, operation: Operation, kinds: Sequence[ValueType | None],
        data: dict[int, Array | None], machine: Machine,
    ) -> float:  # fmt: skip
        b = ComputationGraphBuilder("one")
        operands: list[Any] = []
        for i, kind in enumerate(kinds):
            array = data[i]
            if kind is None:
                operands.append(None)
            elif array is not None:
                operands.append(b.parameter(f"c{i}", np.broadcast_to(array, kind.shape)))
            else:
                operands.append(b.input(f"x{i}", kind.shape, kind.data_type))
        if operation.body == ABSENT:
            names = ["y"] * len(operation.outputs)
            made = b.repeat(operation, operands, names, [None] * len(names))
        else:
            body = self.graph.bodies[operation.body]
            made = b.carry(operation.op, operation.domain, body, operands, operation.attributes)
        b.output("y", made[0])
        return self._of_graph(b.build(), machine, ["y", *[f"x{i}" for i in range(len(kinds))]])

    # -- bytes -------------------------------------------------------------------------------------

    def _state_nbytes(self, name: str, kind: ValueType, machine: Machine) -> int:
        """Return the bytes of a parameter, its sum of gradients and its optimizer states."""
        group = self.optimizer.groups[self.optimizer.group_of(name)]
        has_master = Parameter(name, kind, "").has_master
        desc = TensorDesc(kind.shape, Layout(kind.data_type, home_space(machine)))
        return (2 + len(group.states) + has_master) * room_per_bank(desc, machine.shape)
