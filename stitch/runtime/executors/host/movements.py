"""Operations that only move elements, said as views: which part of the input goes where.

So nothing need be copied: an output may be seen in the input, and an input may be made in its place
in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np

from stitch.ops import RESHAPING, are_in_range, slices_of, windowed
from stitch.program import Array, Operation, Program

#: Sees an array as another of the same elements, or some of them; raises `ValueError` where that
#: takes a copy.
View = Callable[[Array], Array]
WINDOW = ("stitch", "TaskBatch")
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
