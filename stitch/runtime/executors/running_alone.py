"""A program by one executor's own kernels, on arrays of its own: for those who measure kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.runtime.executors.executor import Executor, with_fp_errors_ignored
from stitch.runtime.executors.host import as_bytes


def running_alone(
    executor: Executor, program: Program, machine: MachineShape, operands: Sequence[Array]
) -> Callable[[int], object]:
    """Runs of a program, so many in a row; raises `CompileError` where the executor has no kernels
    for it."""
    prepared = executor.prepare_alone(program, machine)
    kinds = [program.values[slot.value].type for slot in program.outputs]
    results = [np.empty(kind.shape, kind.data_type.dtype) for kind in kinds]
    scratch = np.empty(program.scratch.size_per_bank, np.uint8)
    given, made = (tuple(map(as_bytes, arrays)) for arrays in (operands, results))
    steps = prepared.bind(given, made, scratch).steps
    # The steps know the bytes by their addresses alone.
    held = operands, results, scratch

    def run(times: int) -> object:
        for _ in range(times):
            for step in steps:
                step()
        return held

    return lambda times: with_fp_errors_ignored(run, times)
