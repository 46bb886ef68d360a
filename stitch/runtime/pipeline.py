"""`RuntimePipeline`: a fixed chain of loaded programs, called in one go; the fast steady path.

The first call records the whole chain; later calls with arrays look whether the recording's guard
still holds, run its code, and hand out what it left in one of its leases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import copy_context
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.linker import chain_wires
from stitch.program import Array
from stitch.runtime.arguments import check_donations, link_argument
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.events import PlanStopped
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.recording import Binding, Recording, perform
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import Lease, Status, ValueRecord

#: Forms of inputs whose recordings a pipeline remembers.
MAX_FORMS = 8


class RuntimePipeline:
    """Loaded programs chained by position: `pipeline(x)` is `c(b(a(x)))` with one plan.

    Where numbers of slots differ, outputs feed activations of their name (`chain_wires`), and may
    go around programs. Inputs of later programs that no output feeds are inputs of the pipeline.
    Raises `UsageError` for no program or several devices, `LinkError` where two do not fit.
    """

    def __init__(self, programs: Iterable[LoadedProgram]) -> None:
        self.programs = tuple(programs) if isinstance(programs, Iterable) else ()
        if not self.programs or not all(isinstance(p, LoadedProgram) for p in self.programs):
            raise UsageError(
                "a pipeline needs at least one program, loaded on a device",
                expected="programs: a list of what device.load gave",
                got=type(programs).__name__,
            )
        device = self.programs[0].device
        assert isinstance(device, RuntimeDevice), "devices load programs"
        self.device = device
        if any(p.device is not self.device for p in self.programs):
            raise UsageError("the programs of a pipeline are loaded on one device")
        wires = chain_wires([loaded.program for loaded in self.programs])
        self._feeds = {(w.consumer, w.input): (w.producer, w.output) for w in wires}
        self.inputs = tuple(
            (stage, index)
            for stage, program in enumerate(self.programs)
            for index in range(len(program.ports))
            if (stage, index) not in self._feeds
        )
        ports = [self.programs[s].ports[i] for s, i in self.inputs]
        self._ports = tuple(ports)
        self._count = len(ports)
        self._outputs, self._maker = self.programs[-1].outputs, self.programs[-1].name
        #: What its last run on arrays was a run of.
        self._recording: Recording | None = None
        #: Of recent runs, by the forms of what was given (None: an array); and the numbers that
        #: this has in every one of them.
        self._recordings: dict[tuple[object, ...], Recording] = {}
        self._numbers: tuple[int, ...] = ()

    def __call__(self, *arguments: Any, **named: Any) -> Tensor | tuple[Tensor, ...]:
        """Run the chain on arrays or tensors; gives the last program's outputs, ready."""
        if named or len(arguments) != self._count:
            arguments = self._arrange(arguments, named)
        device = self.device
        with device.lock:
            if device.dropped:
                device.drain()
            recording = self._recording
            if (
                recording is not None
                and recording.generation == device.records.generation
                and not device.copies_forbidden
                and not device.queued.agents
                and recording.idle
            ):
                lease = recording.idle[-1]
                binding = lease.plain
                straight = None if binding is None else binding.straight
                if straight is not None and straight.observers == device.observers:
                    assert binding is not None
                    try:
                        ran = copy_context().run(straight.run, arguments)
                    except BaseException as error:
                        self._stopped(binding, straight.steps_done(error))
                        raise
                    if ran:
                        results = self._results(lease)
                        if ran is not True:
                            device.tell_run(binding, ran)
                        return results
            again = self._again(arguments)
            return self._run(arguments) if again is None else again

    def _stopped(self, binding: Binding, done: int) -> None:
        """Tell of the steps that were done when one raised."""
        if done:
            self.device.events.report(PlanStopped(binding.index, binding.plan, done))

    def _results(self, lease: Lease[Binding]) -> Tensor | tuple[Tensor, ...]:
        """Handles on what a run has just left in a lease."""
        device = self.device
        again = lease.take_again(device.queued.number)
        if again is not None:
            if len(again) == 1:
                return Tensor(again[0])
            return tuple([Tensor(value) for value in again])
        values = []
        for desc, key in self._outputs:
            value = ValueRecord(device, desc, key)
            value.by = self._maker
            values.append(value)
        lease.take(values, device.queued.number)
        handles = [Tensor(value) for value in values]
        return handles[0] if len(handles) == 1 else tuple(handles)

    def _again(self, arguments: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...] | None:
        """Run what was recorded for values of these forms at these places; None where nothing was,
        or its guard does not hold."""
        device = self.device
        device.check_open()
        device.run_queue()
        arrays: list[Array] = []
        signatures: list[tuple[object, ...] | None] = []
        places: list[tuple[int, tuple[int | None, ...]]] = []
        for number, port, argument in zip(self._numbers, self._ports, arguments, strict=False):
            if type(argument) is Tensor:
                value = argument._record
                if value.status is not Status.READY or value.consumed or value.is_exposed:
                    return None
                if value.desc_key not in port.accepted:
                    return None
                signatures.append(value.signature())
                places.append((number, value.places()))
            elif (
                type(argument) is np.ndarray
                and argument.dtype is port.dtype
                and argument.shape == port.shape
            ):
                arrays.append(argument)
                signatures.append(None)
            else:
                return None
        recording = self._recordings.get(tuple(signatures))
        if recording is None or not recording.idle or not recording.holds(device.records):
            return None
        lease = recording.idle[-1]
        binding = lease.bindings.get(tuple(places))
        if binding is None or (device.copies_forbidden and binding.plan.copies):
            return None
        try:
            ran = perform(device, binding, arrays)
        except BaseException as error:
            self._stopped(binding, error.__dict__.pop("stitch_steps_done", 0))
            raise
        results = self._results(lease)
        if ran is not True:
            device.tell_run(binding, ran)
        return results

    def _run(self, arguments: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...]:
        """By way of the queue, as one window whatever its length."""
        device = self.device
        device.check_open()
        device.run_queue()
        sources, outputs = self._queue(arguments)
        handles = tuple([Tensor(value) for value in outputs])
        binding = device.run_queue()
        if binding is not None and binding.lease is not None:
            self._remember(binding, sources)
        return handles[0] if len(handles) == 1 else handles

    def _remember(self, binding: Binding, sources: Sequence[ValueRecord]) -> None:
        """The next run on values of these forms may go past the queue."""
        lease = binding.lease
        assert lease is not None
        if binding.recording.effects.carried:
            return  # Its entries are gone each time.
        if binding is lease.plain:
            self._recording = binding.recording
        numbers = tuple([value.number for value in sources])
        if len(set(numbers)) < len(numbers):
            return  # One tensor is given twice: that is another kind of work.
        forms = tuple([None if value.is_array else value.signature() for value in sources])
        self._numbers = numbers
        self._recordings.pop(forms, None)
        self._recordings[forms] = binding.recording
        if len(self._recordings) > MAX_FORMS:
            del self._recordings[next(iter(self._recordings))]

    def _queue(self, arguments: Sequence[Any]) -> tuple[list[ValueRecord], list[ValueRecord]]:
        """Put the chain into the queue, all of it or nothing; what it was given, and the pending
        last outputs."""
        device = self.device
        given: dict[tuple[int, int], ValueRecord] = {
            at: link_argument(device, self.programs[at[0]], port, argument, True)
            for at, port, argument in zip(self.inputs, self._ports, arguments, strict=True)
        }
        made: list[list[ValueRecord]] = []
        try:
            for stage, program in enumerate(self.programs):
                inputs = []
                for index in range(len(program.ports)):
                    source = self._feeds.get((stage, index))
                    inputs.append(
                        given[stage, index] if source is None else made[source[0]][source[1]]
                    )
                if program.transformation.donated:
                    check_donations(program, inputs)
                made.append(device.append(program, inputs))
        except BaseException:
            # The queue was empty before, and what earlier programs took is its owner's again.
            for value in given.values():
                value.consumed = False
            device.start_window()
            raise
        return list(given.values()), made[-1]

    def _arrange(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Array, ...]:
        names = self.input_names
        given = dict(zip(names, arguments, strict=False))
        unknown = sorted(named.keys() - set(names))
        twice = sorted(given.keys() & named.keys())
        given.update(named)
        missing = [name for name in names if name not in given]
        if missing or unknown or twice or len(arguments) > len(names):
            raise UsageError(
                "wrong inputs for the pipeline"
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + (f"; surplus: {', '.join(unknown)}" if unknown else "")
                + (f"; given twice: {', '.join(twice)}" if twice else ""),
                expected=", ".join(names),
                got=f"{len(arguments)} by position, {len(named)} by name",
            )
        return tuple(given[name] for name in names)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs; one that several programs use is told apart by its program."""
        names = [p.name for p in self._ports]
        times = Counter(names)
        return tuple(
            name if times[name] == 1 else f"{self.programs[s].name}.{name}"
            for name, (s, _) in zip(names, self.inputs, strict=True)
        )
