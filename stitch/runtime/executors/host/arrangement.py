"""Where the values inside a program lie while it runs on the host: in views, and in a workspace.

A value is a view of the operand that it was moved from (`seen`), or is made in its place inside the
result that it is moved to (`made`), where every operation that reads or writes it takes it in that
form: a batch of matrix products takes strided matrices, arithmetic takes rows that lie apart, all
others want dense arrays. An output that takes the place of an input is left alone: its bytes are
two values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stitch.ops import LINE_NBYTES, definition_of
from stitch.packing import Interval, pack_intervals
from stitch.program import ABSENT, Array, Operation, Program
from stitch.runtime.executors.host.chunks import Unit
from stitch.runtime.executors.host.movements import Piece, View, pieces
from stitch.runtime.executors.host.staging import is_direct

#: NumPy functions of two operands, which repeat a short one, and take rows that lie apart.
ARITHMETIC = frozenset({"Add", "Sub", "Mul"})


class Seen(NamedTuple):
    """A value in the bytes of `root`: where its first element lies, and its strides (bytes)."""

    root: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`seen` has every value that has bytes; `offsets` those with bytes in the workspace.

    `moved[i]` are the pieces that operation `i`, a movement, still copies: none where it is
    nothing but views.
    """

    seen: Mapping[int, Seen]
    offsets: Mapping[int, int]
    nbytes: int
    moved: Mapping[int, tuple[Piece, ...]]


def arrange(program: Program, units: Sequence[Unit], constants: dict[int, Array]) -> Arrangement:
    """Where all values of a program lie."""
    return _Arranger(program, units, constants).arrangement()


