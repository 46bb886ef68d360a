"""Bind a program's kernels to bytes: operation by operation, or unit by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Protocol, Self

import numpy as np

from stitch.linker import program_of_body, repeated_outputs
from stitch.machine import MachineShape
from stitch.ops import (
    KernelArguments,
    OpDef,
    attributes_of,
    copy_steps,
    definition_of,
    infer_operation,
    row_copies,
    workspace,
)
from stitch.program import ABSENT, Array, DataType, Operation, Program, ScanForm
from stitch.runtime.executors.executor import BoundProgram, Thunk, Workspace, cached_attribute
from stitch.runtime.executors.host.arrangement import Arrangement, arrange
from stitch.runtime.executors.host.chunks import (
    Member,
    Unit,
    can_join,
    joins,
    passing,
    steps_by_chunks,
    units_of,
)
from stitch.runtime.executors.host.staging import (
    StagedRegions,
    StagingArrays,
    as_bytes,
    computable,
    is_direct,
)

# Kernels of a program


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


class OperationBinding:
    """One binding under construction: operation by operation."""

    def __init__(self, prepared: Kernels, regions: StagedRegions) -> None:
        self.prepared = prepared
        self.regions = regions
        self.values = prepared.program.values
        self.workspace: Array = np.empty(0, np.uint8)
        self.steps: list[Thunk] = []
        self.written: dict[int, tuple[Thunk, ...]] = {}
        self.arrays: dict[int, Array] = dict(prepared.constants)
        for slot in prepared.program.inputs:
            if slot.value in prepared.staging.later_reads:
                self.arrays[slot.value] = regions.read(slot.value, self.steps)

    @property
    def nbytes(self) -> int:
        """What it takes beside the regions."""
        return self.prepared.staging.nbytes + self.workspace.nbytes

    def bound(self) -> BoundProgram:
        """Steps operation by operation."""
        marks = [len(self.steps)]
        for index, operation in enumerate(self.prepared.program.operations):
            self.append(index, operation)
            marks.append(len(self.steps))
        spans = tuple([(i, a, b) for i, (a, b) in enumerate(pairwise(marks))])
        return BoundProgram(
            tuple(self.steps), spans, self.arrays, self.nbytes, written=self.written
        )

    def place(self, value: int) -> Array:
        """The array that an operation writes a value into."""
        return self.regions.place(value)

    def append(self, index: int, operation: Operation) -> None:
        """The steps of one operation."""
        self.prepared.workspace.kernels.restart()
        self.steps += self.kernel_steps(index, self.arguments(index, operation))
        self.write(operation.outputs)

    def kernel_steps(self, index: int, arguments: KernelArguments) -> Sequence[Thunk]:
        """The steps of an operation's kernel."""
        return self.prepared.definitions[index].steps(arguments)

    def library_steps(self, index: int, arguments: KernelArguments) -> Sequence[Thunk]:
        """The steps of the library's kernel, where it is to compute this; else of NumPy's."""
        library = self.prepared.library
        if library is not None and index in self.prepared.chosen:
            steps = library.bind(self.prepared.program.operations[index], arguments)
            if steps is not None:
                return steps
        return self.prepared.definitions[index].steps(arguments)

    def call(self, call: ForeignCall) -> None:
        """What a foreign call computes."""
        arrays = {value: self.arrays[value] for value in call.inputs}
        for value in call.outputs:
            arrays[value] = self.arrays[value] = self.place(value)
        self.steps += self.bind_call(call, arrays)
        self.write(call.outputs)

    def bind_call(self, call: ForeignCall, arrays: dict[int, Array]) -> Sequence[Thunk]:
        """The steps of a foreign call on dense arrays."""
        return call.bind(arrays)

    def write(self, values: Sequence[int]) -> None:
        """Steps that bring values from the arrays they were computed in to where they belong."""
        for value in values:
            if value != ABSENT:
                later = value in self.prepared.staging.later_reads
                steps = self.regions.write(value, self.arrays[value], read_back=later)
                self.written[value] = tuple(steps)
                self.steps += steps

    def arguments(self, index: int, operation: Operation) -> KernelArguments:
        """What an operation's kernel is bound to."""
        prepared = self.prepared
        for value in operation.outputs:
            if value != ABSENT:
                self.arrays[value] = self.place(value)
        results = tuple(
            self._unused(value, i, index) if value == ABSENT else self.arrays[value]
            for i, value in enumerate(operation.outputs)
        )
        return KernelArguments(
            tuple(None if i == ABSENT else self.arrays[i] for i in operation.inputs),
            results,
            prepared.attributes[index],
            tuple(i in prepared.constants for i in operation.inputs),
            prepared.memos[index],
            tuple(
                self.values[v].type.data_type if v != ABSENT else DataType.from_dtype(a.dtype)
                for v, a in zip(operation.outputs, results, strict=True)
            ),
            None if operation.body == ABSENT else BodyBinding(prepared, index),
        )

    def _unused(self, value: int, output: int, index: int) -> Array:
        """A place for an output that is absent; kernels write all of theirs."""
        operation = self.prepared.program.operations[index]
        kinds = infer_operation(
            operation,
            [None if i == ABSENT else self.values[i].type for i in operation.inputs],
            [self.prepared.constants.get(i) for i in operation.inputs],
            bodies=self.prepared.program.bodies,
        )
        return np.zeros(kinds[output].shape, kinds[output].data_type.compute_dtype)


