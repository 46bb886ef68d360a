"""The NumPy executor: each operator's own kernel, writing into preallocated arrays.

Dense values of the compute type are views of the space's bytes. Others (tiled, sharded, narrower
than float32) are staged in arrays prepared once per program; float16, bfloat16 and the block
formats compute in float32 and round once per operator output.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from stitch.errors import CompileError
from stitch.machine import MachineShape
from stitch.memory import prepare_copy
from stitch.ops import KernelArguments, OpDef, infer_types, lookup, resolve_attributes
from stitch.program import (
    ABSENT,
    Array,
    DataType,
    Program,
    TensorDesc,
    Value,
    ValueType,
    host_layout,
)
from stitch.runtime.executors.executor import BoundProgram, Executor, PreparedProgram, Thunk


class NumpyExecutor(Executor):
    """Runs every operator that Stitch defines, one NumPy kernel after the other."""

    name = "numpy"

    def prepare(self, program: Program, machine: MachineShape) -> PreparedProgram:
        """Check every operation's types and look its kernel up; raises `CompileError`."""
        check_types(program)
        return _Prepared(program, machine)


def check_types(program: Program) -> None:
    """Infer every operation's types anew and compare; a file may claim anything.

    Raises `CompileError` naming the operation and both types.
    """
    constants = program.constant_data()
    for index, operation in enumerate(program.operations):
        where = operation.location or f"operation {index} of {program.name!r}"
        inferred = infer_types(
            operation.op,
            [None if i == ABSENT else program.values[i].type for i in operation.inputs],
            domain=operation.domain,
            constants=[constants.get(i) for i in operation.inputs],
            attributes=operation.attributes,
            outputs=len(operation.outputs),
            location=where,
        )
        for value, kind in zip(operation.outputs, inferred, strict=False):
            if value != ABSENT and program.values[value].type != kind:
                raise CompileError(
                    f"{operation.op} does not make what the program says",
                    where=where,
                    expected=kind.text(),
                    got=program.values[value].type.text(),
                    remedy="compile the module again",
                )


class _Prepared(PreparedProgram):
    def __init__(self, program: Program, machine: MachineShape) -> None:
        self.program = program
        self.machine = machine
        self.definitions: list[OpDef] = [lookup(o.op, o.domain) for o in program.operations]
        self.attributes = [
            resolve_attributes(definition, o.attributes, o.location)
            for definition, o in zip(self.definitions, program.operations, strict=True)
        ]
        self.memos: list[dict[str, Array]] = [{} for _ in program.operations]
        self.constants = {
            c.value: _computable(c.data, program.values[c.value].type) for c in program.constants
        }
        self.staging: dict[int, Array] = {}
        self.later_reads = {i for o in program.operations for i in o.inputs}

    def stage(self, value: int) -> Array:
        """The prepared array of a value that cannot be computed in place."""
        found = self.staging.get(value)
        if found is None:
            kind = self.program.values[value].type
            found = np.zeros(kind.shape, kind.data_type.compute_dtype)
            self.staging[value] = found
        return found

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        return _Binding(self, inputs, outputs, scratch).bound()


class _Binding:
    """One binding under construction."""

    def __init__(
        self,
        prepared: _Prepared,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        scratch: Array | None,
    ) -> None:
        self.prepared = prepared
        program = prepared.program
        self.values = program.values
        self.steps: list[Thunk] = []
        self.arrays: dict[int, Array] = dict(prepared.constants)
        self.regions: dict[int, Array] = {}
        self.scratch = scratch
        for slot, region in zip(program.inputs, inputs, strict=True):
            self.regions[slot.value] = region
        for output, region in zip(program.outputs, outputs, strict=True):
            self.regions[output.value] = region
        for slot in program.inputs:
            if slot.value in prepared.later_reads:
                self.arrays[slot.value] = self._input(slot.value)

    def bound(self) -> BoundProgram:
        prepared, marks = self.prepared, [len(self.steps)]
        for index, operation in enumerate(prepared.program.operations):
            outputs = [v for v in operation.outputs if v != ABSENT]
            for value in outputs:
                self.arrays[value] = self._output(value)
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
            )
            self.steps += prepared.definitions[index].kernel(arguments)
            for value in outputs:
                self._store(value)
            marks.append(len(self.steps))
        spans = [(i, a, b) for i, (a, b) in enumerate(pairwise(marks))]
        if spans:
            # Staging of the inputs counts to the first operation.
            spans[0] = (0, 0, spans[0][2])
        staged = sum(a.nbytes for a in prepared.staging.values())
        return BoundProgram(tuple(self.steps), tuple(spans), self.arrays, staged)

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

    def _input(self, value: int) -> Array:
        found = self.values[value]
        if _is_direct(found):
            return dense_view(self.regions[value], found.type)
        array = self.prepared.stage(value)
        target = TensorDesc(found.type.shape, host_layout(_compute_type(found.type)))
        kernel = prepare_copy(found.desc, target, self.prepared.machine)
        self.steps.append(kernel.bind(self.regions[value], as_bytes(array)))
        return array

    def _output(self, value: int) -> Array:
        found = self.values[value]
        if value not in self.regions:
            self.regions[value] = self._scratch_region(found)
        if _is_direct(found):
            return dense_view(self.regions[value], found.type)
        return self.prepared.stage(value)

    def _scratch_region(self, value: Value) -> Array:
        desc = value.desc
        start = desc.layout.address
        if not desc.elements:
            return np.empty(0, np.uint8)
        assert self.scratch is not None and start is not None
        return self.scratch[start : start + desc.layout.data_type.nbytes(desc.elements)]

    def _store(self, value: int) -> None:
        """Round to the value's type, then write it in its layout; read back what was rounded."""
        found = self.values[value]
        if _is_direct(found):
            return
        array, region = self.arrays[value], self.regions[value]
        logical, computed = found.type.data_type, _compute_type(found.type)
        stored = found.desc.layout.data_type
        source = TensorDesc(found.type.shape, host_layout(computed))
        if logical is not computed and stored is not logical:
            rounded = np.empty(found.type.shape, logical.dtype)
            self.steps.append(partial(np.copyto, rounded, array, casting="unsafe"))
            self.steps.append(partial(np.copyto, array, rounded))
        write = prepare_copy(source, found.desc, self.prepared.machine)
        self.steps.append(write.bind(as_bytes(array), region))
        if stored is not computed and value in self.prepared.later_reads:
            read = prepare_copy(found.desc, source, self.prepared.machine)
            self.steps.append(read.bind(region, as_bytes(array)))


def _is_direct(value: Value) -> bool:
    """Whether a value's bytes are the array that kernels want."""
    layout = value.desc.layout
    kind = value.type.data_type
    return layout.is_dense and layout.data_type is kind and kind.dtype == kind.compute_dtype


def _compute_type(kind: ValueType) -> DataType:
    return DataType.from_dtype(kind.data_type.compute_dtype)


def _computable(data: Array, kind: ValueType) -> Array:
    return data if data.dtype == kind.data_type.compute_dtype else data.astype(np.float32)


def as_bytes(array: Array) -> Array:
    """The bytes of a C-contiguous array, as a flat uint8 view."""
    return array.reshape(-1).view(np.uint8)


def dense_view(region: Array, kind: ValueType) -> Array:
    """A dense row-major value at the start of a region, as an array over its bytes."""
    dtype = kind.data_type.dtype
    count = int(np.prod(kind.shape, dtype=np.int64))
    return region[: count * dtype.itemsize].view(dtype).reshape(kind.shape)
