"""The NumPy executor: one kernel per operator, writing into preallocated arrays.

float16, bfloat16 and the block formats compute in float32 and round once per operator output. Long
elementwise operations are computed in chunks (`chunks`), and moved values are views
(`arrangement`). To observe single operations, a program is bound operation by operation, with the
same bits, except where a foreign call computes several at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import final

import numpy as np

from stitch.linker import expanded, with_used_bodies
from stitch.machine import MachineShape, footprint
from stitch.memory import prepare_copy
from stitch.ops import bytes_from_a_line
from stitch.program import (
    ABSENT,
    Array,
    Constant,
    InputSlot,
    MemoryLayout,
    Operation,
    OutputSlot,
    Program,
    Space,
    TensorDesc,
    Value,
    host_layout,
)
from stitch.runtime.executors.executor import (
    BoundProgram,
    Executor,
    PreparedProgram,
    ProgramBytes,
    Workspace,
    cached_attribute,
    with_fp_errors_ignored,
)
from stitch.runtime.executors.host.arrangement import Arrangement
from stitch.runtime.executors.host.bindings import Binding, Kernels
from stitch.runtime.executors.host.host_bytes import program_bytes
from stitch.runtime.executors.host.staging import StagedRegions, as_bytes, compute_type


class NumpyExecutor(Executor):
    """Runs every operator that Stitch defines, by NumPy kernels: the reference of the others."""

    name = "numpy"
    supports_threads = True

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        self.check_foreign(program)
        return PreparedKernels(expanded(program), machine, workspace or Workspace())

    def host_bytes(self, program: Program) -> ProgramBytes:
        return program_bytes(expanded(program))

    def link_obstacle(self, programs: Sequence[Program]) -> str:
        return ""


class PreparedKernels(Kernels, PreparedProgram):
    """A program's kernels, to be bound to any addresses."""

    @cached_attribute
    def is_plain(self) -> bool:
        """Whether units and views gain nothing over one operation after the other."""
        if self.chosen or any(len(unit.operations) > 1 or unit.foreign for unit in self.units):
            return False
        moved = self.arrangement.moved.items()
        return all(len(copied) == len(self.program.operations[i].outputs) for i, copied in moved)

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Bind by units and views, or plainly if that gains nothing or slots overlap."""
        if self.is_plain or not _are_disjoint(self.program, inputs, outputs):
            return self.bind_plainly(inputs, outputs, scratch)

        def binding(arrangement: Arrangement | None) -> Binding:
            regions = StagedRegions(self.staging, inputs, outputs, scratch)
            return Binding(self, regions, arrangement)

        @cache
        def one_by_one() -> BoundProgram:
            with self.workspace.kernels:
                if self.calls:
                    return binding(None).bound(self.calls_apart)
                # Operands keep their strides: NumPy's products of strided matrices differ in the
                # last bits from those of dense ones.
                return binding(self.arrangement).bound()

        with self.workspace.kernels:
            bound = binding(self.arrangement).bound_by_units()
        return replace(bound, one_by_one=one_by_one)

    def on_thread(self, workspace: Workspace) -> PreparedProgram:
        return self.in_workspace(workspace)

    def bind_plainly(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Bind operation by operation with NumPy's kernels, each value in a separate array."""
        regions = StagedRegions(self.staging, inputs, outputs, scratch)
        with self.workspace.kernels:
            return Binding(self, regions, uses_library=False).bound()


def _are_disjoint(program: Program, inputs: tuple[Array, ...], outputs: tuple[Array, ...]) -> bool:
    """Whether no slot overlaps an output but the input whose buffer that takes over."""
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


# Parts of a program


