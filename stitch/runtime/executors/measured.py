"""The measured executor, `fastest`: each program by whichever executor is fastest here, by a clock.

Comes in: a program. Goes out: its form as that executor prepared it which ran it in the least time.
Where results of executors differ in their last digits, they follow from what was fastest when it
was measured: this is the one executor of which that is true, and only who names it gets it. Must
not know: plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter_ns

from stitch.errors import CompileError, UsageError
from stitch.machine import MachineShape, footprint
from stitch.ops import bytes_from_a_line
from stitch.program import Array, Program, TensorDesc
from stitch.runtime.executors.executor import (
    Executor,
    PreparedProgram,
    ProgramBytes,
    Workspace,
    quietly,
)

_log = logging.getLogger(__name__)
#: A program is run so many times at least, and until it has run for so long, by each executor.
LEAST_RUNS, LEAST_NS = 3, 5_000_000
#: In the order in which they are tried; of equally fast ones the first is taken.
TRIED = ("numpy", "auto", "onnxruntime", "torch")


class MeasuredExecutor(Executor):
    """Tries those executors that are installed on each program; raises `UsageError` where none is.

    `make`: an executor by name. `clock`: nanoseconds.
    """

    name = "fastest"

    def __init__(
        self, make: Callable[[str], Executor], clock: Callable[[], int] = perf_counter_ns
    ) -> None:
        self.tried: list[Executor] = []
        for name in TRIED:
            with suppress(UsageError):
                self.tried.append(make(name))
        #: By which those of them choose that have a choice: the clock compares what they chose.
        self.prices = next((one.prices for one in self.tried if one.prices is not None), None)
        self._clock = clock
        #: By the name of a program: what each executor took, in nanoseconds, the fastest first.
        self.measured: dict[str, tuple[tuple[str, int], ...]] = {}

    def takes_foreign(self) -> bool:
        """Where one of the executors does."""
        return any(one.takes_foreign() for one in self.tried)

    def host_bytes(self, program: Program) -> ProgramBytes:
        """What all take in turn, of which two are there at a time."""
        each = [executor.host_bytes(program) for executor in self.tried]
        largest = max(each, key=lambda one: one.peak)
        kept = sum(sorted(one.kept for one in each)[-2:])
        return ProgramBytes(
            kept, max(one.bound for one in each), max(one.values for one in each),
            max(one.kernels for one in each), largest.largest,
            max(one.staged for one in each),
        )  # fmt: skip

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """The form of the executor that was fastest; raises `CompileError` where none can."""
        places = _Places(program, machine)
        best: tuple[int, PreparedProgram] | None = None
        times: list[tuple[int, str]] = []
        refusal: CompileError | None = None
        for executor in self.tried:
            try:
                prepared = executor.prepare(program, machine, workspace)
            except CompileError as error:
                refusal = refusal or error
                continue
            took = self._time(prepared, places)
            times.append((took, executor.name))
            if best is None or took < best[0]:
                best = (took, prepared)
        if best is None:
            assert refusal is not None, "an executor prepares a program, or says why not"
            raise refusal
        self.measured[program.name] = tuple((name, took) for took, name in sorted(times))
        _log.debug("program %s: nanoseconds by executor: %s", program.name, sorted(times))
        return best[1]

    def _time(self, prepared: PreparedProgram, places: _Places) -> int:
        bound = prepared.bind(places.inputs, places.outputs, places.scratch)

        def run() -> int:
            begun = self._clock()
            for step in bound.steps:
                step()
            return self._clock() - begun

        def least() -> int:
            run()
            times = [run() for _ in range(LEAST_RUNS)]
            while sum(times) < LEAST_NS and len(times) < 1000:
                times.append(run())
            return min(times)

        return quietly(least)


class _Places:
    """Bytes for the inputs, outputs and scratch of a program, apart from any device's; zeros, which
    are legal elements and indices of every type."""

    def __init__(self, program: Program, machine: MachineShape) -> None:
        def region(desc: TensorDesc) -> Array:
            return _zeros(footprint(desc, machine).nbytes)

        slots: Sequence[int] = range(len(program.inputs))
        self.inputs = tuple([region(program.input_desc(i)) for i in slots])
        slots = range(len(program.outputs))
        self.outputs = tuple([region(program.output_desc(i)) for i in slots])
        scratch = program.scratch
        banks = machine.space(scratch.space).banks if scratch.size_per_bank else 0
        self.scratch = _zeros(scratch.size_per_bank * banks) if banks else None


def _zeros(nbytes: int) -> Array:
    region = bytes_from_a_line(nbytes)
    region[:] = 0
    return region
