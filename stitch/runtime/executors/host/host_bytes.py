"""Bound the host memory that an executor takes to run a program, outside the memory spaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from stitch.linker import program_of_body
from stitch.machine import MachineShape, footprint
from stitch.ops import (
    LINE_NBYTES,
    computed_nbytes,
    numpy_bytes,
    operand_nbytes,
)
from stitch.program import (
    ABSENT,
    Array,
    Body,
    Operation,
    OperationList,
    Program,
    ScanForm,
    TensorDesc,
    is_scan,
)
from stitch.runtime.executors.executor import ProgramBytes
from stitch.runtime.executors.host.arrangement import ArrangedBytes, arrange
from stitch.runtime.executors.host.chunks import CHUNK_SIZE, units_of
from stitch.runtime.executors.host.staging import is_direct

#: Returns the most bytes that an operation's kernel holds at once, and those held from binding on.
OperationBytes = Callable[[OperationList, Operation, dict[int, Array]], tuple[int, int]]
#: Bytes of the Python objects of one operation's steps.
STEPS_NBYTES = 4096
#: A session of ONNX Runtime with its threads, and its graph by operation (0.5 MiB, 14 KiB).
SESSION_NBYTES, NODE_NBYTES = 2 << 20, 16 << 10
#: The arena that all sessions share, and what it is counted in: programs of about one size count
#: it once.
ARENA_NBYTES = 16 << 20
#: The arena grows by powers of two, so values take up to twice their size.
ARENA_GROWTH = 2
#: Kernels may convert operands and results (blocked convolutions, transposed products).
FOREIGN_TIMES = 2
#: Operators by whose right operand, if it is constant, ONNX Runtime multiplies in another order.
PACKING = frozenset({"MatMul", "Gemm", "Conv"})
#: Operators that may gather the columns of the operand or the result.
GATHERING = frozenset({"Conv", "ConvInteger", "QLinearConv", "DeformConv", "ConvTranspose"})


def program_bytes(
    program: Program, bytes_of: OperationBytes = numpy_bytes, *, in_sessions: bool = False
) -> ProgramBytes:
    """Return an upper bound of the memory to run an expanded program.

    Args:
        bytes_of: Returns the memory of an operation's kernel.
        in_sessions: ONNX Runtime may compute some of the operations.
    """
    taken = _Counting(program.bodies, bytes_of, in_sessions).program(program)
    if not in_sessions:
        return taken
    nodes = len(program.operations) + sum(len(body.operations) for body in program.bodies)
    arena = taken.values + ARENA_GROWTH * most_inner_nbytes(program)
    return replace(
        taken,
        kept=taken.kept + SESSION_NBYTES + nodes * NODE_NBYTES + repacked_nbytes(program),
        values=max(1, -(-arena // ARENA_NBYTES)) * ARENA_NBYTES,
    )


class _Counting:
    """Counts a program and the bodies of its scans, each body once."""

    def __init__(
        self, bodies: tuple[Body, ...], bytes_of: OperationBytes, in_sessions: bool
    ) -> None:
        self.bodies = OperationList("", (), (), (), (), (), bodies=bodies)
        self.bytes_of = bytes_of
        self.in_sessions = in_sessions
        #: By body: its memory as a program, and that of converting its slots.
        self._counted: dict[int, tuple[ProgramBytes, int]] = {}

    def program(self, program: Program, listed: Sequence[Operation] | None = None) -> ProgramBytes:
        """Count a program; `listed` are its operations with the body indices of `self.bodies`."""
        mine, constants = program.operations, program.constant_data()
        staged = _staged(program)
        kept = _computed_constants(program) + staged
        bound, kernels, largest = STEPS_NBYTES * len(mine), 0, ABSENT
        for index, operation in enumerate(mine):
            if is_scan(operation):
                body, moved = self._body((listed or mine)[index].body)
                nbytes, held = self._scan(program, operation, body, moved)
                kept, staged = kept + body.kept, staged + body.staged
            else:
                count = self.bytes_of
                nbytes, held = program.forms[index].get(
                    ("bytes", count), count, program, operation, constants
                )
            bound += held
            if nbytes > kernels:
                kernels, largest = nbytes, index
        units = units_of(program, ())
        arrangement = arrange(program, units, constants)
        chunks = max((len(u.operations) for u in units if u.is_chunked), default=0) * CHUNK_SIZE * 8
        text = "" if largest == ABSENT else _text(program, mine[largest])
        return ArrangedBytes(
            kept, bound, arrangement.nbytes, max(kernels, chunks), text, staged,
            arrangement=arrangement,
        )  # fmt: skip

    def _body(self, index: int) -> tuple[ProgramBytes, int]:
        if index not in self._counted:
            body = self.bodies.bodies[index]
            # An upper bound: results that repeat a state count too.
            program = program_of_body(self.bodies, index, len(body.outputs))
            taken = self.program(program, body.operations)
            self._counted[index] = taken, _moved_nbytes(program)
        return self._counted[index]

    def _scan(
        self, within: OperationList, operation: Operation, inside: ProgramBytes, moved: int
    ) -> tuple[int, int]:
        """Return the bytes of a scan while it runs, and those from its binding on."""
        form, body = ScanForm.of(operation), within.bodies[operation.body]
        elements = [*body.input_types[form.states :][: form.sequences]]
        has_buffers = form.sides > 1 or form.has_condition
        elements += body.output_types[0 if has_buffers else form.states :]
        own = sum(computed_nbytes(kind) + LINE_NBYTES for kind in elements if kind is not None)
        passing = own + moved + inside.values + LINE_NBYTES + inside.kernels
        unwanted = sum(
            computed_nbytes(kind)
            for kind, v in zip(form.result_types(body.output_types), operation.outputs, strict=True)
            if v == ABSENT
        )
        # One more for the prepared body, which all sides share.
        kept = (form.sides + 1) * inside.bound + form.sides * inside.staged + unwanted
        if self.in_sessions:
            passing = max(passing, session_bytes(within, operation, {})[0])
        return passing, kept


def _text(program: Program, operation: Operation) -> str:
    """Describe an operation: its name, the types of its operands, its location."""
    kinds = (program.values[v].type.text() if v != ABSENT else "_" for v in operation.inputs)
    at = f" at {operation.location}" if operation.location else ""
    return f"{operation.title}({', '.join(kinds)}){at}"


def program_peak(program: Program, machine: MachineShape, taken: ProgramBytes) -> int:
    """Return all host memory of one run: slots and scratch in their spaces, and the executor's."""
    slots = [program.input_desc(i) for i in range(len(program.inputs))]
    slots += [
        program.output_desc(i)
        for i, slot in enumerate(program.outputs)
        if slot.aliases_input is None
    ]
    scratch = 0
    if program.scratch.size_per_bank:
        banks = machine.space(program.scratch.space).banks
        scratch = program.scratch.size_per_bank * banks
    in_spaces = sum(committed_nbytes(desc, machine) for desc in slots) + scratch
    return in_spaces + taken.peak


