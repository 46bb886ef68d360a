"""Indexing: what `tensor[key]` selects, worked out from the shape alone, as NumPy selects it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from stitch.errors import CompileError
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import Array


@dataclass(frozen=True, slots=True)
class Selection:
    """One slice per sliced axis, then elements by index arrays, dropped axes, new axes.

    `axes`, `starts`, `ends` and `steps` are ONNX Slice's; `dropped` counts axes of the sliced
    tensor, `new_axes` axes of the result; `gathered` has axes of the sliced tensor, each with its
    indices, whose own axes stand before result axis `place`.
    """

    axes: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    steps: tuple[int, ...]
    dropped: tuple[int, ...]
    new_axes: tuple[int, ...]
    gathered: tuple[tuple[int, Any], ...]
    place: int


def selection_of(shape: tuple[int, ...], key: object) -> Selection:
    """What a key selects from a tensor of that shape; raises `CompileError` if it cannot."""
    parts = _expanded(key if isinstance(key, tuple) else (key,), shape)
    # Beside index arrays, whole numbers are such arrays (of no axes), as NumPy has it.
    has_arrays = any(not _is_basic(part) for part in parts)
    slices: list[tuple[int, int, int, int]] = []
    dropped: list[int] = []
    new_axes: list[int] = []
    gathered: list[tuple[int, Any]] = []
    at: list[int] = []
    axis = position = kept = 0
    for number, part in enumerate(parts):
        if part is None:
            new_axes.append(position)
            position += 1
            continue
        length = shape[axis]
        if isinstance(part, slice):
            start, end, step = _slice(part, length)
            if (start, end, step) != (0, length, 1):
                slices.append((axis, start, end, step))
            position, kept = position + 1, kept + 1
        elif _is_basic(part) and not has_arrays:
            place = _place(int(part), length, axis)  # type: ignore[call-overload]
            slices.append((axis, place, place + 1, 1))
            dropped.append(axis)
        else:
            gathered.append((axis, _indices(part, length, axis)))
            at.append(number)
            if len(at) == 1:
                before, first = position, kept
        axis += 1
    place = 0
    if gathered:
        is_together = at[-1] - at[0] == len(at) - 1
        place = first if is_together else 0
        rank = len(np.broadcast_shapes(*[tuple(indices.shape) for _, indices in gathered]))
        begin = before if is_together else 0
        new_axes = [n + rank if n >= begin else n for n in new_axes]
    axes, starts, ends, steps = (tuple(part[i] for part in slices) for i in range(4))
    return Selection(
        axes, starts, ends, steps, tuple(dropped), tuple(new_axes), tuple(gathered), place
    )


def _is_basic(part: object) -> bool:
    """Whether a part of a key is no index array."""
    is_number = isinstance(part, int | np.integer) and not isinstance(part, bool | np.bool_)
    return part is None or isinstance(part, slice) or is_number


def _expanded(key: tuple[object, ...], shape: tuple[int, ...]) -> list[object]:
    """The key with `...` and masks written out, so that every axis has its part."""
    written: list[object] = []
    for part in key:
        array = np.asarray(part) if isinstance(part, list | np.ndarray) else None
        if array is not None and array.dtype == np.bool_ and array.ndim > 1:
            used = sum(1 for p in written if p is not None and not isinstance(p, EllipsisType))
            if array.shape != shape[used : used + array.ndim] or EllipsisType in map(type, written):
                raise _refused(f"a mask of shape {list(array.shape)}", "give it the tensor's shape")
            written.extend(np.nonzero(array))
        else:
            written.append(part)
    return _with_dots(tuple(written), len(shape))


def _with_dots(key: tuple[object, ...], rank: int) -> list[object]:
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
        if part.dtype.kind in "iu":
            return part
        raise _refused(
            f"an index of type {part.data_type.value}",
            "a mask's result has no static shape: use where(mask, x, 0), or cast to int64",
        )
    if _is_basic(part):
        return np.asarray(_place(int(part), length, axis), np.int64)  # type: ignore[call-overload]
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
