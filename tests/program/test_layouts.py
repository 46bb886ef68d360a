"""Layouts, descriptors and data types: what is legal, what is refused, what they say."""

from __future__ import annotations

import numpy as np
import pytest

from stitch.errors import LayoutError
from stitch.program import (
    TILE_SHAPE,
    DataType,
    Layout,
    MemoryLayout,
    Orientation,
    ShardSpec,
    Space,
    TensorDesc,
    host_layout,
)

F32 = DataType.FLOAT32


@pytest.mark.parametrize("data_type", list(DataType))
def test_every_data_type_is_found_by_both_of_its_names(data_type: DataType) -> None:
    assert DataType.parse(data_type.value) is data_type
    assert DataType.parse(data_type.short) is data_type
    if not data_type.is_block:
        assert DataType.from_dtype(data_type.dtype) is data_type
        assert data_type.nbytes(32) == 32 * data_type.itemsize


def test_block_formats_share_an_exponent_byte_among_sixteen_elements() -> None:
    assert DataType.BFP8.nbytes(1024) == 1088
    assert DataType.BFP4.nbytes(1024) == 576
    with pytest.raises(LayoutError, match="no element type"):
        _ = DataType.BFP8.dtype


@pytest.mark.parametrize("dtype", [np.complex64, np.dtype("U3"), np.dtype("datetime64[s]")])
def test_other_types_are_refused_with_the_list_of_types(dtype: np.dtype[np.generic]) -> None:
    with pytest.raises(LayoutError, match="not supported") as refused:
        DataType.from_dtype(dtype)
    assert "bfloat16" in str(refused.value)


def test_contradictions_are_all_reported_at_once() -> None:
    with pytest.raises(LayoutError) as refused:
        Layout(DataType.BFP8, Space.HOST, None, MemoryLayout.HEIGHT_SHARDED)
    for word in ("tiles", "shard spec", "never sharded"):
        assert word in str(refused.value)


def test_a_tiled_shard_is_whole_tiles() -> None:
    with pytest.raises(LayoutError, match="whole tiles"):
        Layout(F32, Space.L1, TILE_SHAPE, MemoryLayout.HEIGHT_SHARDED, ShardSpec((1, 2), (20, 32)))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_shard_is_never_empty(shape: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match="positive"):
        ShardSpec((1, 1), shape)


def test_descriptors_say_shape_type_space_form_and_address() -> None:
    spec = ShardSpec((2, 1), (32, 64), Orientation.COL_MAJOR)
    layout = Layout(F32, Space.L1, TILE_SHAPE, MemoryLayout.HEIGHT_SHARDED, spec, address=0x100)
    text = TensorDesc((64, 64), layout).text()
    assert text == "64x64xf32:l1:tile:height_sharded(2x1 cores,32x64,col_major)@0x100"
    assert layout.without_address().address is None


def test_tiles_pad_each_matrix_before_outer_dimensions_join_the_rows() -> None:
    tiled = Layout(F32, Space.DRAM, TILE_SHAPE)
    assert TensorDesc((2, 3, 5, 7), tiled).rows_and_columns == (192, 32)
    assert TensorDesc((2, 3, 5, 7), host_layout(F32)).rows_and_columns == (30, 7)
    assert TensorDesc((), tiled).rows_and_columns == (32, 32)


def test_a_shape_without_elements_is_one_that_an_array_can_have() -> None:
    layout = host_layout(DataType.FLOAT64)
    assert TensorDesc((0, 2**30, 2**29), layout).elements == 0
    with pytest.raises(LayoutError, match="beyond any array"):
        TensorDesc((2**30, 0, 2**30), layout)


def test_shapes_have_no_negative_dimension_and_a_bounded_rank() -> None:
    with pytest.raises(LayoutError, match="none of them negative"):
        TensorDesc((2, -1), host_layout(F32))
    with pytest.raises(LayoutError, match="at most"):
        TensorDesc((1,) * 33, host_layout(F32))