class _Arranger:
    def __init__(
        self, program: Program, units: Sequence[Unit], constants: dict[int, Array]
    ) -> None:
        self.program = program
        self.values = program.values
        self.constants = constants
        self.units = units
        self.unit_of = {i: k for k, unit in enumerate(units) for i in unit.operations}
        self.outputs = {s.value: s for s in program.outputs}
        self.given = {s.value for s in program.inputs} | set(constants)
        self.shared = {
            program.inputs[s.aliases_input].value
            for s in program.outputs
            if s.aliases_input is not None
        }
        self.makers: dict[int, int] = {}
        self.readers: dict[int, list[tuple[int, int]]] = {}
        self.pieces: dict[int, Sequence[Piece]] = {}
        for index, operation in enumerate(program.operations):
            self.makers.update((v, index) for v in operation.outputs if v != ABSENT)
            for position, value in enumerate(operation.inputs):
                self.readers.setdefault(value, []).append((index, position))
            if not units[self.unit_of[index]].foreign and self._all_direct(operation):
                self.pieces[index] = pieces(program, operation, constants)
        #: Each value that has bytes: the value whose bytes they are, and what it looks like there.
        self.held: dict[int, tuple[int, Array]] = {v: (v, self._dense(v)) for v in self.given}
        self.moved: dict[int, tuple[Piece, ...]] = {}
        #: Operands that are made inside a result: (operation, position).
        self.made: set[tuple[int, int]] = set()

    def _all_direct(self, operation: Operation) -> bool:
        # Sizes and positions are constants, which have no part in the movement.
        touched = [v for v in operation.inputs if v not in self.constants]
        return all(is_direct(self.values[v]) for v in (*touched, *operation.outputs) if v >= 0)

    def arrangement(self) -> Arrangement:
        for index in reversed(range(len(self.program.operations))):
            if self.pieces.get(index):
                self._make_operands_in_place(index)
        for index, operation in enumerate(self.program.operations):
            if self.pieces.get(index):
                self._see_results(index, operation)
            for value in operation.outputs:
                if value != ABSENT and value not in self.held and not self._is_inner(value):
                    self.held[value] = (value, self._dense(value))
        offsets, nbytes = _Workspace(self).packed()
        seen = {}
        for value, (root, view) in self.held.items():
            start = _address(view) - _address(self.held[root][1])
            seen[value] = Seen(root, start, view.strides)
        return Arrangement(seen, offsets, nbytes, self.moved)

    def _is_inner(self, value: int) -> bool:
        """Whether only the foreign unit that makes a value reads it."""
        unit = self.unit_of[self.makers[value]]
        return (
            self.units[unit].foreign
            and value not in self.outputs
            and all(self.unit_of[i] == unit for i, _ in self.readers.get(value, ()))
        )

    def _dense(self, value: int) -> Array:
        """An array that is never read: it stands for the shape and strides of a dense value."""
        kind = self.values[value].type
        # Views of NumPy's are not made of others' types (float8): only the size counts here.
        dtype = np.dtype(f"u{kind.data_type.compute_dtype.itemsize}")
        strides = np.cumprod([dtype.itemsize, *kind.shape[:0:-1]])[::-1] if kind.shape else ()
        return np.lib.stride_tricks.as_strided(np.empty(1, dtype), kind.shape, tuple(strides))

    def _make_operands_in_place(self, index: int) -> None:
        """Operands of a movement become parts of its result, which lies where it must."""
        operation = self.program.operations[index]
        result = operation.outputs[0]
        slot = self.outputs.get(result)
        if slot is not None and slot.aliases_input is not None:
            return
        if slot is None and result not in self.held and operation.op != "Concat":
            return
        root, whole = self.held.get(result) or (result, self._dense(result))
        for piece in self.pieces[index]:
            value = operation.inputs[piece.input]
            view = None if piece.made is None else _viewed(piece.made, whole)
            if view is not None and self._can_lie_in(view, value, index):
                self.held[value] = (root, view)
                self.held[result] = (root, whole)
                self.made.add((index, piece.input))

    def _can_lie_in(self, view: Array, value: int, index: int) -> bool:
        maker = self.makers.get(value)
        if maker is None or value in self.held or value in self.outputs:
            return False
        if [v for v in self.program.operations[index].inputs if v >= 0].count(value) > 1:
            return False
        return self._is_written(maker, view) and all(
            i == index or self._is_read(i, position, view) for i, position in self.readers[value]
        )

    def _see_results(self, index: int, operation: Operation) -> None:
        """Results of a movement become views of its operand; what cannot is copied."""
        left = []
        for piece in self.pieces[index]:
            if (index, piece.input) in self.made:
                continue
            source, result = operation.inputs[piece.input], operation.outputs[piece.output]
            if result == ABSENT:
                continue
            root, whole = self.held[source]
            view = None
            if result not in self.held and result not in self.outputs and root not in self.shared:
                view = None if piece.seen is None else _viewed(piece.seen, whole)
            if view is not None and all(
                self._is_read(i, position, view) for i, position in self.readers.get(result, ())
            ):
                self.held[result] = (root, view)
            else:
                left.append(piece)
        self.moved[index] = tuple(left)

    def _is_read(self, index: int, position: int, view: Array) -> bool:
        """Whether an operation takes an operand in this form."""
        if view.flags.c_contiguous or self.pieces.get(index):
            return True
        operation = self.program.operations[index]
        unit = self.units[self.unit_of[index]]
        if unit.foreign or unit.group or operation.domain:
            return False
        if operation.op in ARITHMETIC:
            return _has_whole_rows(view)
        return operation.op == "MatMul" and self._is_batch(operation) and _is_matrix(view)

    def _is_written(self, index: int, view: Array) -> bool:
        """Whether an operation makes its result in this form."""
        if view.flags.c_contiguous:
            return True
        operation = self.program.operations[index]
        unit = self.units[self.unit_of[index]]
        if self.pieces.get(index):
            # What moves fills its result piece by piece, where a piece can be seen in it.
            return all(_viewed(piece.place, view) is not None for piece in self.pieces[index])
        if unit.foreign or unit.group or operation.domain:
            return False
        if operation.op in ARITHMETIC:
            return _has_whole_rows(view)
        unit_stride = view.strides[-1] == view.itemsize
        batch = operation.op == "MatMul" and self._is_batch(operation)
        return batch and unit_stride and _is_matrix(view)

    def _is_batch(self, operation: Operation) -> bool:
        # A single matrix on the right makes one tall matrix of the rows on the left.
        return all(len(self.values[v].type.shape) > 2 for v in operation.inputs)


