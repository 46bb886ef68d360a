"""Views of pending tensors: tasks of the queue, each a program of one operation that copies rows.

Which row is the first is an operand: views of one length are one program, and parts of one
recording.
"""

from __future__ import annotations

from typing import Protocol

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
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import ValueRecord, view_offset

#: So many kinds of views have programs that are kept; of one kind are those of tensors of one
#: descriptor that are equally long.
MAX_PROGRAMS = 256
_NUMBERS = host_layout(DataType.INT64)
#: Rows follow each other; one row without its dimension has nowhere to go on.
_ONE, _NONE = np.ones(1, np.int64), np.empty(0, np.int64)


class Loader(Protocol):
    """A device, as far as it takes programs that it makes itself."""

    machine: Machine

    def load_made(self, program: Program) -> LoadedProgram:
        """A program, ready to be called; needs no lock where it has no constants."""


class QueuedViews:
    """The programs of one device that make views of what is pending."""

    __slots__ = ("_device", "_programs")

    def __init__(self, device: Loader) -> None:
        self._device = device
        #: By descriptor and length (-1: one row without its dimension); None: none can be made.
        self._programs: dict[tuple[int, int], LoadedProgram | None] = {}

    def view(
        self, tensor: Tensor, value: ValueRecord, start: int, stop: int, *, keep: bool
    ) -> Tensor | None:
        """Rows `[start, stop)` of a pending tensor, pending; None where no program makes them: of
        types narrower than a byte, and where a copy may not fit beside it.

        Raises `LayoutError` where a view could not lie, as for a tensor that is there.
        """
        desc = value.desc
        kind = value.desc_key, stop - start if keep else -1
        if not desc.layout.is_dense:
            view_offset(desc, (start, stop), keep, self._device.machine.shape)
        try:
            program = self._programs[kind]
        except KeyError:
            shape = (stop - start, *desc.shape[1:]) if keep else desc.shape[1:]
            program = self._kept(kind, desc, TensorDesc(shape, desc.layout))
        if program is None:
            return None
        view = program(tensor, np.array(start, np.int64), _ONE if keep else _NONE)
        assert type(view) is Tensor, "it has one output"
        return view

    def clear(self) -> None:
        """The device is closed."""
        self._programs.clear()

    def _kept(
        self, kind: tuple[int, int], whole: TensorDesc, rows: TensorDesc
    ) -> LoadedProgram | None:
        """What makes such views; None where nothing does."""
        program: LoadedProgram | None = None
        if _fits_beside(whole, rows, self._device.machine.shape):
            made = _program(whole, rows)
            program = None if made is None else self._device.load_made(made)
        programs = self._programs
        while len(programs) >= MAX_PROGRAMS:
            programs.pop(next(iter([*programs])), None)
        # Several threads may ask at once: the first one's stays.
        return programs.setdefault(kind, program)


def _fits_beside(whole: TensorDesc, rows: TensorDesc, machine: MachineShape) -> bool:
    """Whether a copy fits beside its tensor wherever that lies, if all else makes room."""
    capacity = machine.space(whole.layout.space).capacity
    around = capacity - footprint(whole, machine).size_per_bank
    return 2 * footprint(rows, machine).size_per_bank <= around


def _program(whole: TensorDesc, rows: TensorDesc) -> Program | None:
    """What copies rows, from where an operand says; None where the operator does not take them."""
    # Blocks come back to the same bits: the greatest element of each gives the exponent again.
    kind = whole.layout.data_type.in_arrays
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
        "view", tuple([InputSlot(values[i].name, i) for i in range(3)]), (OutputSlot("rows", 3),),
        values, (copy,), (), Scratch(rows.layout.space, 0),
    )  # fmt: skip
