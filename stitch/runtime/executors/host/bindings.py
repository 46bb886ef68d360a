"""Bind a program's kernels to memory: operation by operation, or unit by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Self
from weakref import WeakKeyDictionary

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
from stitch.program import ABSENT, Array, DataType, Facts, Operation, Program, ScanForm
from stitch.runtime.executors.executor import (
    BoundProgram,
    ProgramBytes,
    Thunk,
    Workspace,
    cached_attribute,
)
from stitch.runtime.executors.host.arrangement import ArrangedBytes, Arrangement, arrange
from stitch.runtime.executors.host.chunks import (
    Member,
    Unit,
    can_join,
    inner_members,
    joins,
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


@dataclass(frozen=True, slots=True, eq=False)
class ForeignCall:
    """Consecutive operations that one call of another runtime computes.

    Attributes:
        operations: Their indices, in the program's order.
        inputs, outputs: The values that it reads, and those that others read.
        bind: Returns the steps on dense arrays of the compute types, by value.
    """

    operations: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bind: Callable[[dict[int, Array]], Sequence[Thunk]]


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """Kernels of another library for single operations, on strided arrays.

    Attributes:
        price: Returns the microseconds of an operation, from the multiply-adds of a product and the
            number of matrices that it multiplies; infinite if there is no kernel for it.
        bind: Returns the steps of an operation; None if its arrays do not suit.
        priced: The prices of operations by form: forms outlive the library.
    """

    price: Callable[[Program, Operation, int, int], float]
    bind: Callable[[Operation, KernelArguments], Sequence[Thunk] | None]
    priced: WeakKeyDictionary[Facts, float] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )


class Kernels:
    """The kernels of a program.

    Args:
        calls: Foreign calls, whose operations need no kernels.
        library: A library, used for the operations `chosen` where it can.
        calls_apart: Creates foreign calls of single operations, to observe these.

    Raises:
        CompileError: An operator is unknown.
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
        self.attributes = [
            form.get("attributes", attributes_of, o)
            for form, o in zip(program.forms, program.operations, strict=True)
        ]
        self.memos: list[dict[str, Array]] = [{} for _ in program.operations]
        self.constants = {
            c.value: computable(c.data, program.values[c.value].type) for c in program.constants
        }
        self.machine = machine
        self.staging = StagingArrays(program, machine)
        self.readers = program.readers()
        self._inside: dict[int, Kernels] = {}

    def inside(self, index: int) -> Kernels:
        """Return the kernels of an operation's body; constant operands are constants there."""
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
        """Return the kernels with a workspace and staging of their own; constants are shared."""
        own = copy(self)
        own.workspace, own.staging = workspace, StagingArrays(self.program, self.machine)
        own._inside = {i: inside.in_workspace(workspace) for i, inside in self._inside.items()}
        return own

    @cached_attribute
    def calls_apart(self) -> dict[int, ForeignCall]:
        """Foreign calls of single operations, by operation."""
        return {call.operations[0]: call for call in self._make_calls_apart()}

    @cached_attribute
    def is_staged(self) -> bool:
        """Whether any value needs staging."""
        return not all(is_direct(value) for value in self.program.values)

    @cached_attribute
    def units(self) -> tuple[Unit, ...]:
        return units_of(self.program, tuple(self.calls), self.chosen)

    @cached_attribute
    def arrangement(self) -> Arrangement:
        return arrange(self.program, self.units, self.constants)

    def reuse(self, counted: ProgramBytes) -> None:
        """Take over the arrangement of `host_bytes`, which has the units of a program without
        foreign calls and without operations of the library."""
        if isinstance(counted, ArrangedBytes) and not self.calls and not self.chosen:
            self.arrangement = counted.arrangement


