"""Observe programs while they run: operation times, intermediate values, non-finite results.

Hooks make the programs run one operation at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stitch.program import Array
from stitch.runtime import HookContext, RuntimeDevice
from stitch.training.stitching import BoundProgram, NamedCells


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The time of one operation: its program, first result, ONNX name and line of the user's
    source."""

    program: str
    name: str
    op: str
    location: str
    seconds: float


def profile_operations(device: RuntimeDevice, queue: Callable[[], object]) -> tuple[LayerTime, ...]:
    """Run the queue, then what `queue` enqueues, and return the time of each of its operations."""
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
    operation = context.operation
    assert operation is not None
    return context.program.values[next(v for v in operation.outputs if v >= 0)].name


def capture_value(device: RuntimeDevice, name: str, queue: Callable[[], object]) -> Array | None:
    """Return a copy of the value `name` from the programs that `queue` enqueues, None if absent."""
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


def find_non_finite(
    cells: NamedCells, names: Iterable[str], programs: Sequence[BoundProgram]
) -> str:
    """Return the first tensor in `names` with NaN or Inf, else the first operation that made one.

    Reruns the programs; their results stay in the cells.
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
    return array.dtype.kind in "iub" or bool(np.isfinite(array.astype(np.float64)).all())
