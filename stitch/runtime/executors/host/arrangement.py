"""Assign storage to the values inside a program on the host: views, and a workspace.

A value is a view of the operand that it was moved from (`seen`), or is computed in place inside the
result that it is moved to (`made`), if every operation that reads or writes it accepts that layout:
batches of matrix products accept strided matrices, arithmetic accepts rows with gaps, all others
need dense arrays. An output that reuses an input's bytes is left alone: its bytes hold two values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from stitch.ops import LINE_NBYTES, RESHAPING, are_in_range, definition_of, slices_of, windowed
from stitch.packing import Interval, pack_intervals
from stitch.program import ABSENT, Array, Operation, Program
from stitch.runtime.executors.host.chunks import Unit
from stitch.runtime.executors.host.staging import is_direct

# Operations that only move elements

#: Sees an array as another of the same elements, or some of them; raises `ValueError` where that
#: takes a copy.
View = Callable[[Array], Array]
WINDOW = ("stitch", "Window")
MOVEMENTS = RESHAPING | {"Concat", "Expand", "Slice", "Split", "Transpose"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of operand `input` and the part of result `output` that gets it.

    `taken(input array)` and `place(output array)` have one shape. `seen` gives the whole result as
    a view of the operand, `made` the whole operand as a view of the result; None where there is
    more to it.
    """

    input: int
    output: int
    taken: View
    place: View
    seen: View | None
    made: View | None


def pieces(program: Program, operation: Operation, constants: dict[int, Array]) -> Sequence[Piece]:
    """What an operation moves; nothing if it does more than move, or is not known to."""
    if (operation.domain, operation.op) == WINDOW:
        seen = _window(program, operation, constants)
        return () if seen is None else (Piece(0, 0, seen, _same, seen, None),)
    if operation.domain or operation.op not in MOVEMENTS:
        return ()
    values = program.values
    shape = values[operation.inputs[0]].type.shape
    shapes = [values[v].type.shape if v >= 0 else () for v in operation.outputs]
    if operation.op in RESHAPING:
        there, back = (partial(np.reshape, shape=s, copy=False) for s in (shapes[0], shape))
        return (Piece(0, 0, _same, back, there, back),)
    if operation.op == "Transpose":
        order = operation.attributes.get("perm", tuple(range(len(shape)))[::-1])
        assert isinstance(order, tuple)
        there, back = (partial(np.transpose, axes=a) for a in (order, np.argsort(order)))
        return (Piece(0, 0, there, _same, there, back),)
    if operation.op == "Expand":
        # Numbers that repeat are seen, never made. The operand may be longer than the target says:
        # the two broadcast, and this is the result's shape.
        there = partial(np.broadcast_to, shape=shapes[0])
        return (Piece(0, 0, there, _same, there, None),)
    if operation.op == "Slice":
        cut = _slices(operation, shape, constants)
        return () if cut is None else (Piece(0, 0, cut, _same, cut, None),)
    axis = int(operation.attributes.get("axis", 0)) % len(shape)  # type: ignore[arg-type]
    if operation.op == "Split":
        parts = _parts(
            axis,
            [s[axis] if v >= 0 else -1 for s, v in zip(shapes, operation.outputs, strict=True)],
        )
        if parts is None:
            return ()
        return tuple(Piece(0, i, part, _same, part, None) for i, part in enumerate(parts))
    parts = _parts(axis, [values[v].type.shape[axis] for v in operation.inputs])
    assert parts is not None
    return tuple(Piece(i, 0, _same, part, None, part) for i, part in enumerate(parts))


def _same(array: Array) -> Array:
    return array


def _parts(axis: int, sizes: Sequence[int]) -> list[View] | None:
    """One part after the other along an axis; None if one is not wanted, and its size not known."""
    if min(sizes) < 0:
        return None
    parts: list[View] = []
    start = 0
    for size in sizes:
        parts.append(itemgetter((*(slice(None),) * axis, slice(start, start + size))))
        start += size
    return parts


def _slices(
    operation: Operation, shape: tuple[int, ...], constants: dict[int, Array]
) -> View | None:
    known = [constants.get(v) for v in operation.inputs[1:]]
    if any(k is None for k, v in zip(known, operation.inputs[1:], strict=True) if v >= 0):
        return None
    given = [None if k is None else tuple(int(i) for i in k.ravel()) for k in known]
    starts, ends, axes, steps = (*given, None, None)[:4]
    assert starts is not None and ends is not None
    axes = tuple(range(len(starts))) if axes is None else tuple(a % len(shape) for a in axes)
    return itemgetter(slices_of(shape, starts, ends, axes, steps or (1,) * len(starts)))


def _window(program: Program, operation: Operation, constants: dict[int, Array]) -> View | None:
    """A window whose rows are known, and in range; the kernel refuses what is not."""
    data, base, strides = operation.inputs
    if base not in constants or strides not in constants:
        return None
    first, steps = int(constants[base]), constants[strides].tolist()
    lengths = program.values[operation.outputs[0]].type.shape[: len(steps)]
    if not are_in_range(first, steps, lengths, program.values[data].type.shape[0]):
        return None
    return partial(windowed, base=first, strides=steps, lengths=lengths)


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
