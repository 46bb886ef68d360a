"""The bound steps of an executable, shared between bindings to different addresses.

Only steps that touch sources or results are bound again for each binding. If only arrays over
buffers depend on the address, as for NumPy kernels, another binding needs no new kernels, just the
same arrays over other bytes (`PlacedObjects`); then steps are bound only for hooks and for new
listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from stitch.memory import Arrivals
from stitch.planner import (
    SINGLE_THREAD,
    Allocate,
    Buffer,
    Copy,
    Execute,
    Plan,
    Step,
    ThreadAssignment,
)
from stitch.program import Array, Program, Space
from stitch.runtime.backends import BoundPlan, BoundStep, HostMemory, LocalBackend
from stitch.runtime.executors import CallBox, PreparedProgram

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
            regions = [_region(buffer, region_of) for buffer in buffers]
            if not all(isinstance(region, np.ndarray) for region in regions):
                return None  # Tensors of a library.
            spans = [(b, *byte_bounds(region)) for b, region in zip(buffers, regions, strict=True)]
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


#: Host memory limit for bindings to different addresses; the first few are always allowed.
MAX_NBYTES = 128 << 20
MIN_BOUND = 32


class BoundParts:
    """The steps that all bindings of an executable share, and those that vary."""

    def __init__(
        self,
        plan: Plan,
        results: Collection[int],
        programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None],
        nbytes: Sequence[int],
        assignment: ThreadAssignment = SINGLE_THREAD,
    ) -> None:
        """Initialize.

        Args:
            plan: The plan.
            results: Numbers of result buffers, which like sources have different addresses per
                binding.
            programs: Prepared program per task.
            bodies: Program per task, for hooks.
            nbytes: Host memory to bind each task's program.
            assignment: Threads of the steps.
        """
        self._plan, self._programs, self._bodies, self._assignment = (
            plan,
            programs,
            bodies,
            assignment,
        )
        buffers = {b.number: b for b in plan.request.buffers}
        buffers |= {s.buffer.number: s.buffer for s in plan.steps if isinstance(s, Allocate)}
        elsewhere = {b.number for b in plan.request.buffers if b.address is not None} | set(results)
        touched = ((i, _touched_by(step)) for i, step in enumerate(plan.steps))
        #: The buffers of the varying steps.
        self._varying = {
            index: tuple([buffers[number] for number in numbers])
            for index, numbers in touched
            if not elsewhere.isdisjoint(numbers)
        }
        steps = [plan.steps[index] for index in self._varying]
        self._nbytes = sum([nbytes[step.task] for step in steps if isinstance(step, Execute)])
        #: The shared steps, once bound.
        self._rest: BoundPlan | None = None

    @property
    def varying(self) -> Collection[int]:
        """The steps that differ between bindings, in order."""
        return self._varying.keys()

    @property
    def most(self) -> int:
        """The number of bindings that fit in the memory limit."""
        return max(MIN_BOUND, MAX_NBYTES // max(1, self._nbytes))

    def bound(
        self,
        backend: LocalBackend,
        addresses: Mapping[int, int],
        memory: HostMemory,
    ) -> BoundPlan:
        """Return the plan bound to buffer addresses (number → address).

        Host memory for binding steps again is reserved for their lifetime, except for the first
        binding.

        Raises:
            OutOfMemoryError: The reservation exceeds the limit.
        """
        rest = self._rest
        if rest is None:
            whole = backend.bind(
                self._plan, self._programs, self._bodies, addresses, self._assignment
            )
            # A step without thunks has none at any address.
            for index in [*self._varying]:
                if whole.steps[index].program is None and not whole.steps[index].thunks:
                    del self._varying[index]
            # Drop the varying steps: they would keep lent buffers alive.
            self._rest = whole.with_steps(dict.fromkeys(self._varying, BoundStep(())))
            return whole
        claimed = memory.reuse(self._plan, (), self._nbytes)
        own = {
            index: backend.bind_step(
                self._plan.steps[index], self._programs, self._bodies, buffers, addresses, rest,
                claimed,
            )
            for index, buffers in self._varying.items()
        }  # fmt: skip
        return rest.with_steps(own)

    def placed(
        self, objects: Sequence[Sequence[object]], addresses: Mapping[int, int],
        region_of: RegionOf,
    ) -> PlacedObjects | None:  # fmt: skip
        """Return the arguments of the generated code for these addresses, so that they can be
        recreated for other addresses.

        `objects`: the arguments by varying step. Returns None if they cannot be recreated.
        """
        elsewhere = [
            [buffer.where(addresses) for buffer in buffers if buffer.number in addresses]
            for buffers in self._varying.values()
        ]
        return PlacedObjects.of(zip(objects, elsewhere, strict=True), region_of)

    def bring_back(self, buffers: Iterable[Buffer], backend: LocalBackend) -> None:
        """Copy buffers from thread arenas to their addresses."""
        for buffer in buffers:
            assert self._rest is not None, "it has run"
            assert buffer.address is not None, "it lies in a space"
            region = backend.region(buffer.space, buffer.address, buffer.size_per_bank)
            region[...] = self._rest.own_bytes.of(self._assignment.buffers[buffer.number])

    def clear(self) -> None:
        """Drop the shared steps."""
        self._rest = None


def _touched_by(step: Step) -> tuple[int, ...]:
    """Return the numbers of the buffers to whose addresses a step is bound."""
    if isinstance(step, Allocate):
        return (step.buffer.number,)
    if isinstance(step, Copy):
        return step.source.buffer, step.target.buffer
    if isinstance(step, Execute):
        return tuple(dict.fromkeys([i.buffer for i in (*step.inputs, *step.outputs)]))
    return ()
