"""All ways of copying tiles give the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.memory.stages import Staging, Strip, bind_strips
from stitch.memory.tiles import (
    TILIZE_WAYS,
    UNTILIZE_WAYS,
    StripShape,
    Way,
    tilize_stage,
    untilize_stage,
)

SHAPES = st.builds(
    StripShape,
    outer=st.integers(1, 3), rows=st.integers(1, 70), columns=st.integers(1, 100),
    itemsize=st.sampled_from((1, 2, 4, 8)),
)  # fmt: skip
WHOLE = {"outer": 2, "rows": 64, "columns": 96}


def run(shape: StripShape, way: Way | None, source: np.ndarray, *, tilize: bool) -> np.ndarray:
    """What a way makes of a strip's bytes, in memory that held other bytes before."""
    stage = (tilize_stage if tilize else untilize_stage)(shape, way)
    strips = [Strip((stage,), slice(0, source.size), slice(0, stage.target_nbytes))]
    target = np.full(stage.target_nbytes, 0xA5, np.uint8)
    calls = bind_strips(strips, Staging.of(strips), source, target)
    for _ in range(2):
        for call in calls:
            call()
    return target


def tiles_of(shape: StripShape, dense: np.ndarray) -> np.ndarray:
    """The definition: padded, cut into tiles of four faces."""
    height, width = shape.tile_rows * 32, shape.tile_columns * 32
    padded = np.zeros((shape.outer, height, width, shape.itemsize), np.uint8)
    padded[:, : shape.rows, : shape.columns] = dense.reshape(
        shape.outer, shape.rows, shape.columns, shape.itemsize
    )
    cut = padded.reshape(-1, shape.tile_rows, 2, 16, shape.tile_columns, 2, 16, shape.itemsize)
    return cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(-1)


@given(SHAPES, st.integers(0, 2**32 - 1))
def test_every_way_that_fits_gives_the_bytes_of_the_definition(
    shape: StripShape, seed: int
) -> None:
    dense = np.random.default_rng(seed).integers(
        0, 256, shape.elements * shape.itemsize, dtype=np.uint8
    )
    tiles = tiles_of(shape, dense)
    for way in (None, *TILIZE_WAYS):
        if way is None or way.fits(shape, tilize=True):
            np.testing.assert_array_equal(run(shape, way, dense, tilize=True), tiles)
    tiles[tiles_of(shape, np.ones_like(dense)) == 0] = 0xDB
    for way in (None, *UNTILIZE_WAYS):
        if way is None or way.fits(shape, tilize=False):
            np.testing.assert_array_equal(run(shape, way, tiles, tilize=False), dense)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_every_way_fits_strips_of_whole_tiles(itemsize: int) -> None:
    shape = StripShape(**WHOLE, itemsize=itemsize)
    assert all(way.fits(shape, tilize) for way in TILIZE_WAYS for tilize in (True, False))
