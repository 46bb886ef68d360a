"""An executor whose kernels call somebody: to know that one runs, to hold it up, to fail in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.runtime.executors import BoundProgram, Executor, PreparedProgram, make_executor
from stitch.runtime.executors.executor import ProgramBytes, Workspace


class CallingExecutor(Executor):
    """Calls `told(name of the program)` as a step of every run of a program."""

    name = "calling"

    def __init__(self, told: Callable[[str], object]) -> None:
        self.told = told
        self._numpy = make_executor("numpy")

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """NumPy's, and who is told."""
        prepared = self._numpy.prepare(program, machine, workspace)
        # The attribute is looked up when the step runs.
        return _Calling(prepared, lambda: self.told(program.name))

    def host_bytes(self, program: Program) -> ProgramBytes:
        """What NumPy's takes."""
        return self._numpy.host_bytes(program)


class _Calling(PreparedProgram):
    def __init__(self, prepared: PreparedProgram, told: Callable[[], object]) -> None:
        self._prepared, self._told = prepared, told

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        return self._with_call(self._prepared.bind(inputs, outputs, scratch))

    def _with_call(self, bound: BoundProgram) -> BoundProgram:
        others = bound.one_by_one
        return replace(
            bound,
            steps=(self._told, *bound.steps),
            operations=tuple((o, first + 1, stop + 1) for o, first, stop in bound.operations),
            one_by_one=None if others is None else partial(self._again, others),
        )

    def _again(self, others: Callable[[], BoundProgram]) -> BoundProgram:
        return self._with_call(others())
