"""Profiling: what a program's operations took, and a look at a value inside one.

Comes in: a device whose queue is empty, and a function that queues work. Goes out: figures. The
work runs once, for real, one operation at a time. Must not know: losses, optimizers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stitch.program import Array
from stitch.runtime import HookContext, RuntimeDevice


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


@contextmanager
def capturing(device: RuntimeDevice, name: str) -> Iterator[list[Array]]:
    """Within the block, the value of this name is copied out of the program that makes it."""
    captured: list[Array] = []

    def after(context: HookContext) -> None:
        operation = context.operation
        assert operation is not None
        present = [v for v in operation.outputs if v >= 0]
        for value, array in zip(present, context.outputs, strict=True):
            if context.program.values[value].name == name and not captured:
                captured.append(array.copy())

    with device.hooks.registered({"after_operation": after}):
        yield captured
        device.flush()
