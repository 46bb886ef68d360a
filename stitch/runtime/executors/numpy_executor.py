"""The NumPy executor: each operator's own kernel, writing into preallocated arrays.

Dense values of the compute type are views of the space's bytes, others are staged; float16,
bfloat16 and the block formats compute in float32 and round once per operator output.

Long elementwise operations that follow each other are computed by blocks (`element_blocks`), and
values are views of others where nothing but their form differs (`places`). Where an operation must
be seen by itself, the program is bound plainly, one operation after the other: the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from stitch.machine import MachineShape
from stitch.ops import KernelArguments, OpDef, infer_types, lookup, resolve_attributes
from stitch.program import ABSENT, Array, DataType, Operation, Program
from stitch.runtime.executors.element_blocks import (
    Member,
    can_join,
    joins,
    passing,
    steps_by_blocks,
)
from stitch.runtime.executors.executor import BoundProgram, Executor, PreparedProgram, Thunk
from stitch.runtime.executors.places import Places, Seen, plan_places
from stitch.runtime.executors.staging import StagedRegions, StagingArrays, computable
from stitch.runtime.executors.units import Unit, units_of
from stitch.runtime.executors.workspace import Workspace


class ForeignCall(Protocol):
    """Consecutive operations of a program that somebody else computes in one call."""

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


class NumpyExecutor(Executor):
    """Runs every operator that Stitch defines, one NumPy kernel after the other."""

    name = "numpy"

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Look every operation's kernel up; raises `CompileError` for an unknown operator."""
        return PreparedKernels(program, machine, workspace or Workspace())


class PreparedKernels(PreparedProgram):
    """A program as kernels, but for what `calls` compute."""

    def __init__(
        self,
        program: Program,
        machine: MachineShape,
        workspace: Workspace,
        calls: Sequence[ForeignCall] = (),
    ) -> None:
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
        self.staging = StagingArrays(program, machine)
        self.readers: dict[int, set[int]] = {}
        for index, operation in enumerate(program.operations):
            for value in operation.inputs:
                self.readers.setdefault(value, set()).add(index)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """What is computed together."""
        return units_of(self.program, tuple(self.calls))

    @cached_property
    def places(self) -> Places:
        """Where values lie when units are computed."""
        return plan_places(self.program, self.units, self.constants)

    @cached_property
    def is_plain(self) -> bool:
        """Whether nothing is gained over one operation after the other."""
        if any(len(unit.operations) > 1 or unit.foreign for unit in self.units):
            return False
        moved = self.places.moved.items()
        return all(len(left) == len(self.program.operations[i].outputs) for i, left in moved)

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps by units and without copies; plain ones if nothing is gained so."""
        if self.is_plain or not _lie_apart(self.program, inputs, outputs):
            return self.bind_plainly(inputs, outputs, scratch)

        @cache
        def one_by_one() -> BoundProgram:
            return self.bind_plainly(inputs, outputs, scratch)

        regions = StagedRegions(self.staging, inputs, outputs, scratch)
        with self.workspace.kernels:
            return replace(_UnitBinding(self, regions).bound(), one_by_one=one_by_one)

    def bind_plainly(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps operation by operation, by NumPy's kernels, every value in a place of its own."""
        with self.workspace.kernels:
            return _Binding(self, StagedRegions(self.staging, inputs, outputs, scratch)).bound()


def _lie_apart(program: Program, inputs: tuple[Array, ...], outputs: tuple[Array, ...]) -> bool:
    """Whether nothing lies in an output's bytes but the input whose place it takes."""
    spans, taken = [], set()
    for slot, array in zip(program.outputs, outputs, strict=True):
        start, source = array.ctypes.data, slot.aliases_input
        spans.append((start, start + array.nbytes, True))
        if source is not None and inputs[source].ctypes.data == start:
            taken.add(source)
    for index, array in enumerate(inputs):
        if index not in taken:
            spans.append((array.ctypes.data, array.ctypes.data + array.nbytes, False))
    reach = written_reach = 0
    for start, end, written in sorted(s for s in spans if s[1] > s[0]):
        if start < (reach if written else written_reach):
            return False
        reach = max(reach, end)
        written_reach = max(written_reach, end if written else 0)
    return True


