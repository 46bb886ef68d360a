"""Views share, follow and keep their buffer; exports pin it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import stitch
from stitch.machine import shard_layout
from stitch.program import TILE_SHAPE, DataType, Layout, MemoryLayout, Space
from tests.support.stitched_models import integers, one, scaled, tiny, used

F32 = DataType.FLOAT32
L1, DRAM = Layout(F32, Space.L1), Layout(F32, Space.DRAM)
TILES = Layout(F32, Space.L1, TILE_SHAPE)


def settled(tensor: stitch.Tensor, layout: Layout) -> stitch.Tensor:
    """The elements in another layout, where they are: views of what is pending share nothing."""
    there = tensor.to_layout(layout, copy=True)
    there.settle()
    return there


@pytest.mark.parametrize("space", [Space.HOST, Space.DRAM, Space.L1])
def test_views_of_dense_tensors_are_its_rows(space: Space) -> None:
    array = integers((6, 4, 8))
    with stitch.open_device("tiny", debug=True) as device:
        tensor = settled(device.tensor(array), Layout(F32, space))
        np.testing.assert_array_equal(tensor[2].numpy(), array[2])
        np.testing.assert_array_equal(tensor[-1].numpy(), array[-1])
        np.testing.assert_array_equal(tensor[1:4].numpy(), array[1:4])
        np.testing.assert_array_equal(tensor[1:5][2:][0].numpy(), array[3])
        np.testing.assert_array_equal(tensor[2][1].numpy(), array[2, 1])
        np.testing.assert_array_equal(tensor[2][1][3].numpy(), array[2, 1, 3])
        assert tensor[4:2].shape == (0, 4, 8)
        assert tensor[...].shape == (6, 4, 8)


def test_an_empty_view_at_the_end_of_a_buffer_survives_runs() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        whole = settled(device.tensor(integers()), L1)
        none = whole[4:]
        programs = device.load(scaled("a", 2.0)), device.load(scaled("b", 2.0))
        made = [program(integers()) for program in programs]
        device.flush()
        assert none.numpy().shape == (0, *integers().shape[1:])
        np.testing.assert_array_equal(whole.numpy(), integers())
        assert len(made) == 2


def test_views_of_tiles_start_on_a_tile() -> None:
    array, cube = integers((96, 40)), integers((3, 40, 40))
    with stitch.open_device("tiny", debug=True) as device:
        tensor = settled(device.tensor(array), Layout(F32, Space.DRAM, TILE_SHAPE))
        np.testing.assert_array_equal(tensor[32:64].numpy(), array[32:64])
        np.testing.assert_array_equal(tensor[64:].numpy(), array[64:])
        for part in (slice(16, 48), slice(32, 40)):
            with pytest.raises(stitch.LayoutError, match="must start and end at a tile boundary"):
                tensor[part]
        with pytest.raises(stitch.LayoutError, match="must start and end at a tile boundary"):
            tensor[32]
        batched = settled(device.tensor(cube), Layout(F32, Space.DRAM, TILE_SHAPE))
        for i in range(3):
            np.testing.assert_array_equal(batched[i].numpy(), cube[i])
        np.testing.assert_array_equal(batched[1:].numpy(), cube[1:])
        np.testing.assert_array_equal(batched[1:][0][32:].numpy(), cube[1, 32:])


def test_sharded_tensors_steps_and_scalars_have_no_views() -> None:
    with stitch.open_device("tiny") as device:
        sharded = shard_layout(
            (8, 64), MemoryLayout.HEIGHT_SHARDED, device.machine.shape, data_type=F32
        )
        tensor = settled(device.tensor(integers((8, 64))), sharded)
        for index in (0, slice(0, 2)):
            with pytest.raises(stitch.LayoutError, match="cannot take a view of a sharded tensor"):
                tensor[index]
        with pytest.raises(stitch.LayoutError, match="consecutive"):
            device.tensor(integers())[::2]
        with pytest.raises(stitch.LayoutError, match="with 0 dimensions"):
            device.tensor(1.0)[0]
        with pytest.raises(IndexError, match="out of range"):
            device.tensor(integers())[4]


def test_a_view_keeps_the_buffer_alive_and_the_last_one_frees_it() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        tensor = settled(device.tensor(integers()), L1)
        view, other = tensor[1], tensor[2:]
        held = used(device)["l1"]
        del tensor
        assert used(device)["l1"] == held
        np.testing.assert_array_equal(view.numpy(), integers()[1])
        del view
        assert used(device)["l1"] == held
        np.testing.assert_array_equal(other.numpy(), integers()[2:])
        del other
        assert used(device)["l1"] == 0


def test_programs_read_views_where_they_lie() -> None:
    placement = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device("tiny", debug=True) as device:
        row = device.load(scaled("row", 2.0, (64,), placement=placement))
        tensor = settled(device.tensor(integers()), L1)
        views = [tensor[i] for i in range(4)]
        with stitch.forbid_copies(device):
            results = [one(row(view)) for view in views]
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result.numpy(), integers()[i] * 2 + 1)


def test_views_follow_their_buffer_when_it_moves_or_is_evicted() -> None:
    small = tiny(l1_nbytes=4096)
    placement = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device(small, debug=True) as device:
        big = device.load(scaled("big", 2.0, (28, 64), target=small, placement=placement))
        row = device.load(scaled("row", 3.0, (64,), target=small, placement=placement))
        tensor = settled(device.tensor(integers((16, 64))), L1)
        first, last = tensor[0], tensor[12:]
        assert first.space is Space.L1
        np.testing.assert_array_equal(
            one(big(integers((28, 64)))).numpy(), integers((28, 64)) * 2 + 1
        )
        assert tensor.space is first.space is last.space is Space.DRAM
        np.testing.assert_array_equal(tensor.numpy(), integers((16, 64)))
        np.testing.assert_array_equal(last.numpy(), integers((16, 64))[12:])
        np.testing.assert_array_equal(one(row(first)).numpy(), integers((16, 64))[0] * 3 + 1)
        del tensor
        np.testing.assert_array_equal(last[1].numpy(), integers((16, 64))[13])


def test_writing_through_a_view_changes_the_whole_and_the_reverse() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        dram = device.load(scaled("dram", 2.0, (64,), placement=("input.x.space=dram",)))
        whole = device.load(scaled("whole", 2.0, placement=("input.x.space=dram",)))
        tensor = settled(device.tensor(integers()), L1)
        view = tensor[1]
        stitch.wait([one(dram(view)), one(whole(tensor))])
        device.write(tensor, integers() + 5)
        np.testing.assert_array_equal(one(dram(view)).numpy(), (integers()[1] + 5) * 2 + 1)
        device.write(view, integers()[3])
        expected = integers() + 5
        expected[1] = integers()[3]
        np.testing.assert_array_equal(tensor.numpy(), expected)
        np.testing.assert_array_equal(one(whole(tensor)).numpy(), expected * 2 + 1)


def test_views_of_a_host_array_see_what_is_written_to_it() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        row = device.load(scaled("row", 2.0, (64,)))
        tensor = device.tensor(integers())
        view = tensor[1]
        np.testing.assert_array_equal(one(row(view)).numpy(), integers()[1] * 2 + 1)
        device.write(tensor, integers() + 5)
        np.testing.assert_array_equal(view.numpy(), integers()[1] + 5)
        np.testing.assert_array_equal(one(row(view)).numpy(), (integers()[1] + 5) * 2 + 1)


@pytest.mark.parametrize("space", [Space.HOST, Space.DRAM, Space.L1])
def test_dlpack_shows_the_very_bytes_and_pins_them_until_let_go(space: Space) -> None:
    with stitch.open_device("tiny", debug=True) as device:
        tensor = device.tensor(integers()).to_layout(Layout(F32, space), copy=True)
        address = tensor.address
        outside = np.from_dlpack(tensor)
        region = device.memory(space)[device.footprint_of(tensor)]
        region[:4].view(np.float32)[0] = 77
        assert outside[0, 0] == 77
        del tensor, region
        assert used(device)[space.value] > 0
        other = device.tensor(integers(start=9)).to_layout(Layout(F32, space), copy=True)
        assert other.address != address
        assert outside[0, 0] == 77
        np.testing.assert_array_equal(outside[1:], integers()[1:])
        del other, outside
        gc.collect()
        assert used(device)[space.value] == 0


def test_an_exported_buffer_stays_where_it_is() -> None:
    small = tiny(l1_nbytes=4096)
    placement = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device(small, debug=True) as device:
        big = device.load(scaled("big", 2.0, (28, 64), target=small, placement=placement))
        tensor = device.tensor(integers((16, 64))).to_layout(L1)
        address, outside = tensor.address, np.from_dlpack(tensor)
        with pytest.raises(stitch.OutOfMemoryError):
            one(big(integers((28, 64)))).numpy()
        assert tensor.address == address
        np.testing.assert_array_equal(outside, integers((16, 64)))
        del outside
        np.testing.assert_array_equal(
            one(big(integers((28, 64)))).numpy(), integers((28, 64)) * 2 + 1
        )
        assert tensor.space is Space.DRAM


@pytest.mark.parametrize(
    "layout",
    [TILES, shard_layout((8, 64), MemoryLayout.HEIGHT_SHARDED,
                         tiny().shape, data_type=F32)],
    ids=["tiles", "shards"],
)  # fmt: skip
def test_what_is_not_dense_is_exported_only_by_a_copy(layout: Layout) -> None:
    with stitch.open_device("tiny") as device:
        tensor = device.tensor(integers((8, 64))).to_layout(layout)
        with pytest.raises(BufferError, match="not dense"):
            np.from_dlpack(tensor)
        with pytest.raises(ValueError, match="without a copy"):
            np.asarray(tensor, copy=False)
        np.testing.assert_array_equal(np.asarray(tensor), integers((8, 64)))
        assert used(device)["l1"] > 0


def test_a_tiled_tensor_without_rows_has_views_without_rows() -> None:
    tiled = Layout(DataType.FLOAT32, Space.L1, TILE_SHAPE)
    with stitch.open_device("tiny") as device:
        for shape in ((0, 4), (0, 2, 4), (0, 0)):
            empty = settled(device.tensor(np.zeros(shape, np.float32)), tiled)
            view = empty[0:0]
            assert view.shape == shape and view.numpy().shape == shape
