"""One space's bytes: lazy mapping, moves, counters, release, debug guards."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from stitch.errors import LayoutError, TaskError
from stitch.machine.shape import MachineShape, SpaceShape, footprint
from stitch.memory import POISON_BYTE, SpaceMemory, prepare_copy
from stitch.program import (
    TILE_SHAPE,
    DataType,
    Layout,
    MemoryLayout,
    ShardSpec,
    Space,
    TensorDesc,
    host_layout,
)
from tests.support.dense_arrays import read_array, write_array

L1 = SpaceShape(4, 64, 1 << 20, 16)
MACHINE = MachineShape("m", (2, 2), SpaceShape(1, 0, 1 << 30, 64), L1)


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_twelve_gibibytes_of_dram_commit_nothing() -> None:
    before = resident_nbytes()
    dram = SpaceMemory(Space.DRAM, SpaceShape(12, 0, 1 << 30, 32))
    assert dram.bytes.size == 12 << 30
    dram.region(0, 64)[:] = 1
    dram.region((1 << 30) - 64, 64)[:] = 2
    assert resident_nbytes() - before < 8 << 20


def test_blackhole_dram_maps_as_well() -> None:
    dram = SpaceMemory(Space.DRAM, SpaceShape(8, 0, 4_278_190_080, 64))
    dram.bytes[-1] = 7
    assert dram.bytes[-1] == 7


def test_a_region_is_the_footprint_of_its_bank_addresses() -> None:
    memory = SpaceMemory(Space.L1, L1)
    memory.region(128, 32)[:] = 9
    assert np.flatnonzero(memory.bytes).tolist() == list(range(128 * 4, 160 * 4))


def test_a_region_outside_the_space_is_refused() -> None:
    memory = SpaceMemory(Space.L1, L1)
    for address, size in ((-16, 32), ((1 << 20) - 16, 32), (0, -1)):
        with pytest.raises(LayoutError):
            memory.region(address, size)
    with pytest.raises(LayoutError):
        memory.mover(0, memory, (1 << 20) - 16, 32 * L1.banks)()


@pytest.mark.parametrize("shift", [-400, -16, 16, 400, 4000])
def test_a_move_preserves_its_bytes_also_where_it_overlaps_itself(shift: int) -> None:
    memory = SpaceMemory(Space.L1, L1)
    data = np.random.default_rng(0).integers(0, 256, 800 * 4, dtype=np.uint8)
    memory.region(8000, 800)[:] = data
    memory.mover(8000, memory, 8000 + shift, 800 * L1.banks)()
    np.testing.assert_array_equal(memory.region(8000 + shift, 800), data)


def test_a_move_to_another_space_runs_no_line_of_python() -> None:
    l1, dram = SpaceMemory(Space.L1, L1), SpaceMemory(Space.DRAM, SpaceShape(2, 0, 1 << 16, 32))
    data = np.random.default_rng(0).integers(0, 256, 800 * 4, dtype=np.uint8)
    l1.region(8000, 800)[:] = data
    move, seen = l1.mover(8000, dram, 64, 800 * 4), list[str]()
    sys.setprofile(lambda frame, event, _: seen.append(event))
    move()
    sys.setprofile(None)
    assert "call" not in seen
    np.testing.assert_array_equal(dram.region(64, 1600), data)


def test_bound_copies_count_the_own_bytes_of_what_they_write() -> None:
    memory = SpaceMemory(Space.L1, L1)
    desc = TensorDesc((8, 8), Layout(DataType.FLOAT32, Space.L1))
    kernel = prepare_copy(TensorDesc((8, 8), host_layout(DataType.FLOAT32)), desc, MACHINE)
    size = kernel.target_footprint.size_per_bank
    given = np.zeros(256, np.uint8)
    copy = kernel.bind(given, memory.region(64, size), memory.counter)
    assert (memory.counter.writes, memory.counter.nbytes) == (0, 0)
    copy()
    copy()
    memory.mover(64, memory, 1024, size * L1.banks)()
    memory.counter.arrivals(1, kernel.written_nbytes)()
    assert (memory.counter.writes, memory.counter.nbytes) == (3, 3 * 8 * 8 * 4)


def test_large_freed_ranges_go_back_to_the_system() -> None:
    memory = SpaceMemory(Space.DRAM, SpaceShape(1, 0, 256 << 20, 32))
    memory.region(32, 128 << 20)[:] = 5
    full = resident_nbytes()
    memory.region((128 << 20) + 32, 32)[:] = 6
    memory.release(32, 128 << 20)
    assert full - resident_nbytes() > 120 << 20
    assert (memory.region((128 << 20) + 32, 32) == 6).all()


def test_small_freed_ranges_stay_warm() -> None:
    memory = SpaceMemory(Space.L1, L1)
    memory.region(64, 4096)[:] = 5
    memory.release(64, 4096)
    assert (memory.region(64, 4096) == 5).all()


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


def test_without_debug_nothing_is_filled_or_checked() -> None:
    memory = SpaceMemory(Space.L1, L1)
    desc = TensorDesc((5, 7), GUARDED[0])
    memory.fill_padding(desc, 64, MACHINE)
    assert not memory.region(64, 64).any()
    memory.check_padding(desc, 64, MACHINE, name="hidden")
