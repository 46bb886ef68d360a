"""One space's bytes: lazy mapping, moves, counters, release, debug guards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stitch.errors import LayoutError, TaskError
from stitch.machine.shape import MachineShape, SpaceShape, footprint
from stitch.memory import POISON_BYTE, SpaceMemory
from stitch.program import TILE_SHAPE, DataType, Layout, MemoryLayout, ShardSpec, Space, TensorDesc
from tests.support.dense_arrays import read_array, write_array

L1 = SpaceShape(4, 64, 1 << 20, 16)
MACHINE = MachineShape("m", (2, 2), SpaceShape(1, 0, 1 << 30, 64), L1)


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_twelve_gibibytes_of_dram_commit_nothing() -> None:
    before = resident_nbytes()
    dram = SpaceMemory(Space.DRAM, SpaceShape(12, 0, 1 << 30, 32))
    assert dram.region(0, 1 << 30).size == 12 << 30
    dram.region(0, 64)[:] = 1
    dram.region((1 << 30) - 64, 64)[:] = 2
    assert resident_nbytes() - before < 8 << 20


def test_a_region_outside_the_space_is_refused() -> None:
    memory = SpaceMemory(Space.L1, L1)
    for address, size in ((-16, 32), ((1 << 20) - 16, 32), (0, -1)):
        with pytest.raises(LayoutError):
            memory.region(address, size)
    with pytest.raises(LayoutError):
        memory.moves(0, memory, (1 << 20) - 16, 32 * L1.banks)


@pytest.mark.parametrize("shift", [-400, -16, 16, 400, 4000])
def test_a_move_preserves_its_bytes_also_where_it_overlaps_itself(shift: int) -> None:
    memory = SpaceMemory(Space.L1, L1)
    data = np.random.default_rng(0).integers(0, 256, 800 * 4, dtype=np.uint8)
    memory.region(8000, 800)[:] = data
    (move,) = memory.moves(8000, memory, 8000 + shift, 800 * L1.banks)
    move()
    np.testing.assert_array_equal(memory.region(8000 + shift, 800), data)


def test_large_freed_ranges_go_back_to_the_system() -> None:
    memory = SpaceMemory(Space.DRAM, SpaceShape(1, 0, 256 << 20, 32))
    memory.region(32, 128 << 20)[:] = 5
    full = resident_nbytes()
    memory.region((128 << 20) + 32, 32)[:] = 6
    memory.release(32, 128 << 20)
    assert full - resident_nbytes() > 120 << 20
    assert (memory.region((128 << 20) + 32, 32) == 6).all()


def test_freed_bytes_are_poisoned_in_debug_mode() -> None:
    memory = SpaceMemory(Space.L1, L1, debug=True)
    memory.region(64, 64)[:] = 5
    memory.release(64, 32)
    assert (memory.region(64, 32) == POISON_BYTE).all()
    assert (memory.region(96, 32) == 5).all()


GUARDED = [
    Layout(DataType.FLOAT32, Space.L1),
    Layout(DataType.FLOAT32, Space.L1, TILE_SHAPE),
    Layout(DataType.FLOAT32, Space.L1, None, MemoryLayout.BLOCK_SHARDED, ShardSpec((2, 2), (3, 4))),
    Layout(
        DataType.BFP8,
        Space.L1,
        TILE_SHAPE,
        MemoryLayout.HEIGHT_SHARDED,
        ShardSpec((2, 2), (32, 32)),
    ),
]


@pytest.mark.parametrize("layout", GUARDED, ids=lambda layout: layout.text())
def test_a_write_into_padding_is_caught_and_names_the_buffer(layout: Layout) -> None:
    memory = SpaceMemory(Space.L1, L1, debug=True)
    desc = TensorDesc((5, 7), layout)
    size = footprint(desc, MACHINE).size_per_bank
    address = memory.allocator.alloc(size)
    memory.fill_padding(desc, address, MACHINE)
    data = np.arange(35, dtype=np.float32).reshape(5, 7)
    region = memory.region(address, size)
    write_array(data, desc, region, MACHINE)
    memory.check_padding(desc, address, MACHINE, name="hidden")
    region[-1] ^= 0xFF
    with pytest.raises(TaskError, match="padding of 'hidden'"):
        memory.check_padding(desc, address, MACHINE, name="hidden")
    region[-1] ^= 0xFF
    memory.check_padding(desc, address, MACHINE, name="hidden")
    assert read_array(desc, region, MACHINE).shape == (5, 7)
