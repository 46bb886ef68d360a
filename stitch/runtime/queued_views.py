"""Views of pending tensors: each is a queued task of a one-operation program that copies rows.

The first row is an operand, so views of equal length share one program and one executable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stitch.errors import CompileError
from stitch.machine import MachineShape, footprint
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

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

#: Size of the program cache. Programs are cached by tensor descriptor and view length.
MAX_PROGRAMS = 256
_NUMBERS = host_layout(DataType.INT64)
#: Step 1 between rows; a single row without its dimension needs no step.
_ONE, _NONE = np.ones(1, np.int64), np.empty(0, np.int64)


class QueuedViews:
    """The programs of one device that compute views of pending tensors."""

    __slots__ = ("_device", "_programs")

    def __init__(self, device: RuntimeDevice) -> None:
        self._device = device
        #: By descriptor key and length (-1: one row without its dimension); None if no program
        #: exists.
        self._programs: dict[tuple[int, int], LoadedProgram | None] = {}

    def view(
        self, tensor: Tensor, value: ValueRecord, start: int, stop: int, *, keep: bool
    ) -> Tensor | None:
        """Return rows `[start, stop)` of a pending tensor as a pending tensor.

        Returns:
            The view; None for types narrower than a byte, and if a copy may not fit beside the
            tensor.

        Raises:
            LayoutError: The rows are not one range of bytes, as for a view of a ready tensor.
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
        """Drop all programs (the device is closed)."""
        self._programs.clear()

    def _kept(
        self, kind: tuple[int, int], whole: TensorDesc, rows: TensorDesc
    ) -> LoadedProgram | None:
        """Create and cache the program for such views; None if there is none."""
        program: LoadedProgram | None = None
        if _fits_beside(whole, rows, self._device.machine.shape):
            made = _program(whole, rows)
            program = None if made is None else self._device.load_made(made)
        programs = self._programs
        while len(programs) >= MAX_PROGRAMS:
            programs.pop(next(iter([*programs])), None)
        # Threads may race here: the first program stays.
        return programs.setdefault(kind, program)


def _fits_beside(whole: TensorDesc, rows: TensorDesc, machine: MachineShape) -> bool:
    """Return whether a copy fits beside its tensor if everything else is evicted."""
    capacity = machine.space(whole.layout.space).capacity
    around = capacity - footprint(whole, machine).size_per_bank
    return 2 * footprint(rows, machine).size_per_bank <= around


def _program(whole: TensorDesc, rows: TensorDesc) -> Program | None:
    """Return a program that copies rows from a given first row; None if the operator rejects
    them."""
    # Exact for block formats: the largest element of a block determines its exponent again.
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
