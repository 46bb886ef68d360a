"""The executor `timed`: NumPy's kernels; at exit, the wall time of each program.

It wraps the steps of another executor, which is how to count, check or trace what programs do.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.runtime.executors import (
    BoundProgram,
    Executor,
    PreparedProgram,
    ProgramBytes,
    Workspace,
    make_executor,
)

#: Nanoseconds by program, of all devices of the process.
NANOSECONDS: Counter[str] = Counter()


@atexit.register
def print_times() -> None:
    """Print the milliseconds of each program, the longest first."""
    for program, nanoseconds in NANOSECONDS.most_common():
        print(f"timed: {program}: {nanoseconds / 1e6:.3f} ms", file=sys.stderr)


class TimedExecutor(Executor):
    """Computes as NumPy does, and measures the time of programs."""

    name = "timed"

    def __init__(self) -> None:
        self._numpy = make_executor("numpy")

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Prepare NumPy's program, with two steps more."""
        return _Timed(self._numpy.prepare(program, machine, workspace), program.name)

    def host_bytes(self, program: Program) -> ProgramBytes:
        """Return what NumPy's program takes."""
        return self._numpy.host_bytes(program)

    def link_obstacle(self, programs: Sequence[Program]) -> str:
        """Return NumPy's obstacle: the kernels are the same."""
        return self._numpy.link_obstacle(programs)


class _Timed(PreparedProgram):
    def __init__(self, prepared: PreparedProgram, name: str) -> None:
        self._prepared, self._name = prepared, name
        self._started = 0

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Bind NumPy's program between a step that starts the clock and one that stops it."""
        return self._between(self._prepared.bind(inputs, outputs, scratch))

    def _between(self, bound: BoundProgram) -> BoundProgram:
        one_by_one = bound.one_by_one
        return replace(
            bound,
            steps=(self._start, *bound.steps, self._stop),
            operations=tuple((o, first + 1, end + 1) for o, first, end in bound.operations),
            one_by_one=None if one_by_one is None else partial(self._again, one_by_one),
        )

    def _again(self, bind: Callable[[], BoundProgram]) -> BoundProgram:
        return self._between(bind())

    def _start(self) -> None:
        self._started = time.perf_counter_ns()

    def _stop(self) -> None:
        NANOSECONDS[self._name] += time.perf_counter_ns() - self._started
