"""Assign storage to the values inside a program on the host: views, and a workspace.

A value is a view of the operand that it was moved from, or is computed inside the result that it is
moved to, if every operation that reads or writes it accepts that layout: batched matrix products
accept strided matrices, arithmetic accepts rows with gaps, all others need dense arrays. An output
that reuses an input's bytes has no views: its bytes hold two values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from stitch.ops import LINE_NBYTES, RESHAPING, are_in_range, definition_of, slices_of, windowed
from stitch.packing import Interval, pack_intervals
from stitch.program import ABSENT, Array, Operation, Program
from stitch.runtime.executors.executor import ProgramBytes
from stitch.runtime.executors.host.chunks import Unit
from stitch.runtime.executors.host.staging import is_direct

# Movements

#: Returns a view of an array; raises `ValueError` if a copy is needed.
View = Callable[[Array], Array]
WINDOW = ("stitch", "Window")
MOVEMENTS = RESHAPING | {"Concat", "Expand", "Slice", "Split", "Transpose"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of operand `input` that is copied to a part of result `output`.

    Attributes:
        source, target: The two parts, of one shape, as views of operand and result.
        result_view: The whole result as a view of the operand; None if it is not one.
        operand_view: The whole operand as a view of the result; None if it is not one.
    """

    input: int
    output: int
    source: View
    target: View
    result_view: View | None
    operand_view: View | None


def pieces(program: Program, operation: Operation, constants: dict[int, Array]) -> Sequence[Piece]:
    """Return what a movement copies; empty for other operations and unknown positions."""
    if (operation.domain, operation.op) == WINDOW:
        view = _window(program, operation, constants)
        return () if view is None else (Piece(0, 0, view, _same, view, None),)
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
        # The operand may be longer than the target shape: the two broadcast.
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
    """Return views of consecutive parts along an axis; None if a size is unknown (negative)."""
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
    data = [constants.get(v) for v in operation.inputs[1:]]
    if any(d is None for d, v in zip(data, operation.inputs[1:], strict=True) if v >= 0):
        return None
    bounds = [None if d is None else tuple(int(i) for i in d.ravel()) for d in data]
    starts, ends, axes, steps = (*bounds, None, None)[:4]
    assert starts is not None and ends is not None
    axes = tuple(range(len(starts))) if axes is None else tuple(a % len(shape) for a in axes)
    return itemgetter(slices_of(shape, starts, ends, axes, steps or (1,) * len(starts)))


def _window(program: Program, operation: Operation, constants: dict[int, Array]) -> View | None:
    """Return the view of a Window with constant rows in range; the kernel refuses others."""
    data, base, strides = operation.inputs
    if base not in constants or strides not in constants:
        return None
    first, steps = int(constants[base]), constants[strides].tolist()
    lengths = program.values[operation.outputs[0]].type.shape[: len(steps)]
    if not are_in_range(first, steps, lengths, program.values[data].type.shape[0]):
        return None
    return partial(windowed, base=first, strides=steps, lengths=lengths)


#: Placeholders of at most so many elements are arrays, which take a tenth of the time to make.
PLACEHOLDER_ELEMENTS = 1 << 14
_OF_SIZE = {nbytes: np.dtype(f"u{nbytes}") for nbytes in (1, 2, 4, 8)}

#: Operators whose NumPy functions broadcast and take rows with gaps.
ARITHMETIC = frozenset({"Add", "Sub", "Mul"})


