"""A program as kernels: what every binding of it to bytes shares.

Comes in: a program, what foreign calls and a library compute of it. Goes out: its operators'
definitions and attributes, its constants, what is computed together (`units`), where values lie
(`arrangement`). Must not know addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from stitch.machine import MachineShape
from stitch.ops import KernelArguments, OpDef, lookup, resolve_attributes
from stitch.program import Array, Operation, Program
from stitch.runtime.executors.executor import Thunk, Workspace, found_once
from stitch.runtime.executors.host.arrangement import Arrangement, arrange
from stitch.runtime.executors.host.chunks import Unit, units_of
from stitch.runtime.executors.host.staging import StagingArrays, computable


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

    `chosen` are the operations that `library` computes where it can.
    """

    def __init__(
        self,
        program: Program,
        machine: MachineShape,
        workspace: Workspace,
        calls: Sequence[ForeignCall] = (),
        library: KernelLibrary | None = None,
        chosen: Collection[int] = (),
    ) -> None:
        self.library = library
        self.chosen = chosen
        self.program = program
        self.workspace = workspace
        self.calls = {call.operations: call for call in calls}
        self.definitions: list[OpDef] = [lookup(o.op, o.domain) for o in program.operations]
        self.attributes = [
            resolve_attributes(definition, o.attributes, o.location)
            for definition, o in zip(self.definitions, program.operations, strict=True)
        ]
        self.memos: list[dict[str, Array]] = [{} for _ in program.operations]
        self.constants = {
            c.value: computable(c.data, program.values[c.value].type) for c in program.constants
        }
        self.machine = machine
        self.staging = StagingArrays(program, machine)
        self.readers = program.readers()

    @found_once
    def units(self) -> tuple[Unit, ...]:
        """What is computed together."""
        return units_of(self.program, tuple(self.calls), self.chosen)

    @found_once
    def arrangement(self) -> Arrangement:
        """Where values lie when units are computed."""
        return arrange(self.program, self.units, self.constants)
