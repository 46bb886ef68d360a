"""The NumPy executor: each operator's own kernel, writing into preallocated arrays.

Dense values of the compute type are views of the space's bytes, others are staged; float16,
bfloat16 and the block formats compute in float32 and round once per operator output.

Consecutive long elementwise operations are computed in chunks (`chunks`), and values that differ
only in shape are views (`arrangement`). To observe single operations, the program is bound
operation by operation: the same bits, except where a foreign call computes several at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
    LinkTerms,
    PreparedProgram,
    ProgramBytes,
    Workspace,
    cached_attribute,
    with_fp_errors_ignored,
)
from stitch.runtime.executors.host.bindings import (
    ApartBinding,
    Kernels,
    OperationBinding,
    UnitBinding,
)
from stitch.runtime.executors.host.host_bytes import program_bytes
from stitch.runtime.executors.host.staging import StagedRegions, as_bytes, compute_type


class NumpyExecutor(Executor):
    """Runs every operator that Stitch defines, one NumPy kernel after the other; of an operation
    that carries a body, the body: what it computes is what the program means."""

    name = "numpy"
    supports_threads = True

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Look every operation's kernel up; raises `CompileError` for an unknown operator."""
        self.check_foreign(program)
        return PreparedKernels(expanded(program), machine, workspace or Workspace())

    def host_bytes(self, program: Program) -> ProgramBytes:
        """What our own kernels take, as their definitions say."""
        return program_bytes(expanded(program))

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        """The same bits: each operation has a kernel of its own. Nothing is gained: as many calls
        are made."""
        return LinkTerms()