class ApartBinding(OperationBinding):
    """Bind each operation separately, by the executor that it has in the whole program."""

    def append(self, index: int, operation: Operation) -> None:
        """The foreign call that computes the operation, else its kernel."""
        call = self.prepared.calls_apart.get(index)
        if call is None:
            super().append(index, operation)
        else:
            self.call(call)

    def bind_call(self, call: ForeignCall, arrays: dict[int, Array]) -> Sequence[Thunk]:
        """The call's steps; a result that lies in the bytes of an operand is computed elsewhere and
        copied, as who computes several operations at once keeps what is between them."""
        after: list[Thunk] = []
        places = {value: arrays[value] for value in call.outputs}
        for value, place in places.items():
            if any(np.may_share_memory(place, arrays[operand]) for operand in call.inputs):
                arrays[value] = np.empty_like(place)
                after.append(partial(np.copyto, place, arrays[value]))
        return (*call.bind(arrays), *after)

    def kernel_steps(self, index: int, arguments: KernelArguments) -> Sequence[Thunk]:
        """The steps of the library's kernel, else of NumPy's."""
        return self.library_steps(index, arguments)


class UnitBinding(OperationBinding):
    """One binding with values as they are arranged, unit by unit or operation by operation."""

    def __init__(
        self, prepared: Kernels, regions: StagedRegions, workspace: Array | None = None
    ) -> None:
        super().__init__(prepared, regions)
        self.arrangement = prepared.arrangement
        nbytes = self.arrangement.nbytes
        self.workspace = prepared.workspace.region(nbytes) if workspace is None else workspace
        #: How many values are seen in each one's bytes, itself among them.
        self.seen_in = Counter(seen.root for seen in self.arrangement.seen.values())
        for value, seen in self.arrangement.seen.items():
            if value not in self.arrays and seen.root in self.arrays:
                # A view of an input or a constant.
                self.arrays[value] = self.place(value)

    def bound_by_units(self) -> BoundProgram:
        """Steps unit by unit."""
        for unit in self.prepared.units:
            call = self.prepared.calls.get(unit.operations)
            if call is not None:
                self.call(call)
            elif unit.group:
                self.by_chunks(unit.operations)
            else:
                (index,) = unit.operations
                self.append(index, self.prepared.program.operations[index])
        return BoundProgram(tuple(self.steps), (), self.arrays, self.nbytes)

    def place(self, value: int) -> Array:
        """A value's array, in the bytes of its root."""
        seen = self.arrangement.seen[value]
        root = self.arrays.get(seen.root)
        if root is None:
            root = self.arrays[seen.root] = self._bytes_of(seen.root)
        shape = self.values[value].type.shape
        if seen.root == value:
            return root
        if 0 in shape:
            # It has no bytes, and NumPy takes no strides for it.
            return np.empty(shape, root.dtype)
        return np.ndarray(shape, root.dtype, root, seen.offset, seen.strides)

    def _bytes_of(self, root: int) -> Array:
        offset = self.arrangement.offsets.get(root)
        if offset is None:
            return self.regions.place(root)
        kind = self.values[root].type
        return np.ndarray(kind.shape, kind.data_type.compute_dtype, self.workspace, offset)

    def append(self, index: int, operation: Operation) -> None:
        """The steps of one operation; of a movement, what is not a view."""
        left = self.arrangement.moved.get(index)
        if left is None:
            super().append(index, operation)
            return
        for value in operation.outputs:
            if value != ABSENT:
                self.arrays[value] = self.place(value)
        for piece in left:
            taken = piece.taken(self.arrays[operation.inputs[piece.input]])
            there = piece.place(self.arrays[operation.outputs[piece.output]])
            self.steps += [partial(np.copyto, *pair) for pair in row_copies(there, taken)]

    def kernel_steps(self, index: int, arguments: KernelArguments) -> Sequence[Thunk]:
        """The steps of the library's kernel, else of NumPy's."""
        return self.library_steps(index, arguments)

    def by_chunks(self, operations: tuple[int, ...]) -> None:
        """A group of elementwise operations; one after the other where they would be tangled."""
        self.prepared.workspace.kernels.restart()
        group: list[Member] = []
        for index in operations:
            operation = self.prepared.program.operations[index]
            member = Member(
                index,
                self.prepared.definitions[index],
                self.arguments(index, operation),
                self._only_readers(operation.outputs[0]),
            )
            if not can_join(member) or not joins(group, member):
                self._finish(group)
                group = []
            group.append(member)
        self._finish(group)

    def _finish(self, group: list[Member]) -> None:
        if passing(group):
            self.steps += steps_by_chunks(group)
        else:
            for member in group:
                self.steps += member.definition.kernel(member.arguments)

    def _only_readers(self, value: int) -> frozenset[int] | None:
        """The operations that read a value; None if it is seen outside, or through a view."""
        if value not in self.arrangement.offsets or self.seen_in[value] != 1:
            return None
        return frozenset(self.prepared.readers.get(value, ()))


