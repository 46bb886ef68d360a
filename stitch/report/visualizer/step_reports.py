"""Runs of plans as rows: an operation for each program run, copy and move, what it reads and makes,
and what lies in the spaces when it has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stitch.planner import Allocate, Buffer, Copy, Execute, Free, Instance, Relocate
from stitch.program import MemoryLayout, TensorDesc
from stitch.report.allocations import Place, assign_arenas, own_at_start
from stitch.report.explanation import WRITTEN
from stitch.report.visualizer.report_tables import (
    BUFFER_LAYOUTS,
    BUFFER_TYPES,
    DEVICE,
    ReportTables,
    tensor_row,
)
from stitch.runtime import Lying, PlanRun, PlanStopped, Written


@dataclass(frozen=True, slots=True)
class _Where:
    """A place in a buffer: the key of a tensor, together with its descriptor."""

    place: Place | int
    offset_nbytes: int
    desc: TensorDesc


class ToldSteps:
    """What is known of a device after so many events."""

    def __init__(self, tables: ReportTables) -> None:
        self._tables = tables
        self._operations = self._tensors = 0
        #: What lies in the spaces, and how it is spread, where that is known.
        self._lying: dict[Place, int] = {}
        self._layouts: dict[Place, MemoryLayout] = {}
        #: The tensor that was last made, or first read, at a place.
        self._known: dict[_Where, int] = {}

    def plan(self, event: PlanRun | PlanStopped, lying: Sequence[Lying] | None) -> None:
        """A plan ran, or stopped half-way (and then nobody knows what lies where)."""
        plan = event.plan
        started = own_at_start(plan)
        if lying is not None:
            ended = assign_arenas(plan, plan.final_buffers)
            self._become(
                {one.place: one.size for one in lying if one.place not in ended}
                | {place: buffer.size_per_bank for place, buffer in started.items()}
            )
        buffers = {buffer.number: buffer for buffer in plan.request.buffers}
        for buffer in buffers.values():
            self._lay_out(buffer)
        run = _Run(self, event, buffers)
        numbers = event.steps if isinstance(event, PlanStopped) else range(len(plan.steps))
        for number in numbers:
            run.step(number)
        if lying is not None:
            self._become({one.place: one.size for one in lying})
        # Arrays of the host's are those of one run.
        self._known = {w: t for w, t in self._known.items() if isinstance(w.place, tuple)}

    def written(self, event: Written) -> None:
        """The host overwrote a tensor."""
        arguments = [("nbytes", event.nbytes), ("target", event.desc.text()), ("reason", WRITTEN)]
        self.operation("write", event.seconds, arguments, (), ())

    def operation(
        self, name: str, seconds: float, arguments: Iterable[tuple[str, object]],
        read: Iterable[int], made: Iterable[int],
    ) -> None:  # fmt: skip
        """Something was done; what lies in the spaces is what lay there when it had been."""
        self._operations += 1
        own = self._operations
        self._tables.add("operations", [(own, name, seconds)])
        self._tables.add(
            "operation_arguments", [(own, key, str(value)) for key, value in arguments]
        )
        self._tables.add("input_tensors", [(own, i, t) for i, t in enumerate(read)])
        self._tables.add("output_tensors", [(own, i, t) for i, t in enumerate(made)])
        self._tables.add("buffers", [
            (own, DEVICE, address, size, BUFFER_TYPES[space],
             BUFFER_LAYOUTS[self._layouts.get((space, address), MemoryLayout.INTERLEAVED)])
            for (space, address), size in self._lying.items()
        ])  # fmt: skip

    def tensor(self, where: _Where, *, is_new: bool) -> int:
        """The number of the tensor that lies there; `is_new`: it was made just now."""
        number = self._known.get(where)
        if number is None or is_new:
            if is_new:
                # Whatever lay in these bytes before is another tensor.
                self._forget({where.place}, where.offset_nbytes)
            self._tensors += 1
            number = self._known[where] = self._tensors
            place = where.place
            address = place[1] + where.offset_nbytes if isinstance(place, tuple) else None
            self._tables.add("tensors", [tensor_row(number, where.desc, address)])
            if address is not None:
                self._tables.add("device_tensors", [(number, DEVICE, address)])
        return number

    def allocate(self, buffer: Buffer) -> None:
        """A buffer takes its place."""
        if buffer.address is not None:
            place = buffer.space, buffer.address
            self._forget({place})
            self._lying[place] = buffer.size_per_bank
            self._lay_out(buffer)

    def free(self, place: Place) -> None:
        """Nothing lies there any more."""
        self._lying.pop(place, None)
        self._layouts.pop(place, None)
        self._forget({place})

    def _lay_out(self, buffer: Buffer) -> None:
        if buffer.address is not None:
            place = buffer.space, buffer.address
            self._layouts[place] = buffer.desc.layout.memory_layout

    def _become(self, lying: dict[Place, int]) -> None:
        """This is what lies in the spaces now."""
        gone = {place for place, size in self._lying.items() if lying.get(place) != size}
        for place in gone:
            self._layouts.pop(place, None)
        if gone:
            self._forget(gone)
        self._lying = lying

    def _forget(self, places: set[Place] | set[Place | int], offset: int | None = None) -> None:
        self._known = {
            where: tensor
            for where, tensor in self._known.items()
            if where.place not in places or offset not in (None, where.offset_nbytes)
        }


class _Run:
    """The steps of one run of a plan, as they are told."""

    def __init__(
        self, told: ToldSteps, event: PlanRun | PlanStopped, buffers: dict[int, Buffer]
    ) -> None:
        self._told, self._index, self._plan = told, event.index, event.plan
        self._buffers = buffers

    def step(self, number: int) -> None:
        """One more step."""
        step = self._plan.steps[number]
        if isinstance(step, Allocate):
            self._buffers[step.buffer.number] = step.buffer
            self._told.allocate(step.buffer)
        elif isinstance(step, Free):
            buffer = self._buffers[step.buffer]
            if buffer.address is not None:
                self._told.free((buffer.space, buffer.address))
        elif isinstance(step, Copy):
            self._copy(step)
        elif isinstance(step, Relocate):
            self._relocate(step)
        else:
            self._execute(step)

    def _copy(self, step: Copy) -> None:
        arguments = [
            ("plan", self._index), ("nbytes", step.nbytes), ("source", step.source.desc.text()),
            ("target", step.target.desc.text()), ("reason", step.reason),
        ]  # fmt: skip
        read = [self._tensor(step.source)]
        made = [self._tensor(step.target, is_new=True)]
        self._told.operation(step.kind, step.seconds, arguments, read, made)

    def _relocate(self, step: Relocate) -> None:
        kind = "move" if step.stage is None else "bounce"
        arguments = [
            ("plan", self._index), ("nbytes", step.nbytes), ("tensors", step.count),
            ("space", step.space.value), ("reason", step.reason),
        ]  # fmt: skip
        moved = [(self._buffers[number], number, address) for number, address in step.targets]
        whole = [Instance(number, 0, buffer.desc) for buffer, number, _ in moved]
        read = [self._tensor(instance) for instance in whole]
        for buffer, _, _ in moved:
            assert buffer.address is not None
            self._told.free((buffer.space, buffer.address))
        for buffer, number, address in moved:
            self._buffers[number] = buffer.where({number: address})
            self._told.allocate(self._buffers[number])
        made = [self._tensor(instance, is_new=True) for instance in whole]
        self._told.operation(kind, step.seconds, arguments, read, made)

    def _execute(self, step: Execute) -> None:
        what = self._plan.request.tasks[step.task].transformation
        arguments: list[tuple[str, object]] = [("plan", self._index), ("kind", what.kind.value)]
        if step.scratch is not None:
            space, address, size = step.scratch
            arguments.append(("scratch", f"{space.value} [{address:#x}, {address + size:#x})"))
        read = [self._tensor(instance) for instance in step.inputs]
        made = [self._tensor(instance, is_new=True) for instance in step.outputs]
        self._told.operation(what.name, what.seconds, arguments, read, made)

    def _tensor(self, instance: Instance, *, is_new: bool = False) -> int:
        buffer = self._buffers[instance.buffer]
        place = buffer.number if buffer.address is None else (buffer.space, buffer.address)
        where = _Where(place, instance.offset_nbytes, instance.desc)
        return self._told.tensor(where, is_new=is_new)
