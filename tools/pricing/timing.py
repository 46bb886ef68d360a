"""How long programs take by each library: least of many, all taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from pricing.operations import MACHINE, MeasuredOperation
from stitch.errors import CompileError, UsageError
from stitch.program import Array, Program
from stitch.runtime import Executor, make_executor
from stitch.runtime.executors import as_bytes, with_fp_errors_ignored

#: Seconds that one turn takes at least: many calls of what is short.
TURN = 0.001

#: Microseconds by name and library, each with its size.
Times = dict[tuple[str, str], list[tuple[int, float]]]


@dataclass(slots=True, eq=False)
class _Turn:
    measured: MeasuredOperation
    library: str
    run: Callable[[int], object]
    calls: int
    least: float


def installed(libraries: Iterable[str]) -> dict[str, Executor]:
    """The executors of those libraries that are installed here."""
    found = {}
    for name in libraries:
        try:
            found[name] = make_executor(name)
        except UsageError:
            if name == "numpy":
                raise
    return found


def times_of(
    operations: Iterable[MeasuredOperation], executors: dict[str, Executor], rounds: int
) -> Times:
    """What each takes by each; nothing where a library cannot run it."""
    turns = [
        turn
        for measured in operations
        for library, executor in executors.items()
        if (turn := _turn(measured, library, executor)) is not None
    ]
    random = Random(0)
    for _ in range(rounds):
        # What always follows the same would always find the same caches.
        random.shuffle(turns)
        for turn in turns:
            turn.least = min(turn.least, _seconds(turn.run, turn.calls))
    found: Times = {}
    for turn in turns:
        sized = found.setdefault((turn.measured.name, turn.library), [])
        sized.append((turn.measured.size, turn.least * 1e6))
    return {key: sorted(sized) for key, sized in found.items()}


def _turn(measured: MeasuredOperation, library: str, executor: Executor) -> _Turn | None:
    try:
        run = _run_alone(executor, measured.program, measured.inputs)
    except CompileError:
        return None
    once = max(1e-9, _seconds(run, 1))
    return _Turn(measured, library, run, max(1, int(TURN / once)), once)


def _run_alone(
    executor: Executor, program: Program, operands: Sequence[Array]
) -> Callable[[int], object]:
    """Return a function that runs a program `times` times in a row, on arrays of its own.

    Raises `CompileError` if the executor has no kernels for the program.
    """
    prepared = executor.prepare_alone(program, MACHINE.shape)
    kinds = [program.values[slot.value].type for slot in program.outputs]
    results = [np.empty(kind.shape, kind.data_type.dtype) for kind in kinds]
    scratch = np.empty(program.scratch.size_per_bank, np.uint8)
    inputs, outputs = (tuple(map(as_bytes, arrays)) for arrays in (operands, results))
    steps = prepared.bind(inputs, outputs, scratch).steps
    # The steps refer to the arrays by address only.
    referenced = operands, results, scratch

    def run(times: int) -> object:
        for _ in range(times):
            for step in steps:
                step()
        return referenced

    return lambda times: with_fp_errors_ignored(run, times)


def _seconds(run: Callable[[int], object], calls: int) -> float:
    """Of one call, after one that brings its operands into the caches."""
    run(1)
    started = time.process_time()
    run(calls)
    return (time.process_time() - started) / calls