class Binding:
    """A binding under construction.

    Args:
        arrangement: Where values are stored; by default each is an array of its own.
        workspace: The bytes of that arrangement; by default those of `prepared`.
        uses_library: Whether the library's kernels are used.
    """

    def __init__(
        self,
        prepared: Kernels,
        regions: StagedRegions,
        arrangement: Arrangement | None = None,
        workspace: Array | None = None,
        *,
        uses_library: bool = True,
    ) -> None:
        self.prepared = prepared
        self.regions = regions
        self.values = prepared.program.values
        self.library = prepared.library if uses_library else None
        self.steps: list[Thunk] = []
        self.written: dict[int, tuple[Thunk, ...]] = {}
        self.arrays: dict[int, Array] = dict(prepared.constants)
        for slot in prepared.program.inputs:
            if slot.value in prepared.readers:
                self.arrays[slot.value] = regions.read(slot.value, self.steps)
        self.arrangement = arrangement or Arrangement({}, {}, 0, {})
        nbytes = self.arrangement.nbytes
        self.workspace = prepared.workspace.region(nbytes) if workspace is None else workspace
        #: By root, the number of values in its bytes.
        self.sharers = Counter(stored.root for stored in self.arrangement.storage.values())
        for value, stored in self.arrangement.storage.items():
            if value not in self.arrays and stored.root in self.arrays:
                # A view of an input or a constant.
                self.arrays[value] = self.output(value)

    @property
    def nbytes(self) -> int:
        """Bytes that the binding takes outside the regions."""
        return self.prepared.staging.nbytes + self.workspace.nbytes

    def bound(self, calls: Mapping[int, ForeignCall] = MappingProxyType({})) -> BoundProgram:
        """Bind operation by operation; `calls` are foreign calls of single ones."""
        marks = [len(self.steps)]
        for index in range(len(self.prepared.program.operations)):
            if index in calls:
                self.call(calls[index])
            else:
                self.append(index)
            marks.append(len(self.steps))
        spans = tuple([(i, a, b) for i, (a, b) in enumerate(pairwise(marks))])
        return BoundProgram(
            tuple(self.steps), spans, self.arrays, self.nbytes, written=self.written
        )

    def bound_by_units(self) -> BoundProgram:
        """Bind all units, one after the other."""
        for unit in self.prepared.units:
            call = self.prepared.calls.get(unit.operations)
            if call is not None:
                self.call(call)
            elif unit.is_chunked:
                self.append_chunked(unit.operations)
            else:
                self.append(*unit.operations)
        return BoundProgram(tuple(self.steps), (), self.arrays, self.nbytes)

    def output(self, value: int) -> Array:
        """Return the array that an operation writes a value into, in the bytes of its root."""
        stored = self.arrangement.storage.get(value)
        if stored is None:
            return self.regions.output(value)
        root = self.arrays.get(stored.root)
        if root is None:
            root = self.arrays[stored.root] = self._root_array(stored.root)
        shape = self.values[value].type.shape
        if stored.root == value:
            return root
        if 0 in shape:
            # NumPy refuses the strides of an empty view.
            return np.empty(shape, root.dtype)
        return np.ndarray(shape, root.dtype, root, stored.offset, stored.strides)

    def _root_array(self, root: int) -> Array:
        offset = self.arrangement.offsets.get(root)
        if offset is None:
            return self.regions.output(root)
        kind = self.values[root].type
        return np.ndarray(kind.shape, kind.data_type.compute_dtype, self.workspace, offset)

    def append(self, index: int) -> None:
        """Append the steps of one operation; of a movement the copies that are not views."""
        operation = self.prepared.program.operations[index]
        copied = self.arrangement.moved.get(index)
        if copied is None:
            self.prepared.workspace.kernels.restart()
            self.steps += self.kernel_steps(index, self.arguments(index, operation))
            self.write(operation.outputs)
            return
        for value in operation.outputs:
            if value != ABSENT:
                self.arrays[value] = self.output(value)
        for piece in copied:
            source = piece.source(self.arrays[operation.inputs[piece.input]])
            target = piece.target(self.arrays[operation.outputs[piece.output]])
            self.steps += [partial(np.copyto, *pair) for pair in row_copies(target, source)]

    def kernel_steps(self, index: int, arguments: KernelArguments) -> Sequence[Thunk]:
        """Return the steps of the library's kernel if it is chosen and suits; else of NumPy's."""
        if self.library is not None and index in self.prepared.chosen:
            steps = self.library.bind(self.prepared.program.operations[index], arguments)
            if steps is not None:
                return steps
        return self.prepared.definitions[index].steps(arguments)

    def call(self, call: ForeignCall) -> None:
        """Append the steps of a foreign call."""
        arrays = {value: self.arrays[value] for value in call.inputs}
        for value in call.outputs:
            arrays[value] = self.arrays[value] = self.output(value)
        self.steps += call.bind(arrays)
        self.write(call.outputs, call.operations)

    def write(self, values: Sequence[int], inside: Collection[int] = ()) -> None:
        """Append the steps that round values and store them in their layouts; the operations
        `inside` read them as they were computed."""
        for value in values:
            if value != ABSENT:
                later = not self.prepared.readers.get(value, set()).issubset(inside)
                steps = self.regions.write(value, self.arrays[value], read_back=later)
                self.written[value] = tuple(steps)
                self.steps += steps

    def arguments(self, index: int, operation: Operation) -> KernelArguments:
        """Return the arguments of an operation's kernel."""
        prepared = self.prepared
        for value in operation.outputs:
            if value != ABSENT:
                self.arrays[value] = self.output(value)
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
        """Return an array for an absent output, which kernels write too."""
        operation = self.prepared.program.operations[index]
        kinds = infer_operation(
            operation,
            [None if i == ABSENT else self.values[i].type for i in operation.inputs],
            [self.prepared.constants.get(i) for i in operation.inputs],
            bodies=self.prepared.program.bodies,
        )
        return np.zeros(kinds[output].shape, kinds[output].data_type.compute_dtype)

    def append_chunked(self, operations: tuple[int, ...]) -> None:
        """Append a chunked unit; split it where a result overlaps another array."""
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
        if inner_members(group):
            self.steps += steps_by_chunks(group)
        else:
            for member in group:
                self.steps += member.definition.kernel(member.arguments)

    def _only_readers(self, value: int) -> frozenset[int] | None:
        """Return the readers of a value; None if it is also read outside or through a view."""
        if value not in self.arrangement.offsets or self.sharers[value] != 1:
            return None
        return frozenset(self.prepared.readers.get(value, ()))