class WholeProgram:
    """A program with what `PartOfProgram` looks up in it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.data = program.constant_data()
        self.returned = {slot.value for slot in program.outputs}
        self.slots = {slot.value: slot for slot in program.inputs}
        self.readers = program.readers()
        #: The values of slots and constants: with the operations, they make the parts.
        self.slot_values = (
            tuple([s.value for s in program.inputs]), tuple([s.value for s in program.outputs]),
            tuple(self.data),
        )  # fmt: skip


class PartOfProgram:
    """Some operations of a program as a host program.

    Its outputs are the values that other operations read, outputs of the program, and `held`.
    Values are numbered by first use, so that equal parts are equal programs.

    Attributes:
        numbers: The part's values by the program's.
        inputs, outputs: The program's values that are the part's slots.
    """

    def __init__(
        self, whole: WholeProgram, operations: Sequence[int], held: Collection[int] = ()
    ) -> None:
        self.whole, self.program, self.data = whole, whole.program, whole.data
        self.inside = set(operations)
        self.held = held
        self.numbers: dict[int, int] = {}
        self.values: list[Value] = []
        self.constants: list[Constant] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.operations = [self._operation(self.program.operations[i]) for i in operations]

    def _operation(self, operation: Operation) -> Operation:
        inputs = tuple(map(self._operand, operation.inputs))
        for value in operation.outputs:
            if value != ABSENT:
                self._number(value)
                readers = self.whole.readers.get(value, set())
                if value in self.whole.returned or value in self.held or readers - self.inside:
                    self.outputs.append(value)
        outputs = tuple(self.numbers.get(v, ABSENT) for v in operation.outputs)
        return replace(operation, inputs=inputs, outputs=outputs)

    def _operand(self, value: int) -> int:
        if value == ABSENT:
            return ABSENT
        if value not in self.numbers:
            self._number(value)
            if value in self.data:
                self.constants.append(Constant(self.numbers[value], self.data[value]))
            else:
                self.inputs.append(value)
        return self.numbers[value]

    def _number(self, value: int) -> None:
        kind = self.program.values[value].type
        # Dense and in the compute type, as the executors' arrays are.
        name = f"v{len(self.values)}"
        self.numbers[value] = len(self.values)
        self.values.append(Value(name, kind, host_layout(compute_type(kind))))

    def program_of_part(self) -> Program:
        program, numbers = self.program, self.numbers
        slots = {v: self.whole.slots.get(v, InputSlot("", v)) for v in self.inputs}
        part = Program(
            program.name,
            tuple(replace(s, name=f"v{numbers[v]}", value=numbers[v]) for v, s in slots.items()),
            tuple(OutputSlot(f"v{numbers[v]}", numbers[v], self._alias(v)) for v in self.outputs),
            tuple(self.values),
            tuple(self.operations),
            tuple(self.constants),
            replace(program.scratch, size_per_bank=0),
            program.role,
            bodies=program.bodies,
        )
        return with_used_bodies(part)

    def _alias(self, value: int) -> int | None:
        """Return the part's input whose buffer an output takes over."""
        for slot in self.program.outputs:
            if slot.value == value and slot.aliases_input is not None:
                source = self.program.inputs[slot.aliases_input].value
                return self.inputs.index(source) if source in self.inputs else None
        return None


# Single operations as references


@final
class OperationReferences:
    """Computes single operations of a program by NumPy's kernels, for comparison."""

    def __init__(self, program: Program, machine: MachineShape) -> None:
        self._whole = WholeProgram(expanded(program))
        self._machine = machine

    def results(self, index: int, operands: Sequence[Array | None]) -> tuple[Array, ...]:
        """Compute an operation; return its results, but for absent ones, as they are stored."""
        program = self._whole.program
        operation = program.operations[index]
        values = [value for value in operation.outputs if value != ABSENT]
        part = PartOfProgram(self._whole, (index,), values)
        arrays = dict(zip(operation.inputs, operands, strict=True))
        inputs = []
        for value in part.inputs:
            array = arrays[value]
            assert array is not None, "only absent operands have no array"
            inputs.append(as_bytes(np.ascontiguousarray(array)))
        kinds = {value: program.values[value].type for value in part.outputs}
        outputs = {
            value: _empty(kind.shape, kind.data_type.compute_dtype) for value, kind in kinds.items()
        }
        prepared = NumpyExecutor().prepare(part.program_of_part(), self._machine)
        bound = prepared.bind(tuple(inputs), tuple(map(as_bytes, outputs.values())), None)
        for step in bound.steps:
            with_fp_errors_ignored(step)
        return tuple(self.kept(value, outputs[value]) for value in values)

    def kept(self, value: int, array: Array) -> Array:
        """Round a computed array to the value's type and its storage type, as readers get it."""
        described = self._whole.program.values[value]
        kind, layout = described.type.data_type, described.desc.layout
        computed = compute_type(described.type)
        if kind is not computed:
            array = with_fp_errors_ignored(lambda: array.astype(kind.dtype).astype(array.dtype))
        if layout.data_type in (kind, computed):
            return array
        host = TensorDesc(array.shape, host_layout(computed))
        stored = replace(
            layout, space=Space.HOST, memory_layout=MemoryLayout.INTERLEAVED, shard_spec=None,
            address=None,
        )  # fmt: skip
        desc = TensorDesc(array.shape, stored)
        region = np.zeros(footprint(desc, self._machine).nbytes, np.uint8)
        result = np.empty_like(array)
        prepare_copy(host, desc, self._machine).bind(
            as_bytes(np.ascontiguousarray(array)), region
        )()
        prepare_copy(desc, host, self._machine).bind(region, as_bytes(result))()
        return result


def _empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Return an array at a cache line, as those of the spaces are."""
    count = int(np.prod(shape, dtype=np.int64))
    return bytes_from_a_line(count * dtype.itemsize).view(dtype).reshape(shape)
