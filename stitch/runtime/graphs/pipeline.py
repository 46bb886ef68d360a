"""`PreparedGraph`: a task graph on a device that runs in one call, and `RuntimePipeline`, a fixed
chain of loaded programs.

The first call plans the whole graph; later calls run it again by a `Replay` into the output slots
that are next. Graphs with host functions run through the queue each time: if a task fails, the
queue runs the independent ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stitch.argument_kinds import BOOL, arranged, takes
from stitch.errors import LinkError, UsageError
from stitch.linker import Wire, chain_wires, handed_on
from stitch.on_demand import late_import
from stitch.program import FreeNames
from stitch.runtime.arguments import link_argument
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.execution import Binding, tell_run
from stitch.runtime.graphs.placed_graph import PlacedGraph
from stitch.runtime.graphs.replay import Recorded, Replay, ReplayCache, only_of_slots
from stitch.runtime.lending import lent_arguments
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.tensor import Tensor, handle_on, handles_on
from stitch.runtime.values import Status, ValueRecord
from stitch.tasks import Future, HasProgram, TaskGraph, TaskTable
from stitch.ttb import Binary

#: A slot: number of a program, and position among its inputs or outputs.
Slot = tuple[int, int]


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
        self.device = device
        self.graph = graph = PlacedGraph(device, table, title)
        self._title, self.ports, self._count = graph.title, graph.ports, len(graph.ports)
        self.calls_host = graph.calls_host
        #: Numbers of its results in the order of tasks, and their order as graph outputs if it
        #: differs.
        self._results = sorted(set(graph.outputs))
        self._order = _unless_same([self._results.index(number) for number in graph.outputs])
        #: Consumed inputs, and the reason to report for their values.
        gone = {
            at: f"given away to {self._title}"
            for at, name in enumerate(graph.input_names)
            if name in takes
        }
        gone |= {at: why for at, why in graph.taken_over.items() if at < self._count}
        self._donated = tuple(sorted(gone.items()))
        self.cache = ReplayCache(device, graph.ports, gone)
        #: State checked by each call.
        self._dropped, self._tasks = device.deaths.dropped, device.tasks
        self._ended = device.deaths.ended
        self._lock, self._records = device.quick_lock, device.records
        self._runs_here, self._lends = device.holds_run_lock, device.lends

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the graph on arrays or tensors, by position or name; returns its outputs, ready."""
        if named or len(arguments) != self._count:
            arguments = arranged(self._title, self._input_types, arguments, named)
        if self._lends:
            arguments = lent_arguments(self.device, arguments, self.cache.reasons)
        # A local variable: an attribute that only the instance has costs 20 ns more.
        holds_run_lock = self._runs_here
        with self.device.lock if holds_run_lock() else self._lock:
            results = self._into_dropped(arguments)
            if results is None:
                results = self._run_again(arguments)
            if results is not None:
                return results
        # Converting a list may run user code; do not hold the lock.
        given = self._linked(arguments)
        with self.device.lock:
            return self._run(given)

    def run(self, arguments: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...]:
        """As a call; the caller holds the run lock."""
        results = self._into_dropped(arguments)
        if results is None:
            results = self._run_again(arguments)
        return self._run(self._linked(arguments)) if results is None else results

    # -- again -----------------------------------------------------------------------------------

    def _into_dropped(self, arguments: Sequence[Any]) -> Tensor | tuple[Tensor, ...] | None:
        """Run into the buffer of the last result, if its last handle was just dropped.

        Returns None otherwise. Graphs that run in turn leave each other's pending notes alone.
        """
        dropped, records = self._dropped, self._records
        # Process pending notes first: an export of a result may have ended.
        if not dropped or self._ended or (len(dropped) > 1 and not only_of_slots(dropped)):
            return None
        value = dropped[0]
        slots = value.slots
        again: Replay | None = None if slots is None else slots.again
        if (
            again is None
            or again.cache is not self.cache
            or again.generation != records.generation
            or again.note is None
            or value.handles != 1
            # Else an interrupted batch may read what the last run made.
            or not self._tasks.is_idle
            or not records.is_consistent
        ):
            return None
        ran = again.run(arguments)
        if not ran:
            return None
        # The result is unreferenced, so reuse its record; its pending note is replaced by the new
        # handle.
        handle, note = Tensor(), again.note
        # Atomic: no call in between.
        del dropped[0]
        handle._record = value
        handle.__del__ = note
        if ran is not True:
            tell_run(self.device, again.binding, ran)
        return handle

    def _run_again(self, arguments: Sequence[Any]) -> Tensor | tuple[Tensor, ...] | None:
        """Run what is remembered for these arguments; None if nothing is or its guard fails."""
        device, dropped, records = self.device, self._dropped, self._records
        if device.holds_queue_lock():
            device.check_outside()
        if device.is_closed:
            device.check_open()
        device.check_consistent()
        if self._ended or not self._tasks.is_idle or not only_of_slots(dropped):
            device.run_queue()
        again = self.cache.settled()
        ran = again is not None and again.run(arguments)
        if not ran:
            if dropped:
                device.run_queue()
            again = self.cache.find(arguments)
            if again is None:
                return None
            given = [(v, why) for at, why in self._donated if (v := again.entries[at]) is not None]
            if given:
                return self._run_donated(again, arguments, given)
            ran = again.run(arguments)
            if not ran:
                return None
        assert again is not None, "it ran"
        # Inconsistent until the results have handles.
        records.is_consistent = False
        results = handles_on(again.take())
        records.is_consistent = True
        if ran is not True:
            tell_run(self.device, again.binding, ran)
        return _in_order(results, again.recorded.order)

    def repeat(self, arguments: Sequence[Any]) -> Replay | None:
        """Return the replay that runs next on these arguments, for a caller of `Replay.copies`.

        Returns None if there is none. The caller holds the run lock.
        """
        if self._dropped or self._ended:
            self.device.run_queue()
        again = self.cache.settled()
        return again if again is not None and again.can_copy(arguments) else None

    def _run_donated(
        self, again: Replay, arguments: Sequence[Any], given: Sequence[tuple[ValueRecord, str]]
    ) -> Tensor | tuple[Tensor, ...] | None:
        """Run with donated tensors, which are consumed together with their copies.

        If it raises, they remain the caller's: unchanged, or as a run that had begun to overwrite
        them left them. Returns None, without running, if one is used elsewhere.
        """
        for value, _ in given:
            for instance in value.instances:
                if len(instance.buffer.users) != 1 or not instance.buffer.is_open:
                    return None
        device = self.device
        carried = [ValueRecord(device, *made) for _, _, made in again.recorded.carried]
        kept, results = list(map(handle_on, carried)), list[Tensor]()

        def consume(own: list[Tensor]) -> None:
            for entry, why in given:
                device.records.release(entry)
                entry.consumed, entry.by = True, why
                device.lost_all(entry)
                entry.status = Status.FREED
            results[:] = [*own, *kept]

        if not again.run_over(arguments, carried, consume, rolls_forward=False):
            return None
        return _in_order(results[0] if len(results) == 1 else tuple(results), again.recorded.order)

    # -- by way of the queue ---------------------------------------------------------------------

    def pending(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Queue the graph on arrays or tensors, by position; return its outputs, pending.

        If a task fails, reading the outputs that do not depend on it still succeeds.
        """
        given = self._linked(arguments)
        with self.device.lock:
            self.device.check_open()
            self.device.run_queue()
            handles = tuple(map(handle_on, self._queue(given)))
        return handles if self._order is None else tuple([handles[at] for at in self._order])

    def _linked(self, arguments: Sequence[Any]) -> list[ValueRecord]:
        """Return the values of the arguments, by input."""
        given = [
            link_argument(self.device, self.graph.name, port, argument, True)
            for port, argument in zip(self.ports, arguments, strict=True)
        ]
        self.graph.link(given)
        return given

    def _run(self, given: Sequence[ValueRecord]) -> Tensor | tuple[Tensor, ...]:
        """Run through the queue, as one batch of any length."""
        device = self.device
        device.check_open()
        device.run_queue()
        handles: tuple[Tensor, ...] | None = None

        def fill() -> list[ValueRecord] | None:
            nonlocal handles
            # If another thread has enqueued tasks meanwhile, these run first.
            if device.tasks.queued.agents:
                return None
            results = self._queue(given)
            handles = tuple(map(handle_on, results))
            return results

        while handles is None:
            self.run_queued(given, fill)
        return _in_order(handles[0] if len(handles) == 1 else handles, self._order)

    def run_queued(
        self, given: Sequence[ValueRecord], fill: Callable[[], Sequence[ValueRecord] | None],
        at_most: int | None = None,
    ) -> Binding | None:  # fmt: skip
        """Run the queue and remember what ran as one plan.

        Args:
            given: The values of the arguments.
            fill: Queues the graph and returns its results; None if other tasks are there too.
            at_most: See `TaskQueue.run`.
        """
        entries = [None if value.is_array else value for value in given]
        signature = self.cache.signature(entries)
        #: Numbers of the arguments and of the results in the batch.
        numbers, made = list[int](), list[int]()

        def fill_and_note() -> None:
            results = fill()
            if results is not None:
                numbers.extend([value.number for value in given])
                made.extend([value.number for value in results])

        binding = self.device.run_queue(fill_and_note, at_most)
        if binding is None or binding.slots is None or self.calls_host or not made:
            return binding
        executable, carried = binding.executable, binding.executable.effects.carried
        lying = {n: at for at, n in enumerate([*executable.own, *[c.result for c in carried]])}
        outputs = {n: self.graph.made[v] for n, v in zip(made, self._results, strict=True)}
        order = range(len(made)) if self._order is None else self._order
        recorded = Recorded(
            executable, tuple(numbers), tuple([outputs[number] for number in executable.own]),
            tuple([(numbers.index(c.entry), c.ref, outputs[c.result]) for c in carried]),
            _unless_same([lying[made[position]] for position in order]),
        )  # fmt: skip
        self.cache.remember(signature, binding, recorded)
        return binding

    def _queue(self, given: Sequence[ValueRecord]) -> list[ValueRecord]:
        """Enqueue the graph into the empty queue, completely or not at all; returns the results."""
        for value in given:
            value.check_usable()
        try:
            values = self.graph.queue(given)
        except BaseException:
            # The queue was empty before: empty it, and undo donations.
            for value in given:
                value.consumed = False
            self._tasks.start_anew()
            raise
        for at, by in self._donated:
            given[at].consumed, given[at].by = True, by
        return [values[number] for number in self._results]

    # -- names -----------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        raise TypeError(f"{self._title} belongs to its device: load its programs there again")

    def __repr__(self) -> str:
        inputs = ", ".join([f"{name}: {kind}" for name, kind in self._input_types])
        outputs = ", ".join([self.graph.made[number][0].text() for number in self._results])
        count = self.graph.task_count
        tasks = f"{count} task{'s' * (count != 1)}"
        return f"<{type(self).__name__}({inputs}) -> {outputs}; {tasks} on {self.device!r}>"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return self.graph.input_names

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return self.graph.output_names

    @property
    def _input_types(self) -> list[tuple[str, str]]:
        kinds = [port.type.text() for port in self.ports]
        return list(zip(self.input_names, kinds, strict=True))


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


class RuntimePipeline(PreparedGraph):
    """Loaded programs chained by position: `pipeline(x)` is `c(b(a(x)))` with one plan.

    If the numbers of outputs and inputs differ, outputs feed activations of the same name
    (`chain_wires`), and may skip programs. Inputs of later programs that no output feeds are inputs
    of the pipeline.

    Args:
        programs: The programs, in the order in which they run.
        link: Link the programs into one, which is loaded beside them, with bit-identical results.
        fuse: As `link`, and let the executor fuse operations across programs: the last bits of
            results may differ.

    Raises:
        UsageError: There is no program, or the programs are on several devices.
        LinkError: An output does not match the input that it feeds; the programs cannot be linked,
            or the executor does not promise that they then give the same bits.
        OutOfMemoryError: The linked program does not fit.
    """

    @takes(link=BOOL, fuse=BOOL)
    def __init__(
        self, programs: Iterable[LoadedProgram], *, link: bool = False, fuse: bool = False
    ) -> None:
        self.programs = tuple(programs) if isinstance(programs, Iterable) else ()
        strangers = [p for p in self.programs if not isinstance(p, LoadedProgram)]
        if not self.programs or strangers:
            got = strangers[0] if strangers else programs
            raise UsageError(
                "a pipeline needs at least one program that is loaded on a device",
                expected="programs: a list of results of device.load",
                got=f"{type(got).__name__}: {' '.join(repr(got).split())[:60]}",
                remedy="load files or models first: Pipeline([device.load(one) for one in (a, b)])",
            )
        device = self.programs[0].device
        feeds: list[dict[int, tuple[int, int]]] = [{} for _ in self.programs]
        wires = chain_wires(
            [loaded.program for loaded in self.programs], strict_types=device.strict_types
        )
        for wire in wires:
            feeds[wire.consumer][wire.input] = (wire.producer, wire.output)
        results = _results_of(self.programs)
        graph, _ = chain_graph(self.programs, feeds, "pipeline", results)
        if link or fuse:
            linked = _linked(self.programs, wires, results, graph.table(), fuse)
            self.programs = (linked,)
            graph, _ = chain_graph(self.programs, [{}], "pipeline")
        super().__init__(device, graph.table(), title="the pipeline")


def chain_graph(
    programs: Sequence[HasProgram],
    feeds: Sequence[Mapping[int, Slot]],
    name: str,
    results: Sequence[Slot] = (),
    owners: Sequence[str] = (),
) -> tuple[TaskGraph, tuple[Slot, ...]]:
    """Return the graph, and the slots of its inputs in order: by program, then by position.

    Args:
        programs: Loaded programs, or others that a task graph calls, in order.
        feeds: For each program: input position → the output that feeds it.
        name: Name of the graph.
        results: Slots of the graph's outputs; by default, the outputs of the last program.
        owners: Program names to make slot names unique; by default, the programs' names.
    """
    parts = [source.program for source in programs]
    owners = owners or [part.name for part in parts]
    sources = tuple([
        (number, position)
        for number, part in enumerate(parts)
        for position in range(len(part.inputs))
        if position not in feeds[number]
    ])  # fmt: skip
    graph = TaskGraph(name)
    names = _told_apart([(k, owners[k], parts[k].inputs[i].name) for k, i in sources])
    inputs = {
        slot: graph.input(parts[slot[0]].input_desc(slot[1]), called)
        for slot, called in zip(sources, names, strict=True)
    }
    made: list[tuple[Future, ...]] = []
    for number, source in enumerate(programs):
        fed, given = feeds[number], []
        for position in range(len(parts[number].inputs)):
            feed = fed.get(position)
            given.append(inputs[number, position] if feed is None else made[feed[0]][feed[1]])
        outputs = graph.call(source, *given)
        made.append(outputs if isinstance(outputs, tuple) else (outputs,))
    last = len(parts) - 1
    results = results or [(last, position) for position in range(len(made[last]))]
    names = _told_apart([(k, owners[k], parts[k].outputs[o].name) for k, o in results])
    for (number, position), called in zip(results, names, strict=True):
        graph.output(made[number][position], called)
    return graph, sources


def _told_apart(slots: Sequence[tuple[int, str, str]]) -> list[str]:
    """Return unique names for slots, given as (program number, program name, slot name).

    A name used by several programs is qualified with the program's name, and with its number if
    that is not unique.
    """
    times = Counter(name for _, _, name in slots)
    times_in = Counter((owner, name) for _, owner, name in slots)
    free, apart = FreeNames(), []
    for number, owner, name in slots:
        if times_in[owner, name] > 1:
            called = f"{owner}.{number}.{name}"
        else:
            called = name if times[name] == 1 else f"{owner}.{name}"
        apart.append(free.free(called, owner))
    return apart


def _linked(
    programs: Sequence[LoadedProgram], wires: Sequence[Wire], results: Sequence[Slot],
    table: TaskTable, fuse: bool,
) -> LoadedProgram:  # fmt: skip
    """Link the programs of a pipeline and load the whole, with the slots that `table` has."""
    device, parts = programs[0].device, [loaded.program for loaded in programs]
    for loaded in programs:
        device.check_program(loaded)
        # The whole has their constants, which are not verified again.
        loaded.verify()
    obstacle = "" if fuse else device.backend.executor.link_obstacle(parts)
    if obstacle:
        raise LinkError(
            "linked into one, the programs of this pipeline would not give the same bits",
            expected="programs of which the executor promises equal bits",
            got=obstacle,
            remedy="Pipeline(programs, fuse=True) links them, and the last bits may differ; "
            "Pipeline(programs) runs them one after the other",
        )
    with late_import():
        from stitch.linker import link_programs
    kept, machine = sorted(results), device.machine.shape
    whole = link_programs(
        parts, wires, machine=machine, keep=kept, strict_types=device.strict_types
    )
    inputs = zip(whole.inputs, table.inputs, strict=True)
    outputs = zip([whole.outputs[kept.index(slot)] for slot in results], table.outputs, strict=True)
    whole = replace(
        whole,
        inputs=tuple([replace(slot, name=named.name) for slot, named in inputs]),
        outputs=tuple([replace(slot, name=named.name) for slot, named in outputs]),
    )
    linked: LoadedProgram = device.load(Binary((whole,), machine, "linked by a pipeline"))
    return linked


def _results_of(programs: Sequence[LoadedProgram]) -> list[Slot]:
    """Return the outputs of a pipeline: those of the last program, then states of the others."""
    *others, last = programs
    results = [(len(others), at) for at in range(len(last.outputs))]
    for number, loaded in enumerate(others):
        own = {*handed_on(loaded.program)}
        results += [(number, at) for at in range(len(loaded.outputs)) if at not in own]
    return results
