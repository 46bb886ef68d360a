"""`PreparedGraph`: a task graph on a device that runs in one call; the fast steady path.

The first call plans the whole graph; later calls check the guard of its executable, run the
generated code, and return the results in its output slots. Arguments are arrays, and tensors that
are read in place. Graphs with host functions run through the queue each time: if a task fails, the
queue runs the independent ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.argument_kinds import arranged
from stitch.program import Array
from stitch.runtime.arguments import link_argument
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.graphs.placed_graph import PlacedGraph
from stitch.runtime.graphs.replay import Details, Replay, ReplayTarget, only_of_leases
from stitch.runtime.plan_cache import Entries, PlanCache
from stitch.runtime.recording import (
    BEGUN,
    COMPLETE,
    UNTOUCHED,
    Binding,
    Executable,
    GeneratedRunner,
    Ran,
    perform,
    stopped_by,
    tell_run,
    tell_stopped,
)
from stitch.runtime.tensor import Tensor, handle_on, handles_on
from stitch.runtime.values import (
    InstanceRecord,
    InstanceRef,
    OutputSlots,
    Status,
    ValueRecord,
)
from stitch.tasks import TaskTable


class PreparedGraph:
    """A task graph on a device, called with arrays or tensors.

    A call returns the outputs of the graph, ready: one tensor, or a tuple. Tensors passed to inputs
    in `takes` are consumed, as if donated.

    Raises:
        UsageError: The graph has no tasks, or a program is loaded on another device.
    """

    def __init__(
        self, device: RuntimeDevice, table: TaskTable, takes: Collection[str] = (), title: str = ""
    ) -> None:
        self.device, self._graph = device, PlacedGraph(device, table, title)
        graph, self._title = self._graph, self._graph.title
        self.calls_host, self._ports = graph.calls_host, graph.ports
        self._count = len(self._ports)
        #: Numbers of its results in the order of tasks, and their order as graph outputs if it
        #: differs.
        self._given = sorted(set(graph.outputs))
        self._order = _unless_same([self._given.index(number) for number in graph.outputs])
        #: Descriptors of its results, their keys, and the tasks that make them.
        self._outputs = tuple([graph.made[number] for number in self._given])
        #: Consumed inputs, and the reason to report for their values.
        gone = {
            at: f"given away to {self._title}"
            for at, name in enumerate(graph.input_names)
            if name in takes
        }
        gone |= {at: why for at, why in graph.taken_over.items() if at < self._count}
        self._donated = tuple(sorted(gone.items()))
        self._known: PlanCache[Details] = PlanCache(device)
        #: The executable whose output slots have replay data.
        self._last: Executable | None = None
        #: State checked by each call.
        self._dropped, self._tasks = device.deaths.dropped, device.tasks
        self._ended = device.deaths.ended
        self._lock, self._records = device.quick_lock, device.records
        self._runs_here = device.holds_run_lock

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the graph on arrays or tensors, by position or name; returns its outputs, ready."""
        if named or len(arguments) != self._count:
            arguments = arranged(self._title, self._input_types, arguments, named)
        # A local variable: an attribute that only the instance has costs 20 ns more.
        holds_run_lock = self._runs_here
        with self.device.lock if holds_run_lock() else self._lock:
            handle = self._into_dropped(arguments)
            if handle is not None:
                return handle
            results = self._run_past_queue(arguments)
            if results is not None:
                return results
        # Converting a list may run user code; do not hold the lock.
        given = self._linked(arguments)
        with self.device.lock:
            return self._run(given)

    def _into_dropped(self, arguments: Sequence[Any]) -> Tensor | None:
        """Run into the buffer of the last result, if its last handle was just dropped.

        Returns None otherwise. Graphs that run in turn leave each other's pending notes alone.
        """
        dropped = self._dropped
        # Process pending notes first: an export of a result may have ended.
        if not dropped or self._ended or (len(dropped) > 1 and not only_of_leases(dropped)):
            return None
        value = dropped[0]
        lease = value.lease
        again = None if lease is None else lease.again
        if (
            again is None
            or again.known is not self._known
            or again.generation != self._records.generation
            or again.note is None
            or value.handles != 1
            # Else an interrupted window may read what the last run made.
            or not self._tasks.is_idle
            or not self._records.is_consistent
        ):
            return None
        ran = again.ran(arguments)
        if not ran:
            return None
        # The result is unreferenced, so reuse its record; its pending note is replaced by the new
        # handle.
        handle, note = Tensor(), again.note
        # Atomic under the GIL: no call in between.
        del dropped[0]
        handle._record = value
        handle.__del__ = note
        if ran is not True:
            tell_run(self.device, again.binding, ran)
        return handle

    def run(self, arguments: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...]:
        """As a call; the caller holds the run lock."""
        handle = self._into_dropped(arguments)
        if handle is not None:
            return handle
        results = self._run_past_queue(arguments)
        return self._run(self._linked(arguments)) if results is None else results

    def repeat(self, arguments: Sequence[Any]) -> Replay | None:
        """Return a replay for these arguments, for a caller that copies the results at once.

        It takes the same lent tensors and other arrays. Returns None if no replay data exists. The
        caller holds the run lock.
        """
        if self._dropped or self._ended:
            self.device.run_queue()
        lease = None if self._last is None else self._last.ready()
        again: ReplayTarget | None = None if lease is None else lease.again
        if (
            lease is None
            or again is None
            or again.known is not self._known
            or again.generation != self._records.generation
            # The replay data may be older than the last run, which may have used the queue.
            or not again.ran_on(arguments)
        ):
            return None
        return Replay.of(again, lease)

    def _results(
        self, lease: OutputSlots, binding: Binding, details: Details, ran: Ran
    ) -> Tensor | tuple[Tensor, ...]:
        """Return handles on the results that a run left in idle slots."""
        device = self.device
        now = device.tasks.queued.number
        # Inconsistent until the results have handles.
        device.records.is_consistent = False
        values = lease.reuse(now)
        if values is None:
            values = [ValueRecord(device, *output) for output in details.own]
            lease.take(values, now)
        results = handles_on(values)
        device.records.is_consistent = True
        if ran is not True:
            tell_run(device, binding, ran)
        return results

    def _run_past_queue(self, arguments: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...] | None:
        """Run a cached executable for these arguments; None if there is none or its guard fails."""
        device, dropped, records = self.device, self._dropped, self._records
        if device.holds_queue_lock():
            device.check_outside()
        if device.is_closed:
            device.check_open()
        device.check_consistent()
        if self.calls_host:
            return None
        if self._ended or not self._tasks.is_idle or not only_of_leases(dropped):
            device.run_queue()
        lease = None if self._last is None else self._last.ready()
        again: ReplayTarget | None = None if lease is None else lease.again
        if (
            lease is not None
            and again is not None
            and again.known is self._known
            and again.generation == records.generation
        ):
            ran = again.ran(arguments)
            if ran:
                results = self._results(lease, again.binding, again.details, ran)
                return _in_order(results, again.details.order)
        if dropped:
            device.run_queue()
        arrays: list[Array] = []
        values: list[ValueRecord | None] = []
        for port, argument in zip(self._ports, arguments, strict=True):
            if type(argument) is Tensor:
                values.append(argument._record)
            elif (
                type(argument) is np.ndarray
                and argument.dtype is port.dtype
                and argument.shape == port.shape
            ):
                arrays.append(argument)
                values.append(None)
            else:
                return None
        entries = tuple(values)
        given: Sequence[tuple[ValueRecord, str]] = ()
        if self._donated:
            given = [(value, by) for at, by in self._donated if (value := entries[at]) is not None]
            for value, _ in given:
                for instance in value.instances:
                    if len(instance.buffer.users) != 1 or not instance.buffer.is_open:
                        return None
        exposed = self._known.count_exposed(entries)
        known = None if exposed is None else self._known.find(entries, exposed)
        binding = None if known is None else known.binding(device)
        if known is None or binding is None:
            return None
        # The executable may take the arrays in another order.
        all_given = known.is_in_order
        if not all_given:
            arrays = known.arrays(entries, arguments)
        lease = binding.lease
        assert lease is not None, "known recordings have leases"
        if given:
            return self._run_donated(binding, lease, known.details, entries, arrays, given)
        generation = records.generation
        try:
            ran = perform(device, binding, arrays)
        except BaseException as error:
            tell_stopped(device, binding, stopped_by(error))
            raise
        results = self._results(lease, binding, known.details, ran)
        straight = binding.straight
        if isinstance(straight, GeneratedRunner) and all_given and not known.exports:
            note = None
            if lease.is_single and isinstance(results, Tensor) and known.details.order is None:
                note = results.__del__
            lease.again = ReplayTarget(
                device, self._known, generation, entries if any(entries) else None,
                tuple([value is not None and value.is_exposed for value in entries]),
                binding, known.details, straight, straight.run, note,
            )  # fmt: skip
            self._last = binding.recording
        return _in_order(results, known.details.order)

    def _run_donated(
        self, binding: Binding, lease: OutputSlots, details: Details, entries: Entries,
        arrays: list[Array], given: Sequence[tuple[ValueRecord, str]],
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Run with donated arguments, which are consumed together with their copies.

        If it raises, they remain the caller's: unchanged, or as a run that had begun to overwrite
        them left them.
        """
        device, records = self.device, self.device.records
        lying = [value.instances for value, _ in given]
        #: Entries that the result replaces with the same layout.
        same = {at for at, ref, _ in details.carried if _lies_as(entries[at], ref)}
        overwritten = [value for at, value in enumerate(entries) if at not in same]
        progress = binding.bound.progress if binding.recording.overwrites else [0, UNTOUCHED]
        undo = partial(self._give_back, given, lying, progress, overwritten)
        # Atomic: no call in between.
        progress[1] = UNTOUCHED
        records.pending_recovery = undo
        records.is_consistent = False
        try:
            ran = perform(device, binding, arrays)
            now = device.tasks.queued.number
            values = [ValueRecord(device, *output) for output in details.own]
            lease.take(values, now)
            for position, ref, output in details.carried:
                entry, value = entries[position], ValueRecord(device, *output)
                assert entry is not None, "an array of the call is overwritten by nobody"
                records.hand_on(entry, value, ref)
                value.last_used = now
                values.append(value)
            results = handles_on(values)
        except BaseException as error:
            stopped = stopped_by(error)
            undo()
            tell_stopped(device, binding, stopped)
            raise
        records.pending_recovery = partial(self._take_over, given)
        self._take_over(given)
        if ran is not True:
            tell_run(device, binding, ran)
        return _in_order(results, details.order)

    def _give_back(
        self, given: Sequence[tuple[ValueRecord, str]],
        lying: Sequence[Sequence[InstanceRecord]], progress: Sequence[int],
        overwritten: Sequence[ValueRecord | None],
    ) -> None:  # fmt: skip
        """Return donated values to the caller after a failure. Idempotent.

        A value is marked as lost if it was partly overwritten, or by a result of another layout
        (`overwritten`).
        """
        records = self.device.records
        for (value, by), instances in zip(given, lying, strict=True):
            for instance in instances:
                instance.buffer.users = [value]
            value.instances, value.status = instances, Status.READY
            if progress[1] == BEGUN or (progress[1] == COMPLETE and value in overwritten):
                records.release(value)
                value.by, value.status = by, Status.LOST
        # Atomic: no call in between.
        records.pending_recovery = None
        # Other results of the run have no handles: the recovery drops them.
        records.is_consistent = progress[1] != COMPLETE

    def _take_over(self, given: Sequence[tuple[ValueRecord, str]]) -> None:
        """Mark donated values as consumed. Idempotent."""
        records = self.device.records
        for value, by in given:
            records.release(value)
            value.consumed, value.by = True, by
            self.device.lost_all(value)
            value.status = Status.FREED
        # Atomic: no call in between.
        records.pending_recovery = None
        records.is_consistent = True

    # -- by way of the queue ---------------------------------------------------------------------

    def pending(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Queue the graph on arrays or tensors, by position; return its outputs, pending.

        If a task fails, reading the outputs that do not depend on it still succeeds.
        """
        given = self._linked(arguments)
        with self.device.lock:
            self.device.check_open()
            self.device.run_queue()
            handles = tuple([handle_on(value) for value in self._queue(given)])
        return handles if self._order is None else tuple([handles[at] for at in self._order])

    def _linked(self, arguments: tuple[Any, ...]) -> list[ValueRecord]:
        """Return the values of the arguments, by input."""
        device, ports = self.device, self._ports
        given = [
            link_argument(device, self._graph.name, port, argument, True)
            for port, argument in zip(ports, arguments, strict=True)
        ]
        self._graph.link(given)
        return given

    def _run(self, given: Sequence[ValueRecord]) -> Tensor | tuple[Tensor, ...]:
        """Run through the queue, as one batch of any length."""
        device = self.device
        device.check_open()
        device.run_queue()
        handles: tuple[Tensor, ...] = ()
        #: Numbers of the arguments and of the results in the batch.
        numbers: list[int] = []
        made: list[int] = []
        is_queued = False

        def fill() -> None:
            nonlocal handles, is_queued
            # If another thread has enqueued tasks meanwhile, these run first.
            if not device.tasks.queued.agents:
                results = self._queue(given)
                handles = tuple([handle_on(value) for value in results])
                numbers.extend([value.number for value in given])
                made.extend([value.number for value in results])
                is_queued = True

        binding = None
        entries = tuple([None if value.is_array else value for value in given])
        forms: tuple[object, ...] = ()
        while not is_queued:
            forms = self._known.forms(entries)
            binding = device.run_queue(fill)
        if binding is not None and binding.lease is not None and not self.calls_host:
            self._remember(binding, forms, numbers, made)
        return _in_order(handles[0] if len(handles) == 1 else handles, self._order)

    def _remember(
        self, binding: Binding, forms: tuple[object, ...], numbers: list[int], made: list[int]
    ) -> None:
        """Cache the executable that has just run for values of these signatures."""
        recording = binding.recording
        carried = recording.effects.carried
        lying = {n: at for at, n in enumerate([*recording.own, *[c.result for c in carried]])}
        outputs = dict(zip(made, self._outputs, strict=True))
        order = range(len(made)) if self._order is None else self._order
        details = Details(
            tuple([outputs[number] for number in recording.own]),
            tuple([(numbers.index(c.entry), c.ref, outputs[c.result]) for c in carried]),
            _unless_same([lying[made[position]] for position in order]),
        )
        self._known.remember(binding, forms, numbers, details)

    def _queue(self, given: Sequence[ValueRecord]) -> list[ValueRecord]:
        """Enqueue the graph into the empty queue, completely or not at all; returns the results."""
        tasks = self.device.tasks
        for value in given:
            value.check_usable()
        try:
            values = self._graph.queue(given)
        except BaseException:
            # The queue was empty before: empty it, and undo donations.
            for value in given:
                value.consumed = False
            tasks.start_anew()
            raise
        for at, by in self._donated:
            given[at].consumed, given[at].by = True, by
        return [values[number] for number in self._given]

    # -- names -----------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        raise TypeError(f"{self._title} belongs to its device: load its programs there again")

    def __repr__(self) -> str:
        inputs = ", ".join([f"{name}: {kind}" for name, kind in self._input_types])
        outputs = ", ".join(desc.text() for desc, _, _ in self._outputs)
        count = self._graph.task_count
        tasks = f"{count} task{'s' * (count != 1)}"
        return f"<{type(self).__name__}({inputs}) -> {outputs}; {tasks} on {self.device!r}>"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return self._graph.input_names

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return self._graph.output_names

    @property
    def _input_types(self) -> list[tuple[str, str]]:
        kinds = [port.type.text() for port in self._ports]
        return list(zip(self.input_names, kinds, strict=True))


def _lies_as(entry: ValueRecord | None, ref: InstanceRef) -> bool:
    """Return whether a result has the layout of the entry that it replaces."""
    return entry is not None and [i.desc_key for i in entry.instances] == [ref.desc_key]


def _in_order(
    results: Tensor | tuple[Tensor, ...], order: Sequence[int] | None
) -> Tensor | tuple[Tensor, ...]:
    """Return the results of a run in the order of the graph's outputs; `order`: None if equal."""
    if order is None:
        return results
    handles = results if isinstance(results, tuple) else (results,)
    return tuple([handles[at] for at in order])


def _unless_same(order: Sequence[int]) -> tuple[int, ...] | None:
    """Return an order as a tuple, or None for the identity."""
    return None if list(order) == list(range(len(order))) else tuple(order)
