"""Offsets of views within a tensor's footprint."""

from __future__ import annotations

from stitch.errors import LayoutError
from stitch.machine import MachineShape, footprint
from stitch.program import TensorDesc


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