class _Binding:
    """One binding under construction: operation by operation."""

    def __init__(self, prepared: PreparedKernels, regions: StagedRegions) -> None:
        self.prepared = prepared
        self.regions = regions
        self.values = prepared.program.values
        self.steps: list[Thunk] = []
        self.arrays: dict[int, Array] = dict(prepared.constants)
        for slot in prepared.program.inputs:
            if slot.value in prepared.staging.later_reads:
                self.arrays[slot.value] = regions.read(slot.value, self.steps)

    def bound(self) -> BoundProgram:
        prepared, marks = self.prepared, [len(self.steps)]
        for index, operation in enumerate(prepared.program.operations):
            self.append(index, operation)
            marks.append(len(self.steps))
        spans = [(i, a, b) for i, (a, b) in enumerate(pairwise(marks))]
        if spans:
            # Staging of the inputs counts to the first operation.
            spans[0] = (0, 0, spans[0][2])
        return BoundProgram(tuple(self.steps), tuple(spans), self.arrays, prepared.staging.nbytes)

    def place(self, value: int) -> Array:
        """The array that an operation writes a value into."""
        return self.regions.place(value)

    def append(self, index: int, operation: Operation) -> None:
        """The steps of one operation."""
        self.prepared.workspace.kernels.restart()
        self.steps += self.prepared.definitions[index].kernel(self.arguments(index, operation))
        self.write(operation.outputs)

    def write(self, values: Sequence[int]) -> None:
        """Steps that bring values from the arrays they were computed in to where they belong."""
        for value in values:
            if value != ABSENT:
                later = value in self.prepared.staging.later_reads
                self.steps += self.regions.write(value, self.arrays[value], read_back=later)

    def arguments(self, index: int, operation: Operation) -> KernelArguments:
        """What an operation's kernel is bound to."""
        prepared = self.prepared
        for value in operation.outputs:
            if value != ABSENT:
                self.arrays[value] = self.place(value)
        made = tuple(
            self._unused(value, i, index) if value == ABSENT else self.arrays[value]
            for i, value in enumerate(operation.outputs)
        )
        return KernelArguments(
            tuple(None if i == ABSENT else self.arrays[i] for i in operation.inputs),
            made,
            prepared.attributes[index],
            tuple(i in prepared.constants for i in operation.inputs),
            prepared.memos[index],
            tuple(
                self.values[v].type.data_type if v != ABSENT else DataType.from_dtype(a.dtype)
                for v, a in zip(operation.outputs, made, strict=True)
            ),
        )

    def _unused(self, value: int, output: int, index: int) -> Array:
        """A place for an output that nobody wants; kernels write all of theirs."""
        operation = self.prepared.program.operations[index]
        kinds = infer_types(
            operation.op,
            [None if i == ABSENT else self.values[i].type for i in operation.inputs],
            domain=operation.domain,
            constants=[self.prepared.constants.get(i) for i in operation.inputs],
            attributes=operation.attributes,
            outputs=len(operation.outputs),
        )
        return np.zeros(kinds[output].shape, kinds[output].data_type.compute_dtype)


class _UnitBinding(_Binding):
    """One binding unit by unit, with values in their places."""

    def __init__(self, prepared: PreparedKernels, regions: StagedRegions) -> None:
        super().__init__(prepared, regions)
        self.places = prepared.places
        self.workspace = prepared.workspace.region(self.places.nbytes)
        for value, seen in self.places.seen.items():
            if value not in self.arrays and seen.root in self.arrays:
                # A view of an input or a constant.
                self.arrays[value] = self.place(value)

    def bound(self) -> BoundProgram:
        for unit in self.prepared.units:
            call = self.prepared.calls.get(unit.operations)
            if call is not None:
                self.call(call)
            elif unit.group:
                self.by_blocks(unit.operations)
            else:
                (index,) = unit.operations
                self.append(index, self.prepared.program.operations[index])
        nbytes = self.prepared.staging.nbytes + self.places.nbytes
        return BoundProgram(tuple(self.steps), (), self.arrays, nbytes)

    def place(self, value: int) -> Array:
        """A value's array, in the bytes of its root."""
        seen = self.places.seen[value]
        root = self.arrays.get(seen.root)
        if root is None:
            root = self.arrays[seen.root] = self._bytes_of(seen.root)
        return root if seen.root == value else _view(root, seen, self.values[value].type.shape)

    def _bytes_of(self, root: int) -> Array:
        offset = self.places.offsets.get(root)
        if offset is None:
            return self.regions.place(root)
        kind = self.values[root].type
        shape, dtype = kind.shape, kind.data_type.compute_dtype
        return np.ndarray(shape, dtype, self.workspace, offset)

    def append(self, index: int, operation: Operation) -> None:
        """The steps of one operation; of a movement, what is not a view."""
        left = self.places.moved.get(index)
        if left is None:
            super().append(index, operation)
            return
        for value in operation.outputs:
            if value != ABSENT:
                self.arrays[value] = self.place(value)
        for piece in left:
            taken = piece.taken(self.arrays[operation.inputs[piece.input]])
            there = piece.place(self.arrays[operation.outputs[piece.output]])
            self.steps.append(partial(np.copyto, there, taken))

    def by_blocks(self, operations: tuple[int, ...]) -> None:
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
            self.steps += steps_by_blocks(group)
        else:
            for member in group:
                self.steps += member.definition.kernel(member.arguments)

    def _only_readers(self, value: int) -> frozenset[int] | None:
        """Who reads a value; None if that is seen outside the program, or through a view."""
        is_root = sum(seen.root == value for seen in self.places.seen.values()) == 1
        if value not in self.places.offsets or not is_root:
            return None
        return frozenset(self.prepared.readers.get(value, ()))

    def call(self, call: ForeignCall) -> None:
        """A foreign unit."""
        arrays = {value: self.arrays[value] for value in call.inputs}
        for value in call.outputs:
            arrays[value] = self.arrays[value] = self.place(value)
        self.steps += call.bind(arrays)
        self.write(call.outputs)


def _view(root: Array, seen: Seen, shape: tuple[int, ...]) -> Array:
    if 0 in shape:
        # It has no bytes, and NumPy takes no strides for it.
        return np.empty(shape, root.dtype)
    return np.ndarray(shape, root.dtype, root, seen.offset, seen.strides)
