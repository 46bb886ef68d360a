"""The NumPy executor: each operator's own kernel, writing into preallocated arrays.

Dense values of the compute type are views of the space's bytes, others are staged; float16,
bfloat16 and the block formats compute in float32 and round once per operator output.

Long elementwise operations that follow each other are computed by blocks (`element_blocks`), and a
value that is another in a new shape is a view of it (`views_of_values`). Where an operation must
be seen by itself, the program is bound plainly, one operation after the other: the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

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
from stitch.runtime.executors.staging import (
    StagedRegions,
    StagingArrays,
    computable,
    is_direct,
)
from stitch.runtime.executors.views_of_values import ViewsOfValues


class NumpyExecutor(Executor):
    """Runs every operator that Stitch defines, one NumPy kernel after the other."""

    name = "numpy"

    def prepare(self, program: Program, machine: MachineShape) -> PreparedProgram:
        """Look every operation's kernel up; raises `CompileError` for an unknown operator."""
        return _Prepared(program, machine)


class _Prepared(PreparedProgram):
    def __init__(self, program: Program, machine: MachineShape) -> None:
        self.program = program
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
        self.views = ViewsOfValues(program)

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps by blocks and without copies; plain ones if nothing is gained so."""

        @cache
        def one_by_one() -> BoundProgram:
            return _Binding(self, StagedRegions(self.staging, inputs, outputs, scratch)).bound()

        fast = _FastBinding(self, StagedRegions(self.staging, inputs, outputs, scratch))
        bound = fast.bound()
        return replace(bound, operations=(), one_by_one=one_by_one) if fast.differs else bound


class _Binding:
    """One binding under construction: operation by operation."""

    def __init__(self, prepared: _Prepared, regions: StagedRegions) -> None:
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
        self.finish()
        spans = [(i, a, b) for i, (a, b) in enumerate(pairwise(marks))]
        if spans:
            # Staging of the inputs counts to the first operation.
            spans[0] = (0, 0, spans[0][2])
        return BoundProgram(tuple(self.steps), tuple(spans), self.arrays, prepared.staging.nbytes)

    def append(self, index: int, operation: Operation) -> None:
        """The steps of one operation."""
        arguments = self.arguments(index, operation)
        self.steps += self.prepared.definitions[index].kernel(arguments)
        for value in operation.outputs:
            if value != ABSENT:
                later = value in self.prepared.staging.later_reads
                self.steps += self.regions.write(value, self.arrays[value], read_back=later)

    def finish(self) -> None:
        """The steps that were held back, if any."""

    def arguments(self, index: int, operation: Operation) -> KernelArguments:
        """What an operation's kernel is bound to."""
        prepared = self.prepared
        for value in operation.outputs:
            if value != ABSENT:
                self.arrays[value] = self.regions.place(value)
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


class _FastBinding(_Binding):
    """One binding by blocks and without copies; `differs` if it has any of these."""

    def __init__(self, prepared: _Prepared, regions: StagedRegions) -> None:
        super().__init__(prepared, regions)
        self.group: list[Member] = []
        self.differs = False

    def append(self, index: int, operation: Operation) -> None:
        """Holds back what the next operation may join."""
        if index in self.prepared.views.candidates:
            source = self.arrays[operation.inputs[0]]
            view = self.prepared.views.view(index, source, self.regions.place)
            if view is not None:
                self.arrays[operation.outputs[0]] = view
                self.differs = True
                return
        member = self.member(index, operation)
        if member is None or not joins(self.group, member):
            self.finish()
        if member is None:
            super().append(index, operation)
        else:
            self.group.append(member)

    def member(self, index: int, operation: Operation) -> Member | None:
        """The operation as one that may be computed by blocks; None if it may not."""
        definition = self.prepared.definitions[index]
        if not definition.elementwise or not all(
            v != ABSENT and is_direct(self.values[v]) for v in operation.outputs
        ):
            return None
        member = Member(
            index,
            definition,
            self.arguments(index, operation),
            self.prepared.views.only_readers(operation.outputs[0]),
        )
        return member if can_join(member) else None

    def finish(self) -> None:
        """The steps of the operations that were held back."""
        if passing(self.group):
            self.steps += steps_by_blocks(self.group)
            self.differs = True
        else:
            for member in self.group:
                self.steps += member.definition.kernel(member.arguments)
        self.group = []
