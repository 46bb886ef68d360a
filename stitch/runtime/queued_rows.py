"""Rows of a pending tensor for a program that reads them before they have a place.

Comes in: a view that waits, whose tensor the queue will make. Goes out: a tensor that the queue
makes of it, for one reader: a copy of these rows, by a program of one operation. So the reader is
queued behind it, and nothing has run yet. Must not know who reads.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from stitch.errors import CompileError
from stitch.machine import Machine, MachineShape, footprint
from stitch.ops import infer_operation
from stitch.program import (
    DataType,
    InputSlot,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    TensorDesc,
    Value,
    ValueType,
    host_layout,
)
from stitch.runtime.awaited_views import AwaitedView
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.tensor import Tensor

#: Of so many tensors and lengths a device keeps the program that copies rows of them.
MAX_PROGRAMS = 64
_NUMBERS = host_layout(DataType.INT64)
_ONE, _NONE = np.ones(1, np.int64), np.empty(0, np.int64)


class Loader(Protocol):
    """A device, as far as it takes programs that nobody wrote."""

    machine: Machine
    #: Whether it forbids what the planner does not have to do.
    copies_forbidden: int

    @property
    def observers(self) -> int:
        """Who looks at what runs."""

    def load_made(self, program: Program) -> LoadedProgram:
        """A program, ready to be called."""


class QueuedRows:
    """The programs of one device that copy rows of what is pending."""

    def __init__(self, device: Loader) -> None:
        self._device = device
        self._programs: dict[tuple[TensorDesc, TensorDesc], LoadedProgram] = {}

    def rows(self, view: AwaitedView) -> Tensor | None:
        """A tensor for one reader; None where the view must have a place before it is read: its
        tensor is there, it has another form than dense rows, copies are forbidden, or there may be
        no room for one."""
        awaited = view._awaited
        source = awaited.source
        if source is None or not source.is_pending or self._device.copies_forbidden:
            return None
        whole, rows = TensorDesc(source.shape, source.layout), awaited.desc
        if not (whole.layout.is_dense and rows.elements) or self._device.observers:
            return None
        program = self._programs.get((whole, rows))
        if program is None:
            made = _program(whole, rows)
            if made is None or not _has_room(whole, rows, self._device.machine.shape):
                return None
            program = self._device.load_made(made)
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.clear()
            self._programs[whole, rows] = program
        found: Any = program(source, np.array(awaited.rows[0]), _ONE if awaited.keep else _NONE)
        assert isinstance(found, Tensor)
        return found

    def clear(self) -> None:
        """The device is closed."""
        self._programs.clear()


def _has_room(whole: TensorDesc, rows: TensorDesc, machine: MachineShape) -> bool:
    """Whether a copy fits beside its tensor wherever that lies, if all else makes room."""
    capacity = machine.space(whole.layout.space).capacity
    around = capacity - footprint(whole, machine).size_per_bank
    return 2 * footprint(rows, machine).size_per_bank <= around


def _program(whole: TensorDesc, rows: TensorDesc) -> Program | None:
    """What copies rows, from where an operand says; None where the operator does not take them."""
    kind = whole.layout.data_type
    lengths = rows.shape[: len(rows.shape) - len(whole.shape) + 1]
    place = ValueType((), DataType.INT64), ValueType((len(lengths),), DataType.INT64)
    values = (
        Value("whole", ValueType(whole.shape, kind), whole.layout),
        *(Value(name, one, _NUMBERS) for name, one in zip(("first", "step"), place, strict=True)),
        Value("rows", ValueType(rows.shape, kind), rows.layout),
    )
    copy = Operation("Window", (0, 1, 2), (3,), {"lengths": lengths}, "stitch")
    try:
        infer_operation(copy, [value.type for value in values[:3]], [None] * 3)
    except CompileError:
        return None
    return Program(
        "rows", tuple([InputSlot(values[i].name, i) for i in range(3)]), (OutputSlot("rows", 3),),
        values, (copy,), (), Scratch(rows.layout.space, 0),
    )  # fmt: skip
