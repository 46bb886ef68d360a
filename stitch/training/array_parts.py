"""Parts of arrays by index: what `get_tensor` and `set_tensor` mean by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.program import Array


def part_of(name: str, array: Array, index: Any) -> Array:
    """The part of a tensor at an index; raises `UsageError` where it has none."""
    try:
        return np.asarray(array[_plain(index)])
    except (IndexError, TypeError, ValueError) as error:
        raise _refused(name, array, index, error) from error


def with_part(name: str, array: Array, part: Any, index: Any) -> Array:
    """The tensor with another part at an index; raises `UsageError` where it does not fit."""
    whole = array.copy()
    there = part_of(name, array, index)
    given = np.asarray(part)
    if given.shape != there.shape:
        raise UsageError(
            f"tensor {name!r} has a part of another shape at this index",
            expected=str(list(there.shape)), got=str(list(given.shape)),
        )  # fmt: skip
    if given.dtype.kind not in "biuf" and given.dtype != array.dtype:
        raise UsageError(f"tensor {name!r} holds numbers", got=str(given.dtype))
    whole[_plain(index)] = given
    return whole


def _plain(index: Any) -> Any:
    """Tensors of torch's among the indices as arrays, without loading torch to ask."""
    if isinstance(index, tuple):
        return tuple(map(_plain, index))
    return np.asarray(index) if hasattr(index, "detach") else index


def _refused(name: str, array: Array, index: Any, error: Exception) -> UsageError:
    return UsageError(
        f"tensor {name!r} has no such part: {error}",
        expected=f"an index into shape {list(array.shape)}", got=repr(index)[:100],
    )  # fmt: skip
