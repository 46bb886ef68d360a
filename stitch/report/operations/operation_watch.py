"""Watching the operations of a device's programs, one at a time, as hooks do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Self

from stitch.errors import UsageError
from stitch.linker import expanded
from stitch.program import ABSENT, Array, Operation, Program
from stitch.runtime import HookContext, OperationReferences, RuntimeDevice


@dataclass(frozen=True, slots=True, eq=False)
class SeenOperation:
    """An operation of a program in the `run`-th run of programs of that name, counted from 1."""

    program: Program
    run: int
    index: int
    operation: Operation
    inputs: tuple[Array | None, ...]
    outputs: tuple[Array, ...]

    @property
    def made(self) -> tuple[int, ...]:
        """The values of the outputs, in their order."""
        return tuple(value for value in self.operation.outputs if value != ABSENT)

    @property
    def name(self) -> str:
        """What the operation is called in messages."""
        where = f" at {self.operation.location}" if self.operation.location else ""
        return (
            f"operation {self.index} ({self.operation.op}){where} of program "
            f"{self.program.name!r}, run {self.run}"
        )


class OperationWatch(ABC):
    """Sees every operation from now on until `close`; use it as a context manager.

    While it watches, programs run one operation at a time, as with any hook. Raises `UsageError`
    for a device that computes nothing; and, in a run, for an executor that shows no operations.
    """

    def __init__(self, device: RuntimeDevice) -> None:
        if not device.computes:
            raise UsageError(
                "operations are seen where they are computed, and this device computes nothing",
                where=f"device {device.machine.name!r}, executor {device.executor!r}",
                remedy="choose an executor that computes; programs that are only planned, such as "
                "those of a .ttnn file, have no operations to be seen",
            )
        self._device = device
        self._runs: Counter[str] = Counter()
        self._seen = 0
        self._references: dict[int, tuple[Program, OperationReferences]] = {}
        self.close = device.hooks.register(
            before_program=self._on_program,
            after_program=self._on_end,
            before_operation=lambda context: self.before(self._operation(context)),
            after_operation=lambda context: self.after(self._operation(context)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def before(self, seen: SeenOperation) -> None:
        """It is about to run."""

    @abstractmethod
    def after(self, seen: SeenOperation) -> None:
        """It has run."""

    def next_pass(self) -> None:
        """The same work comes once more: runs of programs are counted anew."""
        self._runs.clear()

    def references(self, program: Program) -> OperationReferences:
        """NumPy's kernels for the operations of a program."""
        known = self._references.get(id(program))
        if known is None:
            known = program, OperationReferences(program, self._device.machine.shape)
            # With the program, so that its id stays its own.
            self._references[id(program)] = known
        return known[1]

    def _on_program(self, context: HookContext) -> None:
        self._runs[context.program.name] += 1
        self._seen = 0

    def _on_end(self, context: HookContext) -> None:
        if not self._seen and expanded(context.program).operations:
            raise UsageError(
                "the executor runs programs as a whole, and shows none of their operations",
                where=f"program {context.program.name!r}, executor {self._device.executor!r}",
                remedy="choose one of Stitch's own executors",
            )

    def _operation(self, context: HookContext) -> SeenOperation:
        assert context.operation is not None
        assert context.index is not None
        self._seen += 1
        return SeenOperation(
            context.program, self._runs[context.program.name], context.index, context.operation,
            context.inputs, context.outputs,
        )  # fmt: skip