class PreparedKernels(Kernels, PreparedProgram):
    """A program's kernels, to be bound to any addresses."""

    @cached_attribute
    def is_plain(self) -> bool:
        """Whether nothing is gained over one operation after the other."""
        if self.chosen or any(len(unit.operations) > 1 or unit.foreign for unit in self.units):
            return False
        moved = self.arrangement.moved.items()
        return all(len(left) == len(self.program.operations[i].outputs) for i, left in moved)

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps by units and without copies; plain ones if nothing is gained so."""
        if self.is_plain or not _lie_apart(self.program, inputs, outputs):
            return self.bind_plainly(inputs, outputs, scratch)

        def binding() -> UnitBinding:
            return UnitBinding(self, StagedRegions(self.staging, inputs, outputs, scratch))

        @cache
        def one_by_one() -> BoundProgram:
            if self.calls:
                return self.bind_apart(inputs, outputs, scratch)
            # The same kernels on operands of the same forms: NumPy multiplies dense matrices in
            # another order than those that lie apart, so the last bits would not be the same.
            with self.workspace.kernels:
                return binding().bound()

        with self.workspace.kernels:
            return replace(binding().bound_by_units(), one_by_one=one_by_one)

    def on_thread(self, workspace: Workspace) -> PreparedProgram:
        """With staging of its own; constants and what was derived from them are shared."""
        return self.in_workspace(workspace)

    def bind_apart(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps operation by operation, every value in a place of its own: each by its foreign
        call, the library's kernel, or NumPy's."""
        if not _lie_apart(self.program, inputs, outputs):
            return self.bind_plainly(inputs, outputs, scratch)
        with self.workspace.kernels:
            return ApartBinding(self, StagedRegions(self.staging, inputs, outputs, scratch)).bound()

    def bind_plainly(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps operation by operation, by NumPy's kernels, every value in a place of its own."""
        with self.workspace.kernels:
            return OperationBinding(
                self, StagedRegions(self.staging, inputs, outputs, scratch)
            ).bound()


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


# Parts of a program


class WholeProgram:
    """A program, and what its parts ask of it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.data = program.constant_data()
        self.given = {slot.value for slot in program.outputs}
        self.slots = {slot.value: slot for slot in program.inputs}
        self.readers = program.readers()


class PartOfProgram:
    """Some operations as a program; `inputs` and `outputs`: which values are its slots.

    Outputs are what other operations read, the program's outputs, and `held`, which are given
    whoever reads them. Its values are numbered by first use, so that equal parts are equal
    programs.
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
                if value in self.whole.given or value in self.held or readers - self.inside:
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
        # As the arrays have it: dense, in the type that it is computed in.
        name = f"v{len(self.values)}"
        self.numbers[value] = len(self.values)
        self.values.append(Value(name, kind, host_layout(compute_type(kind))))

    def program_of_part(self) -> Program:
        """The part."""
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
        """Which of the part's inputs an output takes the place of."""
        for slot in self.program.outputs:
            if slot.value == value and slot.aliases_input is not None:
                source = self.program.inputs[slot.aliases_input].value
                return self.inputs.index(source) if source in self.inputs else None
        return None


# Single operations as references


@final
class OperationReferences:
    """The operations of one program, each as a program of its own; nothing is kept of a call."""

    def __init__(self, program: Program, machine: MachineShape) -> None:
        self._whole = WholeProgram(expanded(program))
        self._machine = machine

    def results(self, index: int, operands: Sequence[Array | None]) -> tuple[Array, ...]:
        """What the operation makes, but for results that are absent, each as it is kept."""
        program = self._whole.program
        operation = program.operations[index]
        made = [value for value in operation.outputs if value != ABSENT]
        part = PartOfProgram(self._whole, (index,), made)
        given = dict(zip(operation.inputs, operands, strict=True))
        taken = []
        for value in part.inputs:
            array = given[value]
            assert array is not None, "only what is absent has no array"
            taken.append(as_bytes(np.ascontiguousarray(array)))
        kinds = {value: program.values[value].type for value in part.outputs}
        left = {
            value: _empty(kind.shape, kind.data_type.compute_dtype) for value, kind in kinds.items()
        }
        prepared = NumpyExecutor().prepare(part.program_of_part(), self._machine)
        bound = prepared.bind(tuple(taken), tuple(map(as_bytes, left.values())), None)
        for step in bound.steps:
            with_fp_errors_ignored(step)
        return tuple(self.kept(value, left[value]) for value in made)

    def kept(self, value: int, array: Array) -> Array:
        """The array that is computed for a value as whoever reads it gets it: rounded to the type
        of the value, and to that in which it lies."""
        described = self._whole.program.values[value]
        kind, layout = described.type.data_type, described.desc.layout
        computed = compute_type(described.type)
        if kind is not computed:
            array = with_fp_errors_ignored(lambda: array.astype(kind.dtype).astype(array.dtype))
        if layout.data_type in (kind, computed):
            return array
        host = TensorDesc(array.shape, host_layout(computed))
        lying = replace(
            layout, space=Space.HOST, memory_layout=MemoryLayout.INTERLEAVED, shard_spec=None,
            address=None,
        )  # fmt: skip
        desc = TensorDesc(array.shape, lying)
        region = np.zeros(footprint(desc, self._machine).nbytes, np.uint8)
        result = np.empty_like(array)
        prepare_copy(host, desc, self._machine).bind(
            as_bytes(np.ascontiguousarray(array)), region
        )()
        prepare_copy(desc, host, self._machine).bind(region, as_bytes(result))()
        return result


def _empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """An array that begins where the spaces' do, at a line of the cache."""
    count = int(np.prod(shape, dtype=np.int64))
    return bytes_from_a_line(count * dtype.itemsize).view(dtype).reshape(shape)


# Measuring


def running_alone(
    executor: Executor, program: Program, machine: MachineShape, operands: Sequence[Array]
) -> Callable[[int], object]:
    """Return a function that runs a program `times` times in a row, on arrays of its own.

    Raises:
        CompileError: The executor has no kernels for the program.
    """
    prepared = executor.prepare_alone(program, machine)
    kinds = [program.values[slot.value].type for slot in program.outputs]
    results = [np.empty(kind.shape, kind.data_type.dtype) for kind in kinds]
    scratch = np.empty(program.scratch.size_per_bank, np.uint8)
    given, made = (tuple(map(as_bytes, arrays)) for arrays in (operands, results))
    steps = prepared.bind(given, made, scratch).steps
    # The steps know the bytes by their addresses alone.
    held = operands, results, scratch

    def run(times: int) -> object:
        for _ in range(times):
            for step in steps:
                step()
        return held

    return lambda times: with_fp_errors_ignored(run, times)
