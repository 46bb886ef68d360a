"""A program as kernels: what every binding of it to bytes shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Protocol, Self

from stitch.linker import program_of_body
from stitch.machine import MachineShape
from stitch.ops import KernelArguments, OpDef, attributes_of, definition_of
from stitch.program import Array, Operation, Program, ScanForm
from stitch.runtime.executors.executor import Thunk, Workspace, cached_attribute
from stitch.runtime.executors.host.arrangement import Arrangement, arrange
from stitch.runtime.executors.host.chunks import Unit, units_of
from stitch.runtime.executors.host.staging import StagingArrays, computable, is_direct


class ForeignCall(Protocol):
    """Consecutive operations of a program that one call computes, by other kernels than ours."""

    @property
    def operations(self) -> tuple[int, ...]:
        """The indices of the operations, in the program's order."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values that it reads."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """The values that it makes and others read; the rest it keeps to itself."""

    def bind(self, arrays: dict[int, Array]) -> Sequence[Thunk]:
        """Steps on dense arrays of the compute types, given by value."""


class KernelLibrary(Protocol):
    """Kernels other than ours for single operations, on arrays in any form."""

    def price(self, program: Program, operation: Operation, products: int, batch: int) -> float:
        """Microseconds of an operation; infinite where it has no kernel for it.

        `products` are the multiply-adds of a product, `batch` how many matrices it multiplies.
        """

    def bind(self, operation: Operation, arguments: KernelArguments) -> Sequence[Thunk] | None:
        """The steps of an operation; None where its arrays do not suit."""


class Kernels:
    """A program's kernels, but for what `calls` compute; raises `CompileError`.

    `chosen` are the operations that `library` computes where it can. `calls_apart` gives calls of
    single operations: who computes each where it must be seen by itself.
    """

    def __init__(
        self,
        program: Program,
        machine: MachineShape,
        workspace: Workspace,
        calls: Sequence[ForeignCall] = (),
        library: KernelLibrary | None = None,
        chosen: Collection[int] = (),
        calls_apart: Callable[[], Sequence[ForeignCall]] = tuple,
    ) -> None:
        self._make_calls_apart = calls_apart
        self.library = library
        self.chosen = chosen
        self.program = program
        self.workspace = workspace
        self.calls = {call.operations: call for call in calls}
        self.definitions: list[OpDef] = list(map(definition_of, program.operations))
        self.attributes = [attributes_of(o) for o in program.operations]
        self.memos: list[dict[str, Array]] = [{} for _ in program.operations]
        self.constants = {
            c.value: computable(c.data, program.values[c.value].type) for c in program.constants
        }
        self.machine = machine
        self.staging = StagingArrays(program, machine)
        self.readers = program.readers()
        self._inside: dict[int, Kernels] = {}

    def inside(self, index: int) -> Kernels:
        """The kernels of the body that an operation carries; operands that are constants here are
        constants there."""
        found = self._inside.get(index)
        if found is None:
            operation = self.program.operations[index]
            data = self.program.constant_data()
            form = ScanForm.of(operation)
            first = form.states + form.sequences
            known = {i: data[v] for i, v in enumerate(operation.inputs) if i >= first and v in data}
            program = program_of_body(self.program, operation.body, form.states, known)
            found = self._inside[index] = Kernels(program, self.machine, self.workspace)
        return found

    def in_workspace(self, workspace: Workspace) -> Self:
        """The same kernels with bytes of their own; constants and what was derived from them are
        shared."""
        own = copy(self)
        own.workspace, own.staging = workspace, StagingArrays(self.program, self.machine)
        own._inside = {i: inside.in_workspace(workspace) for i, inside in self._inside.items()}
        return own

    @cached_attribute
    def calls_apart(self) -> dict[int, ForeignCall]:
        """The call of each operation that one computes by itself, made when first asked for."""
        return {call.operations[0]: call for call in self._make_calls_apart()}

    @cached_attribute
    def is_staged(self) -> bool:
        """Whether any value is computed elsewhere than where it lies."""
        return not all(is_direct(value) for value in self.program.values)

    @cached_attribute
    def units(self) -> tuple[Unit, ...]:
        """What is computed together."""
        return units_of(self.program, tuple(self.calls), self.chosen)

    @cached_attribute
    def arrangement(self) -> Arrangement:
        """Where values lie when units are computed."""
        return arrange(self.program, self.units, self.constants)