class BodyBinding:
    """The body of a scan, bound to arrays; what it takes lies in the memory of kernels, since it is
    one kernel of the program around it."""

    def __init__(self, around: Kernels, index: int) -> None:
        """The body that operation `index` carries."""
        self.kernels = around.inside(index)
        operation = around.program.operations[index]
        body = around.program.bodies[operation.body]
        self.repeated = repeated_outputs(body, ScanForm.of(operation).states)

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Sequence[Thunk]:
        """The steps of a round; arrays are of the compute types, one for each operand."""
        kernels, program = self.kernels, self.kernels.program
        memory = kernels.workspace.kernels
        before: list[Thunk] = []
        after: list[Thunk] = []
        # One side of a scan's two never runs while the other does.
        with memory.kept():
            memory.restart()
            region = memory.take(kernels.arrangement.nbytes)
            scratch = memory.take(program.scratch.size_per_bank if kernels.is_staged else 0)
            # Slots are called by the numbers of the operands that they are.
            given = [inputs[int(slot.name.split()[1])] for slot in program.inputs]
            values = [s.value for s in program.inputs] + [s.value for s in program.outputs]
            stored = list(map(self._stored, values, (*given, *outputs)))
            sides = stored[: len(given)], stored[len(given) :]
            for array, place in zip(given, sides[0], strict=True):
                before += copy_steps(array, place)
            for array, place in zip(outputs, sides[1], strict=True):
                after += copy_steps(place, array)
            taken, made = (tuple(map(as_bytes, side)) for side in sides)
            with memory.kept():
                regions = StagedRegions(kernels.staging, taken, made, scratch)
                bound = UnitBinding(kernels, regions, region).bound_by_units()
        return (*before, *bound.steps, *after)

    def _stored(self, value: int, array: Array) -> Array:
        """Where a slot's value lies in its own type: the array itself, if it has that."""
        dtype = self.kernels.program.values[value].type.data_type.dtype
        if dtype == array.dtype:
            return array
        return workspace(array.shape, dtype)