class _Workspace:
    """Packs the values that have bytes of their own by when they live."""

    def __init__(self, planner: _Arranger) -> None:
        self.planner = planner
        outside = planner.given | set(planner.outputs)
        roots = {
            root
            for root, _ in planner.held.values()
            if root not in outside and is_direct(planner.values[root])
        }
        #: First and last operation of all that lies in a root's bytes.
        self.lives: dict[int, tuple[int, int]] = {}
        for value, (root, _) in planner.held.items():
            if root in roots:
                moments = [planner.makers[value], *(i for i, _ in planner.readers.get(value, ()))]
                first, last = self.lives.get(root, (moments[0], moments[0]))
                self.lives[root] = min(first, *moments), max(last, *moments)

    def packed(self) -> tuple[dict[int, int], int]:
        """Offsets by root, and the bytes of all."""
        owner = self._share()
        groups: dict[int, list[int]] = {}
        for root in self.lives:
            groups.setdefault(owner[root], []).append(root)
        unit_of = self.planner.unit_of
        packing = pack_intervals([
            Interval(
                unit_of[min(self.lives[m][0] for m in members)],
                unit_of[max(self.lives[m][1] for m in members)],
                -(-max(self._nbytes(m) for m in members) // LINE_NBYTES) * LINE_NBYTES,
            )
            for members in groups.values()
        ])  # fmt: skip
        offsets = {
            member: offset
            for members, offset in zip(groups.values(), packing.offsets, strict=True)
            for member in members
        }
        return offsets, packing.peak_nbytes

    def _nbytes(self, root: int) -> int:
        return int(self.planner.held[root][1].nbytes)

    def _share(self) -> dict[int, int]:
        """For each root the one whose place it takes over: an elementwise result an operand's."""
        owner = {root: root for root in self.lives}
        for index, operation in enumerate(self.planner.program.operations):
            result = operation.outputs[0] if operation.outputs else ABSENT
            unit = self.planner.units[self.planner.unit_of[index]]
            if unit.foreign or self.lives.get(result, (-1, 0))[0] != index:
                continue
            if not definition_of(operation).elementwise:
                continue
            for value in operation.inputs:
                if self._is_left(value, result, index):
                    owner[result] = owner[self.planner.held[value][0]]
                    break
        return owner

    def _is_left(self, value: int, result: int, index: int) -> bool:
        """Whether an operand dies here, and nothing else is read of its bytes."""
        held = self.planner.held
        root, view = held.get(value, (ABSENT, None))
        if view is None or root not in self.lives or self.lives[root][1] != index or root == result:
            return False
        others = [held[v] for v in self.planner.program.operations[index].inputs if v in held]
        return (
            view.flags.c_contiguous
            and self.planner.values[value].type == self.planner.values[result].type
            and self._nbytes(root) == view.nbytes
            and all(
                other.flags.c_contiguous and other.shape == view.shape
                for there, other in others
                if there == root
            )
        )


def _viewed(view: View, array: Array) -> Array | None:
    try:
        return view(array)
    except ValueError:
        return None


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _has_whole_rows(view: Array) -> bool:
    """Whether the last axis lies dense, or repeats one number."""
    return view.shape[-1] == 1 or view.strides[-1] in (0, view.itemsize)


def _is_matrix(view: Array) -> bool:
    """Whether the matrices of a batch are ones that a BLAS takes, as they are or transposed."""
    rows, columns, size = view.strides[-2], view.strides[-1], view.itemsize
    height, width = view.shape[-2:]
    dense, leading = (columns, rows) if columns == size else (rows, columns)
    length = width if columns == size else height
    return dense == size and leading % size == 0 and leading >= length * size
