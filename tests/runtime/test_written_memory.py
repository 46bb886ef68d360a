"""What is written into a space's bytes is what programs read."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.program import DataType, Layout, Space
from tests.support.stitched_models import consuming, integers, one, scaled

F32 = DataType.FLOAT32


@pytest.mark.parametrize("space", [Space.HOST, Space.DRAM, Space.L1])
def test_what_is_written_into_a_space_changes_the_next_result(space: Space) -> None:
    compiled = scaled("a", 2.0, placement=(f"input.x.space={space.value}",))
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(compiled)
        tensor = device.tensor(integers()).to_layout(Layout(F32, space), copy=True)
        np.testing.assert_array_equal(one(a(tensor)).numpy(), integers() * 2 + 1)
        banks = device.machine.shape.space(space).banks
        assert tensor.address is not None
        where = device.footprint_of(tensor)
        assert where.start == tensor.address * banks
        device.memory(space)[where].view(np.float32)[: tensor.volume] += 10
        np.testing.assert_array_equal(tensor.numpy(), integers() + 10)
        np.testing.assert_array_equal(one(a(tensor)).numpy(), (integers() + 10) * 2 + 1)


def test_what_is_written_into_a_tile_or_a_shard_changes_the_next_result() -> None:
    for option in ("input.x.layout=tile", "input.x.memory_layout=height_sharded"):
        compiled = scaled("a", 2.0, (32, 32), placement=(option,))
        with stitch.open_device("tiny", debug=True) as device:
            a = device.load(compiled)
            tensor = device.tensor(integers((32, 32))).to_layout(stitch.get_layout(compiled))
            before = one(a(tensor)).numpy()
            device.memory(tensor.space)[device.footprint_of(tensor)].view(np.float32)[0] = 1000
            after = one(a(tensor)).numpy()
            assert after[0, 0] == 2001
            np.testing.assert_array_equal(after.ravel()[1:], before.ravel()[1:])


def test_host_arrays_outside_the_device_have_no_footprint() -> None:
    with (
        stitch.open_device("tiny") as device,
        pytest.raises(stitch.LayoutError, match="no footprint"),
    ):
        device.footprint_of(device.tensor(integers()))


def test_a_program_whose_padding_was_overwritten_is_caught_in_debug_mode() -> None:
    placement = ("output.y.layout=tile", "output.y.space=dram", "output.y.data_type=bfloat16")
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0, (33, 64), placement=placement))
        b = device.load(consuming("b", 2.0, (33, 64), placement=("input.x.space=l1",)))
        y = one(a(integers((33, 64)))).to_layout(Layout(F32, Space.DRAM))
        where = device.footprint_of(y)
        region = device.memory("dram")[where]
        region[-1] ^= 0xFF
        with pytest.raises(stitch.TaskError, match=r"bytes of padding of .* were overwritten"):
            one(b(y)).numpy()