class ValueStorage(NamedTuple):
    """A value in the bytes of value `root`: offset of its first element and strides, in bytes."""

    root: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The storage of a program's values.

    Attributes:
        storage: By value; values inside foreign units have none.
        offsets: Offsets in the workspace of the roots that are stored there.
        nbytes: Size of the workspace.
        moved: By movement, the pieces that it still copies; empty if it is views only.
    """

    storage: Mapping[int, ValueStorage]
    offsets: Mapping[int, int]
    nbytes: int
    moved: Mapping[int, tuple[Piece, ...]]


@dataclass(frozen=True, slots=True)
class ArrangedBytes(ProgramBytes):
    """The memory of a program, with its arrangement without foreign calls."""

    arrangement: Arrangement = field(kw_only=True, repr=False, compare=False)


def arrange(program: Program, units: Sequence[Unit], constants: dict[int, Array]) -> Arrangement:
    """Assign storage to all values of a program."""
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
        self.inputs = {s.value for s in program.inputs} | set(constants)
        self.is_direct = [*map(is_direct, program.values)]
        self.shared = {
            program.inputs[s.aliases_input].value
            for s in program.outputs
            if s.aliases_input is not None
        }
        self.makers: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        self.pieces: dict[int, Sequence[Piece]] = {}
        for index, operation in enumerate(program.operations):
            self.makers.update((v, index) for v in operation.outputs if v != ABSENT)
            for value in operation.inputs:
                self.readers.setdefault(value, []).append(index)
            if not units[self.unit_of[index]].foreign and self._all_direct(operation):
                self.pieces[index] = program.forms[index].get(
                    "pieces", pieces, program, operation, constants
                )
        #: By value: its root and its view, a placeholder with the right shape and strides.
        self.views: dict[int, tuple[int, Array]] = {v: (v, self._dense(v)) for v in self.inputs}
        self.moved: dict[int, tuple[Piece, ...]] = {}
        #: Operands that are computed inside a result: (operation, position).
        self.inside: set[tuple[int, int]] = set()

    def _all_direct(self, operation: Operation) -> bool:
        # Constants are sizes and positions, which are not moved.
        touched = [v for v in operation.inputs if v not in self.constants]
        return all(self.is_direct[v] for v in (*touched, *operation.outputs) if v >= 0)

    def arrangement(self) -> Arrangement:
        for index in reversed(range(len(self.program.operations))):
            if self.pieces.get(index):
                self._place_operands_in_result(index)
        for index, operation in enumerate(self.program.operations):
            if self.pieces.get(index):
                self._view_results(index, operation)
            for value in operation.outputs:
                if value != ABSENT and value not in self.views and not self._is_inner(value):
                    self.views[value] = (value, self._dense(value))
        offsets, nbytes = _Workspace(self).packed()
        storage = {}
        for value, (root, view) in self.views.items():
            start = 0 if root == value else _address(view) - _address(self.views[root][1])
            storage[value] = ValueStorage(root, start, view.strides)
        return Arrangement(storage, offsets, nbytes, self.moved)

    def _is_inner(self, value: int) -> bool:
        """Whether only the foreign unit that computes a value reads it."""
        unit = self.unit_of[self.makers[value]]
        return (
            self.units[unit].foreign
            and value not in self.outputs
            and all(self.unit_of[i] == unit for i in self.readers.get(value, ()))
        )

    def _dense(self, value: int) -> Array:
        """Return a placeholder with the shape and strides of a dense value."""
        kind = self.values[value].type
        # NumPy makes no views of extension types (float8); only the item size matters here.
        dtype = _OF_SIZE[kind.data_type.compute_dtype.itemsize]
        if math.prod(kind.shape) <= PLACEHOLDER_ELEMENTS:
            return np.empty(kind.shape, dtype)
        strides = np.cumprod([dtype.itemsize, *kind.shape[:0:-1]])[::-1]
        return np.lib.stride_tricks.as_strided(np.empty(1, dtype), kind.shape, tuple(strides))

    def _place_operands_in_result(self, index: int) -> None:
        """Compute the operands of a movement inside its result where possible."""
        operation = self.program.operations[index]
        result = operation.outputs[0]
        slot = self.outputs.get(result)
        if slot is not None and slot.aliases_input is not None:
            return
        if slot is None and result not in self.views and operation.op != "Concat":
            return
        root, whole = self.views.get(result) or (result, self._dense(result))
        for piece in self.pieces[index]:
            value = operation.inputs[piece.input]
            view = None if piece.operand_view is None else _viewed(piece.operand_view, whole)
            if view is not None and self._can_be_inside(view, value, index):
                self.views[value] = (root, view)
                self.views[result] = (root, whole)
                self.inside.add((index, piece.input))

    def _can_be_inside(self, view: Array, value: int, index: int) -> bool:
        maker = self.makers.get(value)
        if maker is None or value in self.views or value in self.outputs:
            return False
        if [v for v in self.program.operations[index].inputs if v >= 0].count(value) > 1:
            return False
        return self._can_write(maker, view) and all(
            i == index or self._can_read(i, view) for i in self.readers[value]
        )

    def _view_results(self, index: int, operation: Operation) -> None:
        """Make the results of a movement views of its operand; note the pieces to copy."""
        copied = []
        for piece in self.pieces[index]:
            if (index, piece.input) in self.inside:
                continue
            source, result = operation.inputs[piece.input], operation.outputs[piece.output]
            if result == ABSENT:
                continue
            root, whole = self.views[source]
            view = None
            if result not in self.views and result not in self.outputs and root not in self.shared:
                view = None if piece.result_view is None else _viewed(piece.result_view, whole)
            if view is not None and all(
                self._can_read(i, view) for i in self.readers.get(result, ())
            ):
                self.views[result] = (root, view)
            else:
                copied.append(piece)
        self.moved[index] = tuple(copied)

    def _can_read(self, index: int, view: Array) -> bool:
        """Whether an operation accepts an operand in this layout."""
        if view.flags.c_contiguous or self.pieces.get(index):
            return True
        operation = self.program.operations[index]
        unit = self.units[self.unit_of[index]]
        if unit.foreign or unit.is_chunked or operation.domain:
            return False
        if operation.op in ARITHMETIC:
            return _has_whole_rows(view)
        return operation.op == "MatMul" and self._is_batch(operation) and _is_matrix(view)

    def _can_write(self, index: int, view: Array) -> bool:
        """Whether an operation can write its result in this layout."""
        if view.flags.c_contiguous:
            return True
        operation = self.program.operations[index]
        unit = self.units[self.unit_of[index]]
        if self.pieces.get(index):
            # A movement writes piece by piece, if each piece is a view of the result.
            return all(_viewed(piece.target, view) is not None for piece in self.pieces[index])
        if unit.foreign or unit.is_chunked or operation.domain:
            return False
        if operation.op in ARITHMETIC:
            return _has_whole_rows(view)
        unit_stride = view.strides[-1] == view.itemsize
        batch = operation.op == "MatMul" and self._is_batch(operation)
        return batch and unit_stride and _is_matrix(view)

    def _is_batch(self, operation: Operation) -> bool:
        # A single matrix on the right multiplies one tall, dense matrix of all rows on the left.
        return all(len(self.values[v].type.shape) > 2 for v in operation.inputs)


class _Workspace:
    """Packs intermediate values by their lifetimes."""

    def __init__(self, arranger: _Arranger) -> None:
        self.arranger = arranger
        outside = arranger.inputs | set(arranger.outputs)
        roots = {
            root
            for root, _ in arranger.views.values()
            if root not in outside and arranger.is_direct[root]
        }
        #: By root: the first and last operation that uses its bytes.
        self.lives: dict[int, tuple[int, int]] = {}
        for value, (root, _) in arranger.views.items():
            if root in roots:
                moments = [arranger.makers[value], *arranger.readers.get(value, ())]
                first, last = self.lives.get(root, (moments[0], moments[0]))
                self.lives[root] = min(first, *moments), max(last, *moments)

    def packed(self) -> tuple[dict[int, int], int]:
        """Return the offsets by root, and the size of the workspace."""
        owner = self._share()
        groups: dict[int, list[int]] = {}
        for root in self.lives:
            groups.setdefault(owner[root], []).append(root)
        unit_of = self.arranger.unit_of
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
        return int(self.arranger.views[root][1].nbytes)

    def _share(self) -> dict[int, int]:
        """Return the root whose bytes each root reuses: an elementwise result an operand's."""
        owner = {root: root for root in self.lives}
        for index, operation in enumerate(self.arranger.program.operations):
            result = operation.outputs[0] if operation.outputs else ABSENT
            unit = self.arranger.units[self.arranger.unit_of[index]]
            if unit.foreign or self.lives.get(result, (-1, 0))[0] != index:
                continue
            if not definition_of(operation).elementwise:
                continue
            for value in operation.inputs:
                if self._is_last_use(value, result, index):
                    owner[result] = owner[self.arranger.views[value][0]]
                    break
        return owner

    def _is_last_use(self, value: int, result: int, index: int) -> bool:
        """Whether an operation is the last to read an operand, and reads nothing else of its root
        in another shape."""
        views = self.arranger.views
        root, view = views.get(value, (ABSENT, None))
        if view is None or root not in self.lives or self.lives[root][1] != index or root == result:
            return False
        others = [views[v] for v in self.arranger.program.operations[index].inputs if v in views]
        return (
            view.flags.c_contiguous
            and self.arranger.values[value].type == self.arranger.values[result].type
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
    """Whether the last axis is dense or repeats one element."""
    return view.shape[-1] == 1 or view.strides[-1] in (0, view.itemsize)


def _is_matrix(view: Array) -> bool:
    """Whether a BLAS accepts the matrices of a batch, plain or transposed."""
    rows, columns, size = view.strides[-2], view.strides[-1], view.itemsize
    height, width = view.shape[-2:]
    dense, leading = (columns, rows) if columns == size else (rows, columns)
    length = width if columns == size else height
    return dense == size and leading % size == 0 and leading >= length * size
