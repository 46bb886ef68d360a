"""`StatefulExecutable`: a task graph of a loop that reads and writes persistent cells.

An output that overwrites an input stays in its cell: if nothing else references the values, a loop
creates no handles and no values. It runs at once if the queue is empty and the run changes nothing
but its results; otherwise it is enqueued like any call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stitch.errors import TaskError, UsageError
from stitch.program import TensorDesc
from stitch.runtime.arguments import link_argument
from stitch.runtime.graphs import PlacedGraph
from stitch.runtime.loops.cell_states import PersistentBuffers, State, Then
from stitch.runtime.plan_cache import CachedPlan, Entries, PlanCache
from stitch.runtime.recording import (
    BEGUN,
    COMPLETE,
    UNTOUCHED,
    Binding,
    perform,
    stopped_by,
    tell_run,
    tell_stopped,
)
from stitch.runtime.tensor import Tensor, handle_on
from stitch.runtime.values import InputPort, OutputSlots, Status, ValueRecord
from stitch.tasks import TaskTable

READY = Status.READY
#: Limit of failed attempts to run at once; after that it is always enqueued.
MAX_TRIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Result:
    """A result in an output slot: its cell and description."""

    cell: int
    desc: TensorDesc
    desc_key: int
    by: str


@dataclass(frozen=True, slots=True, eq=False)
class _Details:
    """Of an executable: its results in the order of its output slots, and the positions of entries
    that are overwritten in their cells."""

    results: tuple[_Result, ...]
    carried: tuple[int, ...]

    def overwritten(self, entries: Entries) -> tuple[ValueRecord, ...]:
        """Return the overwritten entries."""
        return tuple([value for i in self.carried if (value := entries[i]) is not None])


@dataclass(frozen=True, slots=True, eq=False)
class _RunFromState:
    """A run from one state of the cells to another: what it reads, overwrites, and makes."""

    known: CachedPlan[_Details]
    binding: Binding
    #: Progress of a run: see `BoundPlan.progress`.
    progress: list[int]
    lease: OutputSlots
    entries: Entries
    carried: tuple[ValueRecord, ...]
    results: tuple[ValueRecord, ...]
    after: State
    #: Values that leave their cells and are released.
    gone: Sequence[ValueRecord]

    def holds(self, generation: int, exposed: int | None) -> bool:
        """Return whether the buffers it writes are used nowhere else, and nothing else has
        changed."""
        if exposed is None or not self.known.holds(generation, exposed):
            return False
        lease = self.lease
        for value in self.results:
            if value.handles != 1 or value.lease is not lease:
                return False
        for value in self.carried:
            if value.handles != 1 or value.version:
                return False
            if value.is_exposed and not value.instances[0].buffer.is_shared:
                return False
        return not self.binding.tally.is_closed


class StatefulExecutable:
    """Runs of a task graph on cells, called with the remaining inputs.

    `reads`: for each input of the graph its cell, None for an argument of the call. `writes`: for
    each output its cell. `lost_by`: reason reported for entries that a failed run had partly
    overwritten.
    """

    def __init__(
        self,
        cells: PersistentBuffers,
        table: TaskTable,
        reads: Sequence[int | None],
        writes: Sequence[int],
        lost_by: str = "a run failed after it had overwritten a part",
    ) -> None:
        self.cells, self.device, self.lost_by = cells, cells.device, lost_by
        self._graph = PlacedGraph(cells.device, table)
        if len({*self._graph.outputs}) < len(self._graph.outputs):
            raise UsageError(
                "each output of a loop stage needs a separate value",
                got="the same value as two outputs",
            )
        #: For each input its cell, None for an argument; ports and types of the arguments.
        self._cell_of_input = tuple(reads)
        given = zip(self._graph.ports, reads, strict=True)
        self._given_ports = tuple([port for port, cell in given if cell is None])
        self._given_forms = tuple([(port.dtype, port.shape) for port in self._given_ports])
        #: The cells that it reads, and those that it writes.
        self.reads, self.writes = tuple([n for n in reads if n is not None]), tuple(writes)
        self._known: PlanCache[_Details] = PlanCache(self.device)
        self._read_names = [
            name for name, cell in zip(self._graph.input_names, reads, strict=True)
            if cell is not None
        ]  # fmt: skip
        #: The cells whose values it may overwrite, and handles on these values while enqueued runs
        #: are pending.
        taken = [reads[at] for at in self._graph.taken_over if at < len(reads)]
        self._overwritten = tuple([cell for cell in taken if cell is not None])
        self.replaced: list[tuple[int, Tensor]] = []
        #: Its key in `State.runs`. (`self` would keep the cells alive.)
        self._key = object()
        #: Host functions may fail by themselves: the queue runs the independent tasks.
        self._tries = 0 if self._graph.calls_host else MAX_TRIES

    def __call__(self, arguments: Sequence[Any] = (), then: Then = None) -> None:
        """Run once, now or with the queue, with arrays or tensors as arguments.

        `then` is called when it is certain to run; must be idempotent.
        """
        device = self.device
        with device.lock:
            device.check_open()
            device.check_consistent()
            if device.deaths.dropped or device.deaths.ended:
                device.drain(resting=False)
            if (self._known and device.tasks.is_idle and not device.copies_forbidden
                    and self._takes(arguments)):  # fmt: skip
                run = self.cells.held.state.runs.get(self._key)
                if run is None or not run.holds(
                    device.records.generation, self._known.count_exposed(run.entries)
                ):
                    run = self._run_from_here()
                if run is not None:
                    self._run(run, arguments, then)
                    return
        # Converting a list may run user code; do not hold the lock.
        given = [self._link(p, a) for p, a in zip(self._given_ports, arguments, strict=True)]
        with device.lock:
            self._queue(given, then)

    # -- again -----------------------------------------------------------------------------------

    def _takes(self, arguments: Sequence[Any]) -> bool:
        """Return whether the arguments are arrays of the cached types."""
        for argument, (dtype, shape) in zip(arguments, self._given_forms, strict=True):
            if (
                type(argument) is not np.ndarray
                or argument.dtype is not dtype
                or argument.shape != shape
            ):
                return False
        return True

    def _entries(self) -> Entries:
        """Return the values of the cells that it reads."""
        values = self.cells.values
        return tuple([values[number] for number in self.reads])

    def _run(self, run: _RunFromState, arguments: Sequence[Any], then: Then) -> None:
        """Run a cached transition and store its results.

        A run that has begun to overwrite entries is completed: they are as before or as after it.
        """
        device, binding = self.device, run.binding
        records, commit = device.records, None
        run.lease.last_run = device.tasks.queued.number
        if run.carried:
            commit = partial(self._commit, run, then)
            # Atomic: no call in between. From here on it is committed.
            run.progress[1] = UNTOUCHED
            records.pending_recovery = commit
            records.is_consistent = False
        try:
            ran = perform(device, binding, arguments)
            if commit is not None:
                commit()
            elif then is None and not run.gone:
                self.cells.held.state = run.after
            else:
                self.cells.become(run.after, (), run.gone, then)
        except BaseException as error:
            stopped = stopped_by(error)
            if records.pending_recovery is commit is not None:
                commit()
            if records.is_consistent:
                tell_stopped(device, binding, stopped)
            raise
        if ran is not True:
            tell_run(device, binding, ran)

    def _commit(self, run: _RunFromState, then: Then) -> None:
        """Commit a run that overwrites entries, completely or not at all, or mark them lost.
        Idempotent."""
        device, held, progress = self.device, self.cells.held, run.progress[1]
        after: State
        gone: Sequence[ValueRecord]
        if progress == COMPLETE:
            after, gone = run.after, run.gone
            if then is not None:
                then()
        else:
            after, gone = held.state, ()
            if progress == BEGUN:
                self._lose(run)
        records, dropped = device.records, device.deaths.dropped
        # Atomic: no call in between.
        held.state = after
        dropped += gone
        records.pending_recovery = None
        records.is_consistent = True

    def _lose(self, run: _RunFromState) -> None:
        """Free entries that a run has partly overwritten."""
        for position, value in zip(run.known.details.carried, run.carried, strict=True):
            self.device.deaths.free(value, f"{self._read_names[position]!r}: {self.lost_by}")
            value.status = Status.LOST

    def _run_from_here(self) -> _RunFromState | None:
        """Create and cache the transition from the current state, into idle output slots.

        Returns None if no executable is cached, or an entry to overwrite is used elsewhere.
        """
        device, cells = self.device, self.cells
        entries = self._entries()
        known = self._found_run(entries)
        if known is not None and cells.held.release_buffer(device.deaths.dropped, known.recording):
            device.drain(resting=False)
            known = self._found_run(entries)
        binding = None if known is None else known.binding(device)
        if known is None or binding is None:
            return None
        lease, details = binding.lease, known.details
        assert lease is not None, "known recordings have leases"
        now, values = device.tasks.queued.number, None if lease.held else lease.values
        if values is None:
            values = [ValueRecord(device, r.desc, r.desc_key, r.by) for r in details.results]
        take = partial(lease.take, values, now)
        state = cells.held.state
        cells.become(cells.held.found(state.values, state.resting.union(values)), values, (), take)
        results = [result.cell for result in details.results]
        after, gone = cells.changed(dict(zip(results, values, strict=True)))
        carried = details.overwritten(entries)
        progress = binding.bound.progress if carried else [0, UNTOUCHED]
        run = _RunFromState(
            known, binding, progress, lease, entries, carried, tuple(values), after, gone
        )
        cells.held.state.runs[self._key] = run
        return run

    def _found_run(self, entries: Entries) -> CachedPlan[_Details] | None:
        """Return the cached plan for these entries, unless one to overwrite is used elsewhere."""
        exposed = None if None in entries else self._known.count_exposed(entries)
        known = None if exposed is None else self._known.find(entries, exposed)
        for value in () if known is None else known.details.overwritten(entries):
            buffer = value.instances[0].buffer
            if value.handles != 1 or value.version or not buffer.is_open:
                return None
            if value.is_exposed and not buffer.is_shared:
                return None
            if len(buffer.users) != 1 or len(value.instances) != 1:
                return None
        return known

    # -- by way of the queue ---------------------------------------------------------------------

    def _queue(self, given: Sequence[ValueRecord], then: Then) -> None:
        """Enqueue a run; run it at once if possible."""
        device = self.device
        device.check_open()
        device.check_consistent()
        if not device.tasks.is_idle or device.copies_forbidden or not self._tries:
            if device.queue_up(lambda: self._append(given, then)):
                device.run_queue()
            return
        entries = self._entries()
        forms = self._known.forms(entries) if all(value.is_array for value in given) else None
        numbers: list[int] = []
        cells: dict[int, int] = {}

        def fill() -> None:
            is_alone = not device.tasks.queued.agents
            self._append(given, then)
            if is_alone:
                numbers.extend([value.number for value in entries if value is not None])
                held = self.cells.values
                cells.update({v.number: n for n in self.writes if (v := held[n]) is not None})

        binding = device.run_queue(fill, at_most=len(given))
        if binding is None:
            self._tries -= 1
        elif cells and forms is not None:
            self._remember(binding, forms, entries, numbers, cells)

    def take_back(self) -> bool:
        """After a failure, restore the previous values of the cells, if intact.

        Returns whether all were restored.
        """
        is_back = bool(self.replaced)
        with self.device.lock:
            self.device.check_consistent()
            for number, tensor in self.replaced:
                held, before = self.cells.values[number], tensor._record
                is_missing = held is None or held.status is Status.FAILED
                is_back = is_back and is_missing and before.is_usable
        for number, tensor in self.replaced if is_back else ():
            self.cells.hold(number, tensor)
        self.replaced = []
        return is_back

    def _append(self, given: Sequence[ValueRecord], then: Then) -> None:
        """Enqueue a run; the queue lock is held."""
        cells, held = self.cells, self.cells.values
        self.replaced = [(n, handle_on(v)) for n in self._overwritten if (v := held[n]) is not None]
        values = self._graph.queue(self._inputs(given))
        outputs = [values[number] for number in self._graph.outputs]
        after, gone = cells.changed(dict(zip(self.writes, outputs, strict=True)), rests=False)
        cells.become(after, outputs, gone, then)

    def _inputs(self, given: Sequence[ValueRecord]) -> list[ValueRecord]:
        """Return a value for each input of the graph."""
        arguments, held, inputs = iter(given), self.cells.values, []
        for name, cell in zip(self._graph.input_names, self._cell_of_input, strict=True):
            value = next(arguments) if cell is None else held[cell]
            if value is None:
                raise TaskError(
                    f"input {name!r} of {self._graph.name!r} has no value yet",
                    remedy="run the stage that computes it, or write it",
                )
            inputs.append(value)
        self._graph.link(inputs)
        return inputs

    def _link(self, port: InputPort, argument: Any) -> ValueRecord:
        """Return the value of an argument; a tensor that is copied first may have any type."""
        if type(argument) is Tensor:
            self.device.check_device(argument, port.origin)
            value: ValueRecord = argument._record
            return value
        return link_argument(self.device, self._graph.name, port, argument, False)

    # -- what is remembered ----------------------------------------------------------------------

    def _remember(
        self, binding: Binding, forms: tuple[object, ...], entries: Entries,
        numbers: Sequence[int], cells: Mapping[int, int],
    ) -> None:  # fmt: skip
        """Cache the executable for values of these signatures.

        `numbers`: the entries' numbers in the batch that has just run; `cells`: result number →
        cell.
        """
        effects, values = binding.recording.effects, self.cells.values
        if len(numbers) != len(self.reads):
            return  # A cell was empty.
        carried = []
        for each in effects.carried:
            position = numbers.index(each.entry)
            entry, cell = entries[position], cells[each.result]
            result = values[cell]
            assert entry is not None
            assert result is not None
            if self.reads[position] != cell or entry.desc_key != result.desc_key:
                return  # Another cell or layout: the entry is not overwritten in its cell.
            carried.append(position)
        results = []
        for number, _ in effects.own:
            result = values[cells[number]]
            assert result is not None
            results.append(_Result(cells[number], result.desc, result.desc_key, result.by))
        details = _Details(tuple(results), tuple(carried))
        self._known.remember(binding, forms, numbers, details)
