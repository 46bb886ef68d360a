"""Arrays that are only to be read: views that stay so, and whether an array can still change."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[tuple[Any, ...], np.dtype[Any]]


class _Reading:
    """What a view keeps alive. It is no array and lends no writable bytes, so NumPy finds nothing
    below the view that would allow it to be written."""

    __slots__ = ("__array_interface__", "base")

    def __init__(self, array: Array) -> None:
        self.base = array
        # As plain bytes, to be viewed as what they are: not every type has a name here.
        self.__array_interface__ = {
            "version": 3, "shape": array.shape, "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "data": (array.__array_interface__["data"][0], True),
        }  # fmt: skip


def as_read_only(array: Array) -> Array:
    """A view of the same bytes that is read-only and that `flags.writeable = True` refuses."""
    view: Array = np.asarray(_Reading(array)).view(array.dtype)
    return view


def can_change(array: Array) -> bool:
    """Whether anyone can still write an array, or what it is a view of."""
    base: Any = array
    while base is not None:
        if isinstance(base, np.ndarray):
            if base.flags.writeable:
                return True
            base = base.base
        elif isinstance(base, memoryview):
            if not base.readonly:
                return True
            lent = base.obj
            if lent is not None and not isinstance(lent, np.ndarray):
                return not memoryview(lent).readonly
            base = lent
        else:
            base = base.base if type(base) is _Reading else None
    return False
