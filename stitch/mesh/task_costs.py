"""What tasks cost on a machine: simulated seconds, and what they need in its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from stitch.errors import LayoutError
from stitch.linker import Demand, demands, expanded
from stitch.machine import Machine, MachineShape, copy_counts, estimated_seconds, room_per_bank
from stitch.program import Space, TensorDesc, host_layout
from stitch.tasks import CopyAgent, ProgramAgent, TaskTable
from stitch.ttb import Binary

#: Tensors that an error lists for each space.
MAX_LISTED = 4


@dataclass(frozen=True, slots=True)
class TaskCost:
    """The cost of one run of a task on a machine.

    Attributes:
        seconds: Simulated seconds.
        demands: What must be in memory while it runs.
        program: The identity of its program, whose constants are held once.
        refusal: Why it cannot run on this machine; empty if it can.
    """

    seconds: float
    demands: tuple[Demand, ...] = ()
    program: int | None = None
    refusal: str = ""


def task_costs(table: TaskTable, machine: Machine) -> tuple[TaskCost, ...]:
    """Return the cost of each task of a table without merged tasks. Host functions cost nothing."""
    of_programs: dict[int, TaskCost] = {}
    costs = []
    for task in table.tasks:
        agent = task.agent
        if isinstance(agent, ProgramAgent):
            key = id(agent.program)
            if key not in of_programs:
                of_programs[key] = _program_cost(agent, machine)
            costs.append(of_programs[key])
        elif isinstance(agent, CopyAgent):
            costs.append(_copy_cost(table.descs[task.inputs[0]], agent.desc, machine))
        else:
            costs.append(TaskCost(0.0))
    return tuple(costs)


def _program_cost(agent: ProgramAgent, machine: Machine) -> TaskCost:
    program, binary = agent.program, getattr(agent.source, "binary", agent.source)
    if isinstance(binary, Binary):
        missing = machine.shape.shortcomings(binary.machine)
        if missing:
            return TaskCost(0.0, refusal=f"program {program.name!r}, compiled for "
                            f"{binary.machine.name!r}: {'; '.join(missing)}")  # fmt: skip
    try:
        wanted = demands(program, program.scratch, machine.shape)
        # Operations of an opaque program have no model of their time.
        seconds = 0.0 if program.is_opaque else estimated_seconds(expanded(program), machine)
    except LayoutError as error:
        return TaskCost(0.0, refusal=f"program {program.name!r}: {error.brief()}")
    named = [replace(demand, label=f"{demand.label} of {program.name!r}") for demand in wanted]
    return TaskCost(seconds, tuple(named), id(program))


def _copy_cost(source: TensorDesc, target: TensorDesc, machine: Machine) -> TaskCost:
    try:
        seconds = machine.copy_seconds(copy_counts(source, target, machine))
        wanted = [
            Demand("slot", f"{what} of a copy", desc.layout.space,
                   room_per_bank(desc, machine.shape))
            for what, desc in (("source", source), ("target", target))
        ]  # fmt: skip
    except LayoutError as error:
        return TaskCost(0.0, refusal=f"a copy: {error.brief()}")
    return TaskCost(seconds, tuple(wanted))


def entry_seconds(table: TaskTable, machine: Machine) -> dict[int, float]:
    """Return, for each value that tasks read, the seconds to bring it into a device's memory.

    It is a copy from the host into the layout that its first reader takes. Host functions read
    arrays of the host.
    """
    seconds: dict[int, float] = {}
    for task in table.tasks:
        agent = task.agent
        for index, value in enumerate(task.inputs):
            if value in seconds:
                continue
            seconds[value] = 0.0
            if isinstance(agent, ProgramAgent):
                wanted = agent.program.input_desc(index).without_address()
            elif isinstance(agent, CopyAgent):
                wanted = agent.desc
            else:
                continue
            kind = table.descs[value].layout.data_type.in_arrays
            source = TensorDesc(wanted.shape, host_layout(kind))
            with suppress(LayoutError):  # Then the task cannot run here.
                seconds[value] = machine.copy_seconds(copy_counts(source, wanted, machine))
    return seconds


def sent_nbytes(desc: TensorDesc) -> int:
    """Return the bytes of a value that travels between devices: a dense array."""
    return desc.layout.data_type.in_arrays.nbytes(math.prod(desc.shape))


class StageMemory:
    """What a device must hold for its tasks, in each space.

    The constants of all programs, and the other tensors of the program that needs most. Constants
    in L1 count with their program: the planner moves them out between programs.
    """

    __slots__ = ("_constants", "_largest", "_programs", "needed", "refusals", "shape")

    def __init__(self, shape: MachineShape) -> None:
        self.shape = shape
        self._programs: set[int] = set()
        self._constants: list[Demand] = []
        self._largest: dict[Space, tuple[int, list[Demand]]] = {}
        #: Why tasks cannot run on the machine.
        self.refusals: list[str] = []
        #: Bytes per bank by space.
        self.needed = dict.fromkeys(shape.spaces, 0)

    def add(self, cost: TaskCost) -> None:
        """Add a task."""
        if cost.refusal:
            self.refusals.append(cost.refusal)
        if cost.program in self._programs:
            return
        if cost.program is not None:
            self._programs.add(cost.program)
        live: dict[Space, list[Demand]] = {}
        for demand in cost.demands:
            if demand.kind == "constant" and demand.space is not Space.L1:
                self._constants.append(demand)
                self.needed[demand.space] += demand.size_per_bank
            else:
                live.setdefault(demand.space, []).append(demand)
        for space, listed in live.items():
            size = sum(demand.size_per_bank for demand in listed)
            largest, _ = self._largest.get(space, (0, ()))
            if size > largest:
                self._largest[space] = (size, listed)
                self.needed[space] += size - largest

    @property
    def fits(self) -> bool:
        """Return whether all its tasks can run on the machine."""
        return not self.refusals and all(
            size <= self.shape.space(space).capacity for space, size in self.needed.items()
        )

    def problems(self) -> Iterator[str]:
        """Yield for each space that is too small needed and free bytes, and the largest tensors."""
        for space, needed in self.needed.items():
            free = self.shape.space(space).capacity
            if needed <= free:
                continue
            here = [d for d in self._constants if d.space is space]
            here += self._largest.get(space, (0, []))[1]
            here.sort(key=lambda d: (-d.size_per_bank, d.label))
            more = f" and {len(here) - MAX_LISTED} more" if len(here) > MAX_LISTED else ""
            listed = ", ".join(demand.text() for demand in here[:MAX_LISTED])
            yield f"{space.value} needs {needed} B per bank, {free} B are free: {listed}{more}"