def committed_nbytes(desc: TensorDesc, machine: MachineShape) -> int:
    """Return the bytes of a footprint that are ever written: dense values use its start only."""
    if desc.layout.is_dense:
        return desc.layout.data_type.nbytes(desc.elements)
    return footprint(desc, machine).nbytes


def either_bytes(
    program: OperationList, operation: Operation, constants: dict[int, Array]
) -> tuple[int, int]:
    """Return the maximum over NumPy's, ONNX Runtime's and PyTorch's kernels for an operation."""
    by_numpy, kept = numpy_bytes(program, operation, constants)
    return max(by_numpy, session_bytes(program, operation, constants)[0]), kept


def session_bytes(
    program: OperationList, operation: Operation, constants: dict[int, Array]
) -> tuple[int, int]:
    """Return the maximum of ONNX Runtime's kernel, in the arena."""
    nbytes = FOREIGN_TIMES * operand_nbytes(program, operation)
    if is_scan(operation):
        # Each round allocates the values of the body.
        body = program.bodies[operation.body]
        inside = OperationList("", (), (), body.values, body.operations, body.constants,
                               bodies=program.bodies)  # fmt: skip
        most = max((session_bytes(inside, o, constants)[0] for o in body.operations), default=0)
        nbytes += FOREIGN_TIMES * sum(computed_nbytes(v.type) for v in body.values) + most
    elif operation.is_foreign:
        nbytes += _score_nbytes(program, operation)
    elif operation.op in GATHERING:
        nbytes += _column_nbytes(program, operation)
    return nbytes, 0


def _score_nbytes(program: OperationList, operation: Operation) -> int:
    """Return the attention scores of a foreign operator with heads: two products of all rows."""
    heads = operation.attributes.get("num_heads", operation.attributes.get("q_num_heads", 0))
    if not isinstance(heads, int) or heads < 1:
        return 0
    shapes = [program.values[v].type.shape for v in operation.inputs if v != ABSENT]
    lengths = [shape[-2] for shape in shapes if len(shape) > 2] or [1]
    batch = max(shape[0] for shape in shapes if len(shape) > 2) if lengths != [1] else 1
    return FOREIGN_TIMES * heads * batch * max(lengths) * sum(lengths) * 4


