"""Placement: the device of each task, by simulated time, within the memory of each machine.

Tasks that name a device keep it. The others are cut, in their order, into stages on the devices of
the specification, in its order, such that the slowest device takes the least time; of such cuts,
the one whose values take the least time to arrive. A device may get no stage. The time of a device
is that of its programs, and of all values that it receives: on the link, and into its memory. A
sender counts those that tasks with a named device read. Values from unplaced tasks count as over
the link from the stage before, which is exact for chains and for equal links.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from stitch.errors import IncompatibleError, OutOfMemoryError, UsageError
from stitch.mesh.specification import MachineSpecification
from stitch.mesh.task_costs import StageMemory, entry_seconds, sent_nbytes, task_costs
from stitch.tasks import TaskTable

#: Stages begin and end at so many points at most, evenly among the tasks.
MAX_POINTS = 512
#: Tasks that an error lists.
MAX_REFUSALS = 8

#: Seconds by the first point of a stage and the point where it ends.
_ByEnds: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float64]]
_Allowed: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.bool_]]


class _Passed(NamedTuple):
    """A value that unplaced tasks read; tasks are positions among the unplaced ones.

    `maker` is -1 for a task with a named device, and for the client.
    """

    value: int
    maker: int
    readers: tuple[int, ...]


class _Stage(NamedTuple):
    """A stage, from one point to another."""

    device: int
    first: int
    end: int


def place(table: TaskTable, specification: MachineSpecification) -> tuple[str, ...]:
    """Return the device of each task.

    Args:
        table: A graph without merged tasks (`TaskTable.flattened`).
        specification: The devices, in the order in which stages are placed on them.

    Raises:
        UsageError: A task names an unknown device.
        IncompatibleError: No device has the memory spaces that a program uses, or is a machine that
            it was compiled for.
        OutOfMemoryError: No cut fits the memory of the machines; lists for each stage of the best
            cut what it needs, what is free, and the largest tensors.
    """
    for task, name in enumerate(table.devices):
        if name is not None:
            try:
                specification.entry(name)
            except UsageError as error:
                error.where = f"{table.task_name(task)} of task graph {table.name!r}"
                raise
    return _Placement(table, specification).where()


class _Placement:
    """One search. A position counts the unplaced tasks; stages begin and end at points."""

    def __init__(self, table: TaskTable, specification: MachineSpecification) -> None:
        self.table, self.specification = table, specification
        self.names = tuple(specification.devices)
        self.machines = [entry.machine for entry in specification.devices.values()]
        by_machine = {
            each: (task_costs(table, each), entry_seconds(table, each))
            for each in dict.fromkeys(self.machines)
        }
        self.costs = [by_machine[each][0] for each in self.machines]
        self.entries = [by_machine[each][1] for each in self.machines]
        self.device_of = [table.device_of(task) for task in range(len(table.tasks))]
        self.unplaced = [task for task, name in enumerate(self.device_of) if name is None]
        count = len(self.unplaced)
        self.points = [*range(0, count, max(1, -(-count // MAX_POINTS))), count]
        self.end = len(self.points) - 1
        #: Seconds of each device without a stage: its named tasks, and what they receive.
        self.named_seconds = [
            sum(costs[t].seconds for t, device in enumerate(self.device_of) if device == name)
            for costs, name in zip(self.costs, self.names, strict=True)
        ]
        #: Values between unplaced tasks; values that others make, by their device or None.
        self.passed: list[_Passed] = []
        self.received: dict[str | None, list[_Passed]] = {}
        #: Values of unplaced tasks: the value, the maker's position, a named device that reads it.
        self.given: list[tuple[int, int, int]] = []
        self._read_values()
        self._arriving: dict[object, _ByEnds] = {}

    def _read_values(self) -> None:
        position = {task: at for at, task in enumerate(self.unplaced)}
        makers = {n: task for task, row in enumerate(self.table.tasks) for n in row.outputs}
        readers: dict[int, list[int]] = {}
        for task, row in enumerate(self.table.tasks):
            for value in dict.fromkeys(row.inputs):
                readers.setdefault(value, []).append(task)
        for value, reading in readers.items():
            maker = makers.get(value)
            source = None if maker is None else self.device_of[maker]
            at = -1 if maker is None else position.get(maker, -1)
            own = tuple([position[task] for task in reading if task in position])
            if own:
                values = self.passed if at >= 0 else self.received.setdefault(source, [])
                values.append(_Passed(value, at, own))
            for target in {self.device_of[task] for task in reading} - {source, None}:
                assert target is not None, "left out above"
                device = self.names.index(target)
                if at >= 0:
                    self.given.append((value, at, device))
                else:
                    self.named_seconds[device] += self._seconds_to_arrive(source, device, value)

    def _seconds_to_arrive(self, source: str | None, device: int, value: int) -> float:
        """Return the seconds until a value of a device, or of the client, is in memory."""
        name = self.names[device]
        if source == name:
            return 0.0
        entry = self.entries[device][value]
        if source is None:
            return entry
        nbytes = sent_nbytes(self.table.descs[value])
        return entry + self.specification.link(source, name).seconds(nbytes)

    def where(self) -> tuple[str, ...]:
        """Return the device of each task; raise `OutOfMemoryError` or `IncompatibleError`."""
        placed = [name or self.names[0] for name in self.device_of]
        for device, first, end in self._stages():
            for task in self._tasks(first, end):
                placed[task] = self.names[device]
        problems, refusals = [], []
        for device, (name, machine) in enumerate(zip(self.names, self.machines, strict=True)):
            memory = self._memory(device, [t for t, own in enumerate(placed) if own == name])
            where = f"\n  - device {name!r} ({machine.name}): "
            problems += [where + problem for problem in memory.problems()]
            refusals += [where + refusal for refusal in dict.fromkeys(memory.refusals)]
        graph = f"the task graph {self.table.name!r}"
        if refusals:
            raise IncompatibleError(
                f"the devices of {self.specification.name!r} cannot run {graph}:"
                + "".join(refusals[:MAX_REFUSALS]),
                remedy="compile its programs for the machines of the specification",
            )
        if problems:
            raise OutOfMemoryError(
                f"the devices of {self.specification.name!r} cannot hold {graph}:"
                + "".join(problems),
                remedy="use more devices or larger machines, split the largest programs, or name "
                "the devices of tasks",
            )
        return tuple(placed)

    def _tasks(self, first: int, end: int) -> list[int]:
        """Return the unplaced tasks between two points."""
        return self.unplaced[self.points[first] : self.points[end]]

    def _memory(self, device: int, tasks: Iterable[int]) -> StageMemory:
        memory = StageMemory(self.machines[device].shape)
        for task in tasks:
            memory.add(self.costs[device][task])
        return memory

    # -- the search --------------------------------------------------------------------------------

    def _stages(self) -> list[_Stage]:
        """Return the best stages that fit; if none do, the best ones without regard to memory."""
        if not self.unplaced:
            return []
        ends = np.arange(self.end + 1)
        every = ends[:, None] < ends
        fitting = self._all_fitting(every)
        links = [self._links_of_stages(device) for device in range(len(self.names))]
        work = [self._seconds_of_stages(device) for device in range(len(self.names))]

        def least(allowed: Sequence[_Allowed]) -> list[_Stage]:
            def seconds(device: int, kind: object) -> _ByEnds:
                whole = work[device] + links[device] + self._arriving_by(kind)
                return np.where(allowed[device], whole, np.inf)

            slowest, stages = self._search(seconds, np.maximum, max(self.named_seconds))
            if not math.isfinite(slowest):
                return []
            limit = slowest * (1 + 1e-9)

            def on_links(device: int, kind: object) -> _ByEnds:
                carried = links[device] + self._arriving_by(kind)
                return np.where(seconds(device, kind) <= limit, carried, np.inf)

            return self._search(on_links, np.add, 0.0)[1] or stages

        return least(fitting) or least([every] * len(self.names))

    def _search(
        self, cost: Callable[[int, object], _ByEnds], joined: np.ufunc, start: float
    ) -> tuple[float, list[_Stage]]:
        """Return the least joined cost of stages up to the last point, and the stages.

        `cost`: of a stage on a device, by the kind of link from the stage before; None: the first.
        """
        devices, points = len(self.names), self.end + 1
        best = np.full((devices, points), np.inf)
        #: The device of the stage before (-1: none), and the point where the stage begins.
        before = np.zeros((devices, points, 2), np.int64)
        at_start = np.full((1, points), np.inf)
        at_start[0, 0] = start
        every = np.arange(points)
        for device in range(devices):
            by_kind: dict[object, list[int]] = {}
            for earlier in range(device):
                by_kind.setdefault(self._kind(earlier, device), []).append(earlier)
            for kind, sources in ((None, [-1]), *by_kind.items()):
                reached = at_start if kind is None else best[sources]
                source = reached.argmin(0)
                total = joined(reached[source, every][:, None], cost(device, kind))
                first = total.argmin(0)
                better = total[first, every] < best[device]
                best[device][better] = total[first, every][better]
                found = np.stack([np.array(sources)[source[first]], first], 1)
                before[device][better] = found[better]
        device, end = int(best[:, -1].argmin()), self.end
        least, stages = float(best[device, end]), []
        while device >= 0 and end:
            earlier, first = before[device, end]
            stages.append(_Stage(device, int(first), end))
            device, end = int(earlier), int(first)
        return least, stages[::-1]

    def _kind(self, source: int, target: int) -> object:
        """Return what decides the seconds of values over a link into a device."""
        link = self.specification.link(self.names[source], self.names[target])
        figures = link.latency_seconds, link.bytes_per_second, link.curve
        return figures, self.machines[target]

    def _all_fitting(self, every: _Allowed) -> list[_Allowed]:
        """Return for each device the stages that it can hold beside its named tasks."""
        found: dict[object, _Allowed] = {}
        fitting = []
        for device, (name, machine) in enumerate(zip(self.names, self.machines, strict=True)):
            named = tuple([t for t, own in enumerate(self.device_of) if own == name])
            key = machine, named
            if key not in found:
                found[key] = self._fitting(device, named, every)
            fitting.append(found[key])
        return fitting

    def _fitting(self, device: int, named: Sequence[int], every: _Allowed) -> _Allowed:
        fits = np.zeros_like(every)
        for first in range(self.end):
            memory = self._memory(device, named)
            for end in range(first + 1, self.end + 1):
                for task in self._tasks(end - 1, end):
                    memory.add(self.costs[device][task])
                if not memory.fits:
                    break
                fits[first, end] = True
            if fits[0, self.end]:
                return every  # What holds all tasks holds each stage.
        return fits

    def _seconds_of_stages(self, device: int) -> _ByEnds:
        """Return the seconds of a device's named tasks and of a stage's programs."""
        seconds = [self.costs[device][task].seconds for task in self.unplaced]
        until = np.append(0.0, np.cumsum(seconds))[self.points]
        return self.named_seconds[device] + until - until[:, None]

    def _links_of_stages(self, device: int) -> _ByEnds:
        """Return the seconds of values from the client, and from and to named devices."""
        total = np.zeros((self.end + 1, self.end + 1))
        for source, values in self.received.items():
            total += self._arrivals(source, device, values)
        sent = np.zeros(len(self.unplaced))
        for value, maker, target in self.given:
            sent[maker] += self._seconds_to_arrive(self.names[device], target, value)
        until = np.append(0.0, np.cumsum(sent))[self.points]
        return total + until - until[:, None]

    def _arriving_by(self, kind: object) -> _ByEnds | float:
        """Return the seconds of values from earlier stages over a link of a kind."""
        if kind is None:
            return 0.0
        if kind not in self._arriving:
            source, target = next(
                (a, b) for b in range(len(self.names)) for a in range(b) if self._kind(a, b) == kind
            )
            self._arriving[kind] = self._arrivals(self.names[source], target, self.passed)
        return self._arriving[kind]

    def _arrivals(self, source: str | None, device: int, values: Iterable[_Passed]) -> _ByEnds:
        """Return the seconds of the values that arrive at each stage of a device, each once."""
        points = self.points
        added = np.zeros((self.end + 1, self.end + 1))
        for value, maker, readers in values:
            taken = self._seconds_to_arrive(source, device, value)
            for first in range(bisect_right(points, maker), bisect_right(points, readers[-1])):
                reader = readers[bisect_left(readers, points[first])]
                added[first, bisect_right(points, reader)] += taken
        return np.cumsum(added, axis=1)
