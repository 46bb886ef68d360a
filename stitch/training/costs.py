"""What the programs of a training take, by where the tensors between them lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from stitch.graph import ComputationGraph
from stitch.linker import choose_scratch, pack_scratch
from stitch.machine import Machine, MachineShape, program_seconds, room_per_bank
from stitch.ops import OperationWork, summed_over_operations
from stitch.program import Layout, Operation, OperationList, Space, TensorDesc


class CostEstimator(Protocol):
    """What things cost on a machine, in simulated seconds."""

    def program(self, machine: Machine, program: OperationList) -> float:
        """One run of a program, whose values lie where their layouts say."""


@dataclass(frozen=True, slots=True)
class SimulatedTime:
    """Costs as devices report them: programs take what they do by the machine's rates of computing.

    A machine that describes none (the host) carries what operations read and make, once each.
    """

    def program(self, machine: Machine, program: OperationList) -> float:
        """One run of a program."""
        if machine.compute is not None:
            return program_seconds(program, machine)
        near = Space.HOST if machine.shape.l1 is None else Space.L1

        def figures(work: OperationWork) -> Mapping[str, float]:
            carried = (machine.seconds(space, near, n, n) for space, n in work.nbytes if n)
            return {"seconds": sum(carried)}

        return summed_over_operations(program, figures).get("seconds", 0.0)


class PlacedSlots:
    """A graph whose slots can be placed; all else goes where the compiler will place it."""

    __slots__ = ("_home", "_machine", "_scratch_nbytes", "_touching", "graph", "slots")

    def __init__(self, graph: ComputationGraph, machine: MachineShape, home: Space) -> None:
        self.graph, self._machine, self._home = graph, machine, home
        #: The values of each slot's name: of an input, an output, or both.
        self.slots: dict[str, set[int]] = {}
        named = [(slot.name, slot.value) for slot in graph.inputs]
        named += [(slot.name, slot.value) for slot in graph.outputs]
        for name, value in named:
            self.slots.setdefault(name, set()).add(value)
        self._touching: dict[int, list[int]] = {}
        for at, operation in enumerate(graph.operations):
            for touched in {*operation.inputs, *operation.outputs}:
                self._touching.setdefault(touched, []).append(at)
        plan = pack_scratch(graph.values, graph.operations, graph.placed_values())
        self._scratch_nbytes = plan.nbytes

    @property
    def scratch_per_bank(self) -> int:
        """What the program's scratch takes of L1, if it lies there."""
        return -(-self._scratch_nbytes // self._machine.space(Space.L1).banks)

    def near(self, name: str) -> tuple[Operation, ...]:
        """The operations that read or write a slot's values."""
        found = {at for value in self.slots[name] for at in self._touching.get(value, ())}
        return tuple(self.graph.operations[at] for at in sorted(found))

    def placed(
        self, spaces: Mapping[str, Space], operations: tuple[Operation, ...]
    ) -> OperationList:
        """Operations of the graph, its slots in the spaces that are told, else at home."""
        graph, homes = self.graph, dict.fromkeys(self.graph.placed_values(), self._home)
        in_l1 = 0
        for name in self.slots.keys() & spaces.keys():
            for value in self.slots[name]:
                homes[value] = spaces[name]
                if spaces[name] is Space.L1:
                    kind = graph.values[value].type
                    desc = TensorDesc(kind.shape, Layout(kind.data_type, Space.L1))
                    in_l1 += room_per_bank(desc, self._machine)
        scratch = choose_scratch(self._scratch_nbytes, self._machine, l1_slots_per_bank=in_l1)
        values = tuple(
            replace(value, layout=Layout(value.type.data_type, homes.get(index, scratch.space)))
            for index, value in enumerate(graph.values)
        )
        return OperationList(
            graph.name, graph.inputs, graph.outputs, values, operations, graph.constants,
            bodies=graph.bodies,
        )  # fmt: skip