def _column_nbytes(program: OperationList, operation: Operation) -> int:
    """Return the gathered windows of a convolution's operand or result."""
    shapes = [program.values[v].type.shape for v in operation.inputs if v != ABSENT]
    result = program.values[operation.outputs[0]].type.shape
    data, weights = shapes[0], next(s for s in shapes[1:] if len(s) > 2)
    places = min(math.prod(data[2:]), math.prod(result[2:]))
    return math.prod(weights[1:]) * places * 4 * max(1, data[1] // max(1, weights[1]))


def _computed_constants(program: Program) -> int:
    """Return the copies of narrow constants in their compute types."""
    nbytes = 0
    for constant in program.constants:
        kind = program.values[constant.value].type
        if constant.data.dtype != kind.data_type.compute_dtype:
            nbytes += computed_nbytes(kind)
    return nbytes


def _staged(program: Program) -> int:
    """Return the staging arrays, and those that round them."""
    constants = {c.value for c in program.constants}
    touched = _slots(program)
    touched |= {v for o in program.operations for v in (*o.inputs, *o.outputs) if v != ABSENT}
    nbytes = 0
    for value in touched - constants:
        stored = program.values[value]
        if not is_direct(stored):
            nbytes += 2 * computed_nbytes(stored.type)
    return nbytes


def _moved_nbytes(body: Program) -> int:
    """Return the slots of a staged body in their own types, and its scratch."""
    if all(map(is_direct, body.values)):
        return 0
    slots = (body.values[v].type for v in _slots(body))
    return sum(kind.nbytes + LINE_NBYTES for kind in slots) + body.scratch.size_per_bank


def _slots(program: Program) -> set[int]:
    return {s.value for s in program.inputs} | {s.value for s in program.outputs}


def repacked_nbytes(program: Program) -> int:
    """Return the bytes of constant weights, of which a session keeps a packed copy at most."""
    nbytes = 0
    parts: list[Program | Body] = [program, *program.bodies]
    for part in parts:
        weights = {v for o in part.operations if o.op in PACKING for v in o.inputs[1:2]}
        # Bodies may multiply by constants of the program around them.
        weights |= {v for o in part.operations if is_scan(o) for v in o.inputs}
        nbytes += sum(computed_nbytes(part.values[c.value].type) for c in part.constants
                      if c.value in weights)  # fmt: skip
    return nbytes


#: Longer programs count all values: the precedence of operations takes a square of bits.
MAX_OPERATIONS = 8192


def most_inner_nbytes(program: Program) -> int:
    """Return the peak of intermediate values over all possible orders of the operations.

    ONNX Runtime releases a value after its last reader, but chooses the order itself.
    """
    returned = tuple([slot.value for slot in program.outputs])
    values, alive = program.order.get(("alive", returned), _alive, program.operations, returned)
    sizes = np.array([computed_nbytes(program.values[v].type) for v in values], np.int64)
    count = len(program.operations)
    if count > MAX_OPERATIONS:
        return int(sizes.sum())
    nbytes = np.zeros(count, np.int64)
    for at in range(0, len(values), ROWS):
        rows = np.unpackbits(alive[at : at + ROWS], axis=1, count=count, bitorder="little")
        nbytes += sizes[at : at + ROWS] @ rows
    return int(nbytes.max(initial=0))


#: Values that are summed at once.
ROWS = 64


def _alive(
    operations: Sequence[Operation], returned: Collection[int]
) -> tuple[list[int], Array]:  # fmt: skip
    """Return the intermediate values, and for each a bit for each operation during which it may be
    alive, in any order of the operations."""
    count = len(operations)
    makers = {v: i for i, o in enumerate(operations) for v in o.outputs if v != ABSENT}
    outside = frozenset(returned)
    values = [v for v in makers if v not in outside]
    if count > MAX_OPERATIONS:
        return values, np.empty((0, 0), np.uint8)
    # By operation, the bit sets of those that must run before and after it.
    before, after = [0] * count, [0] * count
    readers: dict[int, set[int]] = {}
    for index, operation in enumerate(operations):
        for value in operation.inputs:
            readers.setdefault(value, set()).add(index)
        for maker in {makers[v] for v in operation.inputs if v in makers}:
            before[index] |= before[maker] | 1 << maker
    for index in reversed(range(count)):
        for maker in {makers[v] for v in operations[index].inputs if v in makers}:
            after[maker] |= after[index] | 1 << index
    every, nbytes = (1 << count) - 1, -(-count // 8)
    alive = np.empty((len(values), nbytes), np.uint8)
    for row, value in zip(alive, values, strict=True):
        # Dead during operations before its producer, and after all of its readers.
        dead = every if readers.get(value) else 0
        for reader in readers.get(value, ()):
            dead &= after[reader]
        bits = every & ~(dead | before[makers[value]])
        row[:] = np.frombuffer(bits.to_bytes(nbytes, "little"), np.uint8)
    return values, alive
