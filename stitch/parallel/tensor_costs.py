"""What the operations of a divided training cost: seconds of a micro-batch, of the update, bytes.

Costs are added up, operation by operation. The devices of a group compute the same on their shards
at the same time; the first one also computes what is whole. What programs cost beside their
operations is counted where values are sent, because a stage ends there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stitch.compiler import differentiate
from stitch.errors import CompileError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.linker import choose_scratch
from stitch.machine import Machine, room_per_bank
from stitch.ops import attributes_of
from stitch.parallel.costs import SegmentCosts
from stitch.parallel.parallel_graph import ParallelShape, is_parallel
from stitch.parallel.tensor_graph import GraphDivision
from stitch.program import (
    ABSENT,
    Array,
    InputKind,
    Layout,
    Operation,
    Space,
    TensorDesc,
    ValueType,
)
from stitch.training import (
    Optimizer,
    Parameter,
    PlacedSlots,
    accumulation_graph,
    home_space,
    update_graph,
)


class Terms(NamedTuple):
    """The terms of the cost of a plan, each of which only grows.

    `pass_seconds`: of a micro-batch, forward and backward. `first` and `others`: of the first
    device and of each other one, the seconds of an update and of adding gradients. Bytes are per
    bank of the default space.
    """

    pass_seconds: float = 0.0
    first: float = 0.0
    others: float = 0.0
    first_nbytes: int = 0
    others_nbytes: int = 0

    def plus(self, other: Terms) -> Terms:
        return Terms(
            self.pass_seconds + other.pass_seconds, self.first + other.first,
            self.others + other.others, self.first_nbytes + other.first_nbytes,
            self.others_nbytes + other.others_nbytes,
        )  # fmt: skip

    def seconds(self, micro_batches: int) -> float:
        """Return the seconds of a step."""
        return micro_batches * self.pass_seconds + max(self.first, self.others)


class TensorCosts:
    """The costs of plans that divide weights among the first `degree` devices."""

    def __init__(
        self, costs: SegmentCosts, optimizer: Optimizer, degree: int, micro_batches: int
    ) -> None:
        self.costs, self.optimizer, self.degree = costs, optimizer, degree
        self.graph, self.micro_batches = costs.graph, micro_batches
        self.devices = list(costs.specification.devices)[:degree]
        machines = [costs.specification.devices[name].machine for name in self.devices]
        #: Those of the first device, and of all.
        self.first, self.machines = machines[0], list(dict.fromkeys(machines))
        self._of_batch = {
            slot.value for slot in self.graph.inputs
            if slot.kind in (InputKind.ACTIVATION, InputKind.KEY)
        }  # fmt: skip
        self._trained = self._depending()
        self._seconds = costs.of_operations

    def _depending(self) -> set[int]:
        """Return the values that depend on parameters."""
        found = {s.value for s in self.graph.inputs if s.kind is InputKind.PARAMETER}
        for operation in self.graph.operations:
            if found.intersection(operation.inputs):
                found.update(v for v in operation.outputs if v != ABSENT)
        return found

    def fits(self, terms: Terms) -> bool:
        """Return whether a plan fits the default space of each device."""
        needed = [terms.first_nbytes, *[terms.others_nbytes] * (self.degree - 1)]
        return all(
            n <= machine.shape.space(home_space(machine)).capacity
            for n, machine in zip(needed, self._machine_of_each, strict=True)
        )

    @property
    def _machine_of_each(self) -> list[Machine]:
        return [self.costs.specification.devices[name].machine for name in self.devices]

    # -- terms -------------------------------------------------------------------------------------

    @cached_property
    def start(self) -> Terms:
        """The terms of any plan: the loss, the programs of the first stage, the batch."""
        last = self.costs.staged.stages[-1].loss
        loss = 0.0 if last is None else self.costs.graph_seconds(last, self.first, {})
        nbytes = sum(self._nbytes(self.graph.values[v].type, self.first) for v in self._of_batch)
        return Terms(loss + 2 * self._launch(self.first), 0.0, 0.0, nbytes, nbytes)

    def operation(self, division: GraphDivision, operation: Operation) -> Terms:
        """Return the terms of an operation of a parallel graph, of parameters those of copies."""
        shapes = [division.shape(v) for v in operation.outputs if v != ABSENT]
        if is_parallel(operation):
            return self._moved(division, operation, shapes[0])
        is_divided = max((shape.count for shape in shapes), default=1) > 1
        machines = self.machines if is_divided else [self.first]
        seconds = max(self._computed(division, operation, machine) for machine in machines)
        first = sum(self._nbytes(shape.shard, self.first) for shape in shapes)
        others = max(
            sum(self._nbytes(shape.shard, machine) for shape in shapes) for machine in self.machines
        )
        return Terms(seconds, 0.0, 0.0, first, others if is_divided else 0)

    def parameter(self, division: GraphDivision, value: int) -> Terms:
        """Return the terms of a parameter once all its readers are known."""
        kind = self.graph.values[value].type
        reads = [axis for v, axis in division.converted if v == value]
        is_divided = len(reads) == 1 and reads[0] is not None and value not in division.read_whole
        if is_divided:
            kind = division.shape(division.converted[value, reads[0]]).shard
        terms = Terms()
        for axis in () if is_divided else reads:
            shape = division.shape(division.converted[value, axis])
            terms = terms.plus(self._sent(shape, axis))
        update = max(
            self._updated(self.graph.values[value].name, kind, machine)
            for machine in (self.machines if is_divided else [self.first])
        )
        nbytes = max(
            self._state_nbytes(self.graph.values[value].name, kind, m) for m in self.machines
        )
        of_others = (update, nbytes) if is_divided else (0.0, 0)
        return terms.plus(Terms(0.0, update, of_others[0], nbytes, of_others[1]))

    def _moved(self, division: GraphDivision, operation: Operation, result: ParallelShape) -> Terms:
        (source,) = operation.inputs
        if source in division.parameters or source in division.known:
            return Terms()  # `parameter` has the terms of what is sent.
        if operation.op in ("Combine", "Reduction"):
            shape = division.shape(source)
            return self._sent(shape, attributes_of(operation).get("axis"))
        if source in self._of_batch:
            nbytes = max(self._nbytes(result.shard, machine) for machine in self.machines)
            return Terms(0.0, 0.0, 0.0, nbytes, nbytes)
        terms = self._sent(result, attributes_of(operation).get("axis"))
        # A stage begins: it adds gradients, and updates, by programs of its own.
        launches = self.micro_batches * max(map(self._launch, self.machines))
        return terms.plus(Terms(0.0, launches, launches))

    def _sent(self, shape: ParallelShape, axis: Any) -> Terms:
        """Return the terms of values between the first device and the others, both ways."""
        nbytes, first = shape.shard.nbytes, self.devices[0]
        out = max(self.costs.movement(first, other, nbytes) for other in self.devices[1:])
        back = max(self.costs.movement(other, first, nbytes) for other in self.devices[1:])
        launch = max(map(self._launch, self.machines))
        joined = self._joined(shape, "Add" if axis is None else "Concat", axis)
        nbytes = self._nbytes(shape.shard, self.first)
        other = max(self._nbytes(shape.shard, machine) for machine in self.machines)
        return Terms(out + back + 2 * launch + joined, 0.0, 0.0, nbytes * self.degree, other)

    # -- seconds -----------------------------------------------------------------------------------

    def _near(self, machine: Machine) -> Space:
        key = "near", machine
        if key not in self._spaces:
            whole = PlacedSlots(self.graph, machine.shape, home_space(machine))
            scratch = choose_scratch(whole.scratch_nbytes, machine.shape, l1_slots_per_bank=0)
            self._spaces[key] = scratch.space
        return self._spaces[key]

    @cached_property
    def _spaces(self) -> dict[Hashable, Space]:
        return {}

    def _launch(self, machine: Machine) -> float:
        return self._cached(
            ("launch", machine), lambda: self.costs.graph_seconds(_empty(), machine, {})
        )

    def _cached(self, key: Hashable, seconds: Any) -> float:
        if key not in self._seconds:
            self._seconds[key] = seconds()
        return self._seconds[key]

    def _of_graph(
        self, graph: ComputationGraph, machine: Machine, near: Sequence[str] = ()
    ) -> float:
        space = self._near(machine)
        spaces = dict.fromkeys(near, space)
        return max(0.0, self.costs.graph_seconds(graph, machine, spaces, space)
                   - self._launch(machine))  # fmt: skip

    def _joined(self, shape: ParallelShape, op: str, axis: Any) -> float:
        """Return the seconds to join shards on the first device."""
        kind, degree = shape.shard, self.degree

        def seconds() -> float:
            b = ComputationGraphBuilder("joined")
            names = [f"x{i}" for i in range(degree)]
            parts: list[Any] = [b.input(name, kind.shape, kind.data_type) for name in names]
            if op == "Concat":
                total = b.op("Concat", *parts, axis=axis)
            else:
                total = parts[0]
                for part in parts[1:]:
                    total = b.op("Add", total, part)
            b.output("y", total)
            return self._of_graph(b.build(), self.first, [*names, "y"])

        return self._cached(("joined", degree, kind, op, axis), seconds)

    def _updated(self, name: str, kind: ValueType, machine: Machine) -> float:
        """Return the seconds to update a parameter and to add its gradients."""
        parameter = Parameter(name, kind, f"{name}.grad")
        group = self.optimizer.group_of(name)

        def seconds() -> float:
            graph = update_graph("update", [parameter], self.optimizer)
            added = accumulation_graph("sum", [parameter])
            further = (self.micro_batches - 1) * self._of_graph(added, machine)
            return self._of_graph(graph, machine) + further

        return self._cached(("update", group, kind, machine), seconds)

    def _computed(self, division: GraphDivision, operation: Operation, machine: Machine) -> float:
        """Return the seconds of an operation forward and backward on a shard."""
        kinds = [None if v == ABSENT else division.shape(v).shard for v in operation.inputs]
        data = {i: self._data(division, v) for i, v in enumerate(operation.inputs)}
        known = tuple([
            (i, a.tobytes() if a.nbytes < 1024 else b"") for i, a in data.items() if a is not None
        ])  # fmt: skip
        origins = [self._origin(division, v) for v in operation.inputs]
        made = tuple([division.shape(v).shard for v in operation.outputs if v != ABSENT])
        key = (
            operation.op, operation.domain, tuple(sorted(map(str, operation.attributes.items()))),
            operation.body, tuple(kinds), made, known, tuple(origins), machine,
        )  # fmt: skip
        return self._cached(key, lambda: self._timed(operation, kinds, data, origins, machine))

    def _data(self, division: GraphDivision, v: int) -> Array | None:
        if v in division.known:
            return division.known[v]
        return next((c.data for c in division.constants if c.value == v), None)

    def _origin(self, division: GraphDivision, v: int) -> str:
        """Return what an operand is: a parameter, a value that depends on some, or neither."""
        source = next((key[0] for key, made in division.converted.items() if made == v), v)
        if source in division.parameters:
            return "parameter"
        # Values that the division has added come of products.
        is_trained = source in self._trained or source >= len(self.graph.values)
        return "trained" if is_trained else ""

    def _timed(
        self, operation: Operation, kinds: Sequence[ValueType | None],
        data: dict[int, Array | None], origins: Sequence[str], machine: Machine,
    ) -> float:  # fmt: skip
        b = ComputationGraphBuilder("one")
        operands: list[Any] = []
        near, wanted = ["y"], []
        for i, (v, kind) in enumerate(zip(operation.inputs, kinds, strict=True)):
            array = data[i]
            if kind is None:
                operands.append(None)
            elif array is not None:
                operands.append(b.parameter(f"c{i}", np.broadcast_to(array, kind.shape)))
            elif v in operation.inputs[:i]:
                operands.append(operands[operation.inputs.index(v)])
            else:
                operands.append(b.input(f"x{i}", kind.shape, kind.data_type))
                near += [] if origins[i] == "parameter" else [f"x{i}"]
                wanted += [f"x{i}"] if origins[i] and kind.data_type.is_floating else []
        if operation.body == ABSENT:
            names = ["y"] * len(operation.outputs)
            made = b.repeat(operation, operands, names, [None] * len(names))
        else:
            body = self.graph.bodies[operation.body]
            made = b.carry(operation.op, operation.domain, body, operands, operation.attributes)
        b.output("y", made[0])
        graph = b.build()
        seconds = self._of_graph(graph, machine, near)
        if not wanted or not made[0].type.data_type.is_floating:
            return seconds
        try:
            backward = differentiate(graph, wanted, outputs=["y"]).backward
        except CompileError:
            return seconds  # A value that no gradient passes.
        passed = ["y.grad", *[f"{name}.grad" for name in wanted if name in near]]
        return seconds + self._of_graph(backward, machine, passed)

    # -- bytes -------------------------------------------------------------------------------------

    def _nbytes(self, kind: ValueType, machine: Machine) -> int:
        desc = TensorDesc(kind.shape, Layout(kind.data_type, home_space(machine)))
        return room_per_bank(desc, machine.shape)

    def _state_nbytes(self, name: str, kind: ValueType, machine: Machine) -> int:
        """Return the bytes of a parameter, its sum of gradients and its optimizer states."""
        group = self.optimizer.groups[self.optimizer.group_of(name)]
        has_master = Parameter(name, kind, "").has_master
        tensors = 2 + len(group.states) + has_master
        return tensors * self._nbytes(kind, machine)


def _empty() -> ComputationGraph:
    b = ComputationGraphBuilder("empty")
    b.output("y", b.op("Identity", b.input("x", (1,), "float32")))
    return replace(b.build(), operations=(), outputs=())
