"""All strips of tiles are copied to the bytes of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from stitch.machine import footprint, load_machine
from stitch.memory import prepare_copy
from stitch.memory.stages import Staging, Strip, bind_strips
from stitch.memory.tiles import StripShape, tilize_stage
from stitch.program import TILE_SHAPE, DataType, Layout, Space, TensorDesc


def tiles_of(shape: StripShape, dense: np.ndarray) -> np.ndarray:
    """The definition: padded, cut into tiles of four faces."""
    height, width = shape.tile_rows * 32, shape.tile_columns * 32
    padded = np.zeros((shape.outer, height, width, shape.itemsize), np.uint8)
    padded[:, : shape.rows, : shape.columns] = dense.reshape(
        shape.outer, shape.rows, shape.columns, shape.itemsize
    )
    cut = padded.reshape(-1, shape.tile_rows, 2, 16, shape.tile_columns, 2, 16, shape.itemsize)
    return cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(-1)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("columns", "rows"), [(1023, (64, 64, 6)), (1000, (32, 20)), (2500, (32, 26, 3)), (39, (70, 1))]
)
def test_strips_that_share_staged_rows_leave_each_others_padding_zeros(
    columns: int, rows: tuple[int, ...], itemsize: int
) -> None:
    shapes = [StripShape(1, count, columns, itemsize) for count in rows]
    random = np.random.default_rng(0)
    source = np.zeros(sum(shape.elements * itemsize for shape in shapes), np.uint8)
    strips, start, stop = [], 0, 0
    for shape in shapes:
        stage, nbytes = tilize_stage(shape), shape.elements * itemsize
        places = slice(start, start + nbytes), slice(stop, stop + stage.target_nbytes)
        strips.append(Strip((stage,), *places))
        start, stop = places[0].stop, places[1].stop
    target = np.empty(stop, np.uint8)
    calls = bind_strips(strips, Staging.of(strips), source, target)
    for _ in range(3):
        source[:] = random.integers(0, 256, source.size, dtype=np.uint8)
        target.fill(0xA5)
        for call in calls:
            call()
        for shape, strip in zip(shapes, strips, strict=True):
            np.testing.assert_array_equal(
                target[strip.target], tiles_of(shape, source[strip.source])
            )


@pytest.mark.parametrize("rows", [1025, 2049])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (DataType.BFLOAT16, DataType.FLOAT32), (DataType.BFLOAT16, DataType.BFP8),
        (DataType.FLOAT16, DataType.BFP4), (DataType.INT4, DataType.INT32),
    ],
)  # fmt: skip
def test_strips_that_tilize_before_and_after_a_cast_leave_each_others_padding_zeros(
    rows: int, before: DataType, after: DataType
) -> None:
    """The last strip is mostly padding, so it is cast first: its rows lie otherwise."""
    shape, machine = (rows, 39), load_machine("wormhole_n150").shape
    source = TensorDesc(shape, Layout(before, Space.HOST))
    target = TensorDesc(shape, Layout(after, Space.DRAM, TILE_SHAPE))
    random = np.random.default_rng(0)
    data = random.integers(-7, 7, shape).astype(before.dtype)
    kernel = prepare_copy(source, target, machine)
    tiled = np.zeros(footprint(target, machine).nbytes, np.uint8)
    call = kernel.bind(data.reshape(-1).view(np.uint8), tiled)
    call()
    first = tiled.copy()
    for _ in range(2):
        call()
        np.testing.assert_array_equal(tiled, first)
