"""Looking into programs while they run: times, values inside, and which operation went wrong.

The work runs once, for real, one operation at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stitch.program import Array
from stitch.runtime import HookContext, RuntimeDevice
from stitch.training.stitching import NamedCells, Stitched


@dataclass(frozen=True, slots=True)
class LayerTime:
    """How long one operation ran: its program, its first result's name, operator, user's line."""

    program: str
    name: str
    op: str
    location: str
    seconds: float


def profiled(device: RuntimeDevice, queue: Callable[[], object]) -> tuple[LayerTime, ...]:
    """Run what is queued, then what `queue` queues, once; gives the time of every operation."""
    device.flush()
    times: list[LayerTime] = []
    began: list[float] = []

    def before(context: HookContext) -> None:
        began.append(time.perf_counter())

    def after(context: HookContext) -> None:
        seconds = time.perf_counter() - began.pop()
        operation = context.operation
        assert operation is not None
        name = first_result(context)
        times.append(
            LayerTime(context.program.name, name, operation.op, operation.location, seconds)
        )

    with device.hooks.registered({"before_operation": before, "after_operation": after}):
        queue()
        device.flush()
    return tuple(times)


def first_result(context: HookContext) -> str:
    """The name of an operation's first result."""
    operation = context.operation
    assert operation is not None
    return context.program.values[next(v for v in operation.outputs if v >= 0)].name


def captured(device: RuntimeDevice, name: str, queue: Callable[[], object]) -> Array | None:
    """The value of this name, copied out of the program that makes it when `queue` queues it."""
    copies: list[Array] = []

    def after(context: HookContext) -> None:
        operation = context.operation
        assert operation is not None
        present = [v for v in operation.outputs if v >= 0]
        for value, array in zip(present, context.outputs, strict=True):
            if context.program.values[value].name == name and not copies:
                copies.append(array.copy())

    with device.hooks.registered({"after_operation": after}):
        queue()
        device.flush()
    return copies[0] if copies else None


def culprit(cells: NamedCells, names: Iterable[str], programs: Sequence[Stitched]) -> str:
    """The first tensor among the named that holds NaN or Inf, else the first operation to make one.

    Leaves the results of the programs in their cells.
    """
    for name in names:
        tensor = cells.get(name)
        if tensor is not None and not _is_finite(tensor.numpy()):
            return f"{name!r} held NaN or Inf before the step"
    culprits: list[str] = []

    def after(context: HookContext) -> None:
        operation = context.operation
        if culprits or operation is None or all(map(_is_finite, context.outputs)):
            return
        if all(array is None or _is_finite(array) for array in context.inputs):
            place = f" at {operation.location}" if operation.location else ""
            result = first_result(context)
            culprits.append(f"{operation.op} -> {result!r} of {context.program.name!r}{place}")

    with cells.device.hooks.registered({"after_operation": after}):
        for program in programs:
            program.again()
        cells.device.flush()
    return culprits[0] if culprits else "an earlier micro-batch of this step"


def _is_finite(array: Array) -> bool:
    """Whether there is no NaN and no Inf in an array."""
    return array.dtype.kind in "iub" or bool(np.isfinite(array.astype(np.float64)).all())
