"""Indexing: what `tensor[key]` selects, worked out from the shape alone.

Comes in: a shape and a key of integers, slices, `...`, `None` and index lists. Goes out: the
slice to take, the axes to drop, and the new axes. Must not know: builders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from stitch.errors import CompileError
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import Array, DataType


@dataclass(frozen=True, slots=True)
class Selection:
    """One slice per sliced axis, then at most one gathered axis, dropped axes, new axes.

    `axes`, `starts`, `ends` and `steps` are ONNX Slice's; `dropped` counts axes of the sliced
    tensor, `new_axes` axes of the result; `gathered` is (axis of the sliced tensor, indices).
    """

    axes: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    steps: tuple[int, ...]
    dropped: tuple[int, ...]
    new_axes: tuple[int, ...]
    gathered: tuple[int, Any] | None


def selection_of(shape: tuple[int, ...], key: object) -> Selection:
    """What a key selects from a tensor of that shape; raises `CompileError` if it cannot."""
    parts = _expanded(key if isinstance(key, tuple) else (key,), len(shape))
    slices: list[tuple[int, int, int, int]] = []
    dropped: list[int] = []
    new_axes: list[int] = []
    gathered: tuple[int, Any] | None = None
    axis = position = 0
    for part in parts:
        if part is None:
            new_axes.append(position)
            position += 1
            continue
        length = shape[axis]
        if isinstance(part, slice):
            start, end, step = _slice(part, length)
            if (start, end, step) != (0, length, 1):
                slices.append((axis, start, end, step))
            position += 1
        elif isinstance(part, int | np.integer) and not isinstance(part, bool | np.bool_):
            place = _place(int(part), length, axis)
            slices.append((axis, place, place + 1, 1))
            dropped.append(axis)
        else:
            if gathered is not None:
                raise _refused("two index lists in one key", "index one axis at a time")
            gathered = (axis, _indices(part, length, axis))
            position += len(gathered[1].shape)
        axis += 1
    if gathered is not None and dropped:
        raise _refused("an index list beside an integer", "take the integer first: t[0][[1, 2]]")
    axes, starts, ends, steps = (tuple(part[i] for part in slices) for i in range(4))
    return Selection(axes, starts, ends, steps, tuple(dropped), tuple(new_axes), gathered)


def _expanded(key: tuple[object, ...], rank: int) -> list[object]:
    """The key with `...` written out, so that every axis has its part."""
    dots = [i for i, part in enumerate(key) if isinstance(part, EllipsisType)]
    used = sum(1 for part in key if part is not None and not isinstance(part, EllipsisType))
    if len(dots) > 1 or used > rank:
        raise mistake(
            "this key does not fit the tensor",
            expected=f"at most {rank} indices and one '...'",
            got=repr(key),
        )
    at = dots[0] if dots else len(key)
    return [*key[:at], *[slice(None)] * (rank - used), *key[at + 1 :]]


def _slice(part: slice, length: int) -> tuple[int, int, int]:
    """Start, end and step in ONNX's terms: an end before the first element is -length - 1."""
    try:
        start, end, step = part.indices(length)
    except (TypeError, ValueError) as error:
        raise _refused(f"the slice {part!r}", f"use whole numbers ({error})") from error
    if len(range(start, end, step)) == 0:
        return 0, 0, 1
    return start, (end if end >= 0 else -length - 1), step


def _place(index: int, length: int, axis: int) -> int:
    if not -length <= index < length:
        raise mistake(
            f"index {index} is outside axis {axis}",
            expected=f"{-length} to {length - 1}" if length else "an axis that is not empty",
        )
    return index % length


def _indices(part: object, length: int, axis: int) -> Any:
    """Index lists as checked int64 arrays; symbolic indices (integers) as they are."""
    if isinstance(part, SymbolicTensor):
        if part.data_type in (DataType.INT32, DataType.INT64):
            return part
        raise _refused(
            f"an index of type {part.data_type.value}",
            "a mask's result has no static shape: use where(mask, x, 0), or cast to int64",
        )
    if not isinstance(part, np.ndarray | Sequence) or isinstance(part, str):
        raise _refused(f"the index {part!r}", "index with integers, slices, '...', None or lists")
    indices: Array = np.asarray(part)
    if indices.size == 0:
        indices = indices.astype(np.int64)
    if indices.dtype == np.bool_ and indices.shape == (length,):
        indices = np.flatnonzero(indices)
    if indices.dtype.kind not in "iu":
        raise _refused(f"an index of type {indices.dtype}", "index with integers")
    for index in indices.reshape(-1):
        _place(int(index), length, axis)
    return np.where(indices < 0, indices.astype(np.int64) + length, indices).astype(np.int64)


def _refused(what: str, remedy: str) -> CompileError:
    return mistake(f"{what} cannot be used to index a tensor", remedy=remedy)