class BodyBinding:
    """The body of a scan, bound to arrays; its workspace is in the memory of kernels."""

    def __init__(self, outer: Kernels, index: int) -> None:
        """Bind the body that operation `index` of `outer` carries."""
        self.kernels = outer.inside(index)
        operation = outer.program.operations[index]
        body = outer.program.bodies[operation.body]
        self.repeated = repeated_outputs(body, ScanForm.of(operation).states)

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Sequence[Thunk]:
        """Return the steps of a round on arrays of the compute types, one per operand."""
        kernels, program = self.kernels, self.kernels.program
        memory = kernels.workspace.kernels
        before: list[Thunk] = []
        after: list[Thunk] = []
        # The two sides of a scan never run at the same time.
        with memory.kept():
            memory.restart()
            region = memory.take(kernels.arrangement.nbytes)
            scratch = memory.take(program.scratch.size_per_bank if kernels.is_staged else 0)
            # Slots are named by the numbers of their operands.
            operands = [inputs[int(slot.name.split()[1])] for slot in program.inputs]
            stored_in = list(map(self._stored, (s.value for s in program.inputs), operands))
            stored_out = list(map(self._stored, (s.value for s in program.outputs), outputs))
            for array, stored in zip(operands, stored_in, strict=True):
                before += copy_steps(array, stored)
            for array, stored in zip(outputs, stored_out, strict=True):
                after += copy_steps(stored, array)
            with memory.kept():
                regions = StagedRegions(
                    kernels.staging, tuple(map(as_bytes, stored_in)),
                    tuple(map(as_bytes, stored_out)), scratch,
                )  # fmt: skip
                binding = Binding(kernels, regions, kernels.arrangement, region)
                bound = binding.bound_by_units()
        return (*before, *bound.steps, *after)

    def _stored(self, value: int, array: Array) -> Array:
        """Return the array of a slot's value in its own type: the given one if it has that type."""
        dtype = self.kernels.program.values[value].type.data_type.dtype
        if dtype == array.dtype:
            return array
        return workspace(array.shape, dtype)
