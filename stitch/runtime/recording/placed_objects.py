"""The objects of generated code for one binding, recreated for other buffer addresses.

If only arrays over buffers depend on the address, as for NumPy kernels, another binding needs no
new kernels: just the same arrays over other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from stitch.memory import Arrivals
from stitch.planner import Buffer
from stitch.program import Array, Space
from stitch.runtime.executors import CallBox

#: Returns the bytes of a footprint.
RegionOf: TypeAlias = Callable[[Space, int, int], Array]
#: Types that do not depend on addresses.
_PLAIN = (
    int, float, complex, str, bytes, type(None), type, np.generic, np.dtype, np.ufunc,
    type(np.copyto), Arrivals, CallBox,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _View:
    """An object that is an array over a buffer's bytes, or a method of one."""

    position: int
    buffer: Buffer
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    method: str


class PlacedObjects:
    """Objects, some of which are arrays over buffers."""

    __slots__ = ("_objects", "_views")

    def __init__(self, objects: list[object], views: Sequence[_View]) -> None:
        self._objects, self._views = objects, tuple(views)

    @classmethod
    def of(
        cls,
        steps: Iterable[tuple[Sequence[object], Sequence[Buffer]]],
        region_of: RegionOf,
    ) -> PlacedObjects | None:
        """Analyze the objects of steps, each with the buffers whose addresses may change.

        Returns None if their dependence on the addresses is unknown.
        """
        objects: list[object] = []
        views: list[_View] = []
        for own, buffers in steps:
            spans = [(buffer, *byte_bounds(_region(buffer, region_of))) for buffer in buffers]
            for thing in own:
                array = _array_of(thing)
                if array is None:
                    if not _is_plain(thing):
                        return None
                elif array.size:
                    start, end = byte_bounds(array)
                    over = [s for s in spans if start < s[2] and s[1] < end]
                    if over:
                        ((buffer, low, high), *others) = over
                        if others or start < low or high < end or array.dtype.hasobject:
                            return None
                        method = "" if array is thing else thing.__name__  # type: ignore[attr-defined]
                        views.append(
                            _View(
                                len(objects), buffer, array.ctypes.data - low, array.dtype,
                                array.shape, array.strides, method,
                            )
                        )  # fmt: skip
                        thing = None  # Do not keep the bytes alive.
                objects.append(thing)
        return cls(objects, views)

    def at(self, addresses: Mapping[int, int], region_of: RegionOf) -> list[object]:
        """Return the objects for these buffer addresses (number → address)."""
        objects = [*self._objects]
        regions: dict[int, Array] = {}
        for view in self._views:
            buffer = view.buffer
            region = regions.get(buffer.number)
            if region is None:
                address = addresses[buffer.number]
                region = regions[buffer.number] = region_of(
                    buffer.space, address, buffer.size_per_bank
                )
            array = np.ndarray(view.shape, view.dtype, region, view.offset, view.strides)
            objects[view.position] = getattr(array, view.method) if view.method else array
        return objects


def _array_of(thing: object) -> Array | None:
    """Return the array that an object is, or is a method of; else None."""
    owner = thing.__self__ if isinstance(thing, BuiltinFunctionType) else thing
    return owner if isinstance(owner, np.ndarray) else None


def _is_plain(thing: object) -> bool:
    if isinstance(thing, tuple):
        return all(_is_plain(part) for part in thing)
    if isinstance(thing, MethodType):
        return _is_plain(thing.__self__) and _is_plain(thing.__func__)
    if isinstance(thing, BuiltinFunctionType):
        return isinstance(thing.__self__, ModuleType) or _is_plain(thing.__self__)
    if isinstance(thing, FunctionType):
        return thing.__closure__ is None and _is_plain(thing.__defaults__)
    return isinstance(thing, _PLAIN)


def _region(buffer: Buffer, region_of: RegionOf) -> Array:
    assert buffer.address is not None
    return region_of(buffer.space, buffer.address, buffer.size_per_bank)
