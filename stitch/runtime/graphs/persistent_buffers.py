"""`PersistentBuffers`: the tensors of a loop by cell number, and `StatefulExecutable`, a task graph
that reads and replaces them.

A cell holds a handle. A result that overwrites an input with its own cell keeps handle and value,
so a settled loop creates only handles. A graph runs at once if the queue is empty and the run
changes nothing but its results; otherwise it is enqueued like any call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stitch.errors import TaskError, UsageError
from stitch.runtime.arguments import link_argument
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.execution import tell_run
from stitch.runtime.graphs.pipeline import PreparedGraph
from stitch.runtime.graphs.replay import Replay, commit
from stitch.runtime.tensor import Tensor, handle_on
from stitch.runtime.values import InputPort, Status, ValueRecord
from stitch.tasks import TaskTable

#: Called when the change of the cells is certain; must be idempotent.
Then = Callable[[], object] | None
#: Limit of failed attempts to run at once; after that it is always enqueued.
MAX_TRIES = 4


class PersistentBuffers:
    """Tensors by cell number. A cell may be empty."""

    def __init__(self, device: RuntimeDevice) -> None:
        self.device = device
        #: Handles by cell. Changed by single calls of C functions, which nothing can interrupt.
        self.held: dict[int, Tensor] = {}

    def tensor(self, number: int) -> Tensor | None:
        """Return a handle on a cell's value, or None if it is empty."""
        with self.device.lock:
            self.device.check_consistent()
            held = self.held.get(number)
            return None if held is None else handle_on(held._record)

    def value(self, number: int) -> ValueRecord | None:
        """Return a cell's value, or None if it is empty."""
        held = self.held.get(number)
        return None if held is None else held._record

    def is_alone(self, number: int) -> bool:
        """Return whether a cell's value may be overwritten: ready, and neither it nor its buffer is
        used elsewhere."""
        with self.device.lock:
            self.device.check_consistent()
            self.device.drain()
            value = self.value(number)
            if value is None or value.handles > 1 or value.status is not Status.READY:
                return False
            buffers = [instance.buffer for instance in value.instances]
            return all(len(buffer.users) <= 1 and buffer.is_open for buffer in buffers)

    def hold(self, number: int, tensor: Tensor | None) -> None:
        """Store a tensor's value in a cell, or empty it."""
        if tensor is None:
            self.drop((number,))
            return
        with self.device.lock:
            self.device.check_consistent()
            self.held[number] = handle_on(tensor._record)
            self.device.drain()

    def drop(self, numbers: Sequence[int]) -> None:
        """Empty cells; their values are freed once unreferenced."""
        with self.device.lock:
            self.device.check_consistent()
            for number in numbers:
                self.held.pop(number, None)
            self.device.drain()

    def close(self) -> None:
        """Empty all cells and release their values."""
        self.drop([*self.held])


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
        self.cells, self.device = cells, cells.device
        self._prepared = PreparedGraph(cells.device, table)
        graph = self._graph = self._prepared.graph
        if len({*graph.outputs}) < len(graph.outputs):
            raise UsageError(
                "each output of a loop stage needs a separate value",
                got="the same value as two outputs",
            )
        self.reads, self.writes = tuple(reads), tuple(writes)
        #: Positions of the arguments of a call.
        self._given = [at for at, cell in enumerate(reads) if cell is None]
        taken = [at for at in graph.taken_over if at < len(reads)]
        self._prepared.cache.reasons = {at: f"{graph.input_names[at]!r}: {lost_by}" for at in taken}
        #: The cells whose values it may overwrite, and handles on these values while enqueued runs
        #: are pending.
        self._overwritten = [cell for at in taken if (cell := reads[at]) is not None]
        self.replaced: list[tuple[int, Tensor]] = []
        #: Host functions may fail by themselves: the queue runs the independent tasks.
        self._tries = 0 if graph.calls_host else MAX_TRIES

    def __call__(self, arguments: Sequence[Any] = (), then: Then = None) -> None:
        """Run once, now or with the queue, with arrays or tensors as arguments.

        `then` is called when it is certain to run; must be idempotent.
        """
        device, cache = self.device, self._prepared.cache
        with device.lock:
            device.check_open()
            device.check_consistent()
            device.drain()
            if device.tasks.is_idle:
                full = self._with_cells(arguments)
                again = cache.settled()
                if again is not None and self._run(again, full, then):
                    return
                again = cache.find(full)
                if again is not None and self._run(again, full, then):
                    return
        # Converting a list may run user code; do not hold the lock.
        ports = [self._prepared.ports[at] for at in self._given]
        given = [self._link(p, a) for p, a in zip(ports, arguments, strict=True)]
        with device.lock:
            self._queue(given, then)

    def _with_cells(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the graph's arguments: of the call, and handles of cells (None if empty)."""
        full: list[Any] = list(map(self.cells.held.get, self.reads))  # type: ignore[arg-type]
        for at, argument in zip(self._given, arguments, strict=True):
            full[at] = argument
        return full

    # -- again -----------------------------------------------------------------------------------

    def _run(self, again: Replay, arguments: Sequence[Any], then: Then) -> bool:
        """Run a replay and store its results; returns False, without running, if it may not.

        A run that has begun to overwrite entries is completed: they are as before or as after it.
        """
        if again.slots.again is not again and not self._find_cells(again):
            return False
        if not again.recorded.carried:
            ran = again.run(arguments)
            if not ran:
                return False
            # Inconsistent until the results have handles.
            self.device.records.is_consistent = False
            self._store(again.cells, then, list(map(handle_on, again.take())))
            if ran is not True:
                tell_run(self.device, again.binding, ran)
            return True
        if not all(map(_may_be_overwritten, again.overwritten)):
            return False
        store = partial(self._change, again.cells, then)
        return again.run_over(arguments, again.overwritten, store, rolls_forward=True)

    def _find_cells(self, again: Replay) -> bool:
        """Find the cells of a replay's results; returns whether those that overwrite an input have
        its cell and layout."""
        recorded, count = again.recorded, len(again.recorded.own)
        order = range(len(self.writes)) if recorded.order is None else recorded.order
        cells = dict(zip(order, self.writes, strict=True))
        again.cells = [cells[at] for at in range(count)]
        for rank, (at, _, (_, desc_key, _)) in enumerate(recorded.carried, count):
            entry = again.entries[at]
            if entry is None or entry.desc_key != desc_key or self.reads[at] != cells[rank]:
                return False
        return True

    def _store(self, cells: Sequence[int], then: Then, handles: Sequence[Tensor]) -> None:
        """Store handles in cells, completely or not at all."""
        commit(self.device.records, partial(self._change, cells, then, handles))

    def _change(self, cells: Sequence[int], then: Then, handles: Sequence[Tensor]) -> None:
        self.cells.held.update(zip(cells, handles, strict=True))
        if then is not None:
            then()

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

        def fill() -> list[ValueRecord] | None:
            is_alone = not device.tasks.queued.agents
            results = self._append(given, then)
            return results if is_alone else None

        inputs = self._inputs(given)
        if self._prepared.run_queued(inputs, fill, at_most=len(given)) is None:
            self._tries -= 1

    def _append(self, given: Sequence[ValueRecord], then: Then) -> list[ValueRecord]:
        """Enqueue a run and return its results; the queue lock is held."""
        held, graph = self.cells.held, self._graph
        self.replaced = [(n, handle_on(held[n]._record)) for n in self._overwritten if n in held]
        values = graph.queue(self._inputs(given))
        handles = [handle_on(values[number]) for number in graph.outputs]
        self._store(self.writes, then, handles)
        return [values[number] for number in sorted(graph.outputs)]

    def take_back(self) -> bool:
        """After a failure, restore the previous values of the cells, if intact.

        Returns whether all were restored.
        """
        is_back = bool(self.replaced)
        with self.device.lock:
            self.device.check_consistent()
            for number, tensor in self.replaced:
                now, before = self.cells.value(number), tensor._record
                is_missing = now is None or now.status is Status.FAILED
                is_back = is_back and is_missing and before.is_usable
        for number, tensor in self.replaced if is_back else ():
            self.cells.hold(number, tensor)
        self.replaced = []
        return is_back

    def _inputs(self, given: Sequence[ValueRecord]) -> list[ValueRecord]:
        """Return a value for each input of the graph."""
        arguments, inputs = iter(given), []
        for name, cell in zip(self._graph.input_names, self.reads, strict=True):
            value = next(arguments) if cell is None else self.cells.value(cell)
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


def _may_be_overwritten(value: ValueRecord) -> bool:
    """Return whether only a cell uses a value and its buffer, or what shares the buffer expects
    it."""
    if value.handles != 1 or value.version or len(value.instances) != 1:
        return False
    buffer = value.instances[0].buffer
    if value.is_exposed and not buffer.is_shared:
        return False
    return buffer.is_open and len(buffer.users) == 1
