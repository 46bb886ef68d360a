"""The NumPy executor: each operator's own kernel, writing into preallocated arrays.

Dense values of the compute type are views of the space's bytes, others are staged; float16,
bfloat16 and the block formats compute in float32 and round once per operator output.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from stitch.machine import MachineShape
from stitch.ops import KernelArguments, OpDef, infer_types, lookup, resolve_attributes
from stitch.program import ABSENT, Array, DataType, Program
from stitch.runtime.executors.executor import BoundProgram, Executor, PreparedProgram, Thunk
from stitch.runtime.executors.staging import StagedRegions, StagingArrays, computable


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

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        return _Binding(self, StagedRegions(self.staging, inputs, outputs, scratch)).bound()


class _Binding:
    """One binding under construction."""

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
            outputs = [v for v in operation.outputs if v != ABSENT]
            for value in outputs:
                self.arrays[value] = self.regions.place(value)
            constant = tuple(i in prepared.constants for i in operation.inputs)
            made = tuple(
                self._unused(value, i, index) if value == ABSENT else self.arrays[value]
                for i, value in enumerate(operation.outputs)
            )
            arguments = KernelArguments(
                tuple(None if i == ABSENT else self.arrays[i] for i in operation.inputs),
                made,
                prepared.attributes[index],
                constant,
                prepared.memos[index],
                tuple(
                    self.values[v].type.data_type if v != ABSENT else DataType.from_dtype(a.dtype)
                    for v, a in zip(operation.outputs, made, strict=True)
                ),
            )
            self.steps += prepared.definitions[index].kernel(arguments)
            for value in outputs:
                later = value in prepared.staging.later_reads
                self.steps += self.regions.write(value, self.arrays[value], read_back=later)
            marks.append(len(self.steps))
        spans = [(i, a, b) for i, (a, b) in enumerate(pairwise(marks))]
        if spans:
            # Staging of the inputs counts to the first operation.
            spans[0] = (0, 0, spans[0][2])
        return BoundProgram(tuple(self.steps), tuple(spans), self.arrays, prepared.staging.nbytes)

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
