"""Views: tensors on the bytes of other tensors.

A ready tensor shares its buffer with its views. A view of a pending tensor is a queued task of a
one-operation program that copies rows; the first row is an operand, so views of equal length share
one program and one executable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stitch.errors import CompileError, LayoutError
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
from stitch.runtime.tensor import Tensor

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice


def view_offset(desc: TensorDesc, rows: tuple[int, int], keep: bool, machine: MachineShape) -> int:
    """Return the byte offset of rows `[start, stop)` within a tensor's footprint.

    `keep`: whether the view keeps the row dimension; otherwise it is row `start` without it.

    Raises:
        LayoutError: The rows are not one range of bytes: sharded tensors, or part of a tile.
    """
    layout, (start, stop) = desc.layout, rows
    if layout.is_sharded:
        raise LayoutError(
            "cannot take a view of a sharded tensor: its rows are not one range of bytes",
            got=desc.text(),
            remedy="convert it to an interleaved layout first",
        )
    if layout.is_dense:
        row = TensorDesc(desc.shape[1:], layout).elements
        return start * row * layout.data_type.itemsize
    pages = footprint(desc, machine)
    if len(desc.shape) > 2:
        return start * (pages.pages // max(1, desc.shape[0])) * pages.aligned_page_nbytes
    assert layout.tile_shape is not None
    high = layout.tile_shape[0]
    whole = start % high == 0 and (stop % high == 0 or stop == desc.shape[0])
    if len(desc.shape) < 2 or not whole or not keep:
        raise LayoutError(
            "a view of a tiled matrix must start and end at a tile boundary",
            expected=f"rows that are multiples of {high}",
            got=f"[{start}:{stop}] of {desc.text()}",
            remedy="convert it to row-major first",
        )
    across = pages.pages // max(1, -(-desc.shape[0] // high))
    return start // high * across * pages.aligned_page_nbytes


#: Size of the program cache. Programs are cached by tensor descriptor and view length.
MAX_PROGRAMS = 256
_NUMBERS = host_layout(DataType.INT64)
#: Step 1 between rows; a single row without its dimension needs no step.
_ONE, _NONE = np.ones(1, np.int64), np.empty(0, np.int64)


def queued_view(tensor: Tensor, start: int, stop: int, *, keep: bool) -> Tensor | None:
    """Return rows `[start, stop)` of a pending tensor as a pending tensor.

    Returns:
        The view; None for types narrower than a byte, and if a copy may not fit beside the tensor.

    Raises:
        LayoutError: The rows are not one range of bytes, as for a view of a ready tensor.
    """
    device: RuntimeDevice = tensor.device
    desc, programs = tensor._record.desc, device.view_programs
    kind = tensor._record.desc_key, stop - start if keep else -1
    if not desc.layout.is_dense:
        view_offset(desc, (start, stop), keep, device.machine.shape)
    if kind not in programs:
        shape = (stop - start, *desc.shape[1:]) if keep else desc.shape[1:]
        rows = TensorDesc(shape, desc.layout)
        made = _program(desc, rows) if _fits_beside(desc, rows, device.machine.shape) else None
        while len(programs) >= MAX_PROGRAMS:
            programs.pop(next(iter([*programs])), None)
        # Threads may race here: the first program stays.
        programs.setdefault(kind, None if made is None else device.load_made(made))
    program = programs.get(kind)
    if program is None:
        return None
    view = program(tensor, np.array(start, np.int64), _ONE if keep else _NONE)
    assert type(view) is Tensor, "it has one output"
    return view


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


def reshaped(device: RuntimeDevice, tensor: Tensor, desc: TensorDesc, offset_nbytes: int) -> Tensor:
    """Return a tensor of another shape that shares the bytes of a dense one."""
    of = tensor._record
    with device.ready(of):
        first = of.instances[0]
        assert first.desc.layout.is_dense, "only dense bytes can be read in another shape"
        whole = TensorDesc(desc.shape, first.desc.layout)
        offset = first.offset_nbytes + offset_nbytes
        return device.tensor_at(first.buffer, offset, whole, of.by, is_exposed=of.is_exposed)
