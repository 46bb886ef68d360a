"""Pages and bytes per bank of a tensor: the formulas of the memory model, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.errors import LayoutError
from stitch.machine.shape import (
    MachineShape,
    SpaceShape,
    footprint,
    page_shape,
    round_up,
    shard_layout,
)
from stitch.program import TILE_SHAPE, DataType, Layout, MemoryLayout, ShardSpec, Space, TensorDesc

MACHINE = MachineShape(
    "n150", (8, 8), SpaceShape(1, 0, 1 << 34, 64), SpaceShape(64, 103_712, 1_499_136, 16),
    SpaceShape(12, 0, 1_071_181_792, 32),
)  # fmt: skip
F32 = DataType.FLOAT32
HEIGHT, WIDTH, BLOCK = (
    MemoryLayout.HEIGHT_SHARDED, MemoryLayout.WIDTH_SHARDED, MemoryLayout.BLOCK_SHARDED,
)  # fmt: skip


def desc(shape: tuple[int, ...], *layout: object) -> TensorDesc:
    return TensorDesc(shape, Layout(*layout))  # type: ignore[arg-type]


def sharded(
    shape: tuple[int, ...], kind: MemoryLayout, grid: tuple[int, int], part: tuple[int, int],
    space: Space = Space.L1, tile: tuple[int, int] | None = None,
) -> TensorDesc:  # fmt: skip
    return desc(shape, F32, space, tile, kind, ShardSpec(grid, part))


def test_two_by_three_by_five_by_seven_is_six_tiles() -> None:
    place = footprint(desc((2, 3, 5, 7), F32, Space.L1, TILE_SHAPE), MACHINE)
    assert (place.pages, place.page_nbytes, place.size_per_bank) == (6, 4096, 4096)


def test_tiles_are_dealt_round_robin_so_banks_round_up() -> None:
    place = footprint(desc((32 * 13, 32), F32, Space.DRAM, TILE_SHAPE), MACHINE)
    assert (place.pages, place.size_per_bank, place.nbytes) == (13, 2 * 4096, 2 * 4096 * 12)


def test_a_row_is_a_page_and_is_rounded_to_the_alignment() -> None:
    place = footprint(desc((25, 7), F32, Space.DRAM), MACHINE)
    assert (place.pages, place.page_nbytes, place.aligned_page_nbytes) == (25, 28, 32)
    assert place.size_per_bank == 3 * 32


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
@pytest.mark.parametrize("tile", [None, TILE_SHAPE])
def test_an_empty_tensor_takes_one_granule(
    shape: tuple[int, ...], tile: tuple[int, int] | None
) -> None:
    place = footprint(desc(shape, F32, Space.DRAM, tile), MACHINE)
    assert (place.pages, place.size_per_bank) == (0, 32)


def test_height_shards_hold_full_width_rows() -> None:
    tensor = sharded((10, 6), HEIGHT, (2, 2), (3, 6))
    place = footprint(tensor, MACHINE)
    assert page_shape(tensor) == (1, 6)
    assert (place.page_nbytes, place.aligned_page_nbytes) == (24, 32)
    assert (place.pages, place.size_per_bank) == (12, 96)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (sharded((10, 6), HEIGHT, (2, 2), (3, 5)), "6 columns wide"),
        (sharded((10, 6), WIDTH, (1, 3), (9, 2)), "10 rows high"),
        (sharded((10, 6), HEIGHT, (1, 2), (3, 6)), "4 shards do not fit 2 cores"),
        (sharded((10, 6), BLOCK, (2, 2), (3, 3)), "4x2 blocks do not fit"),
        (sharded((9, 6), HEIGHT, (9, 1), (1, 6)), "exceeds the machine's"),
        (sharded((13, 6), HEIGHT, (1, 13), (1, 6), Space.DRAM), "exceed the space's banks"),
    ],
)
def test_shards_that_do_not_fit_are_refused_with_the_reason(
    tensor: TensorDesc, reason: str
) -> None:
    with pytest.raises(LayoutError, match=reason):
        footprint(tensor, MACHINE)


@pytest.mark.parametrize("kind", [HEIGHT, WIDTH, BLOCK])
@pytest.mark.parametrize("space", [Space.L1, Space.DRAM])
@pytest.mark.parametrize("tile", [None, TILE_SHAPE])
@given(rows=st.integers(1, 300), columns=st.integers(1, 300))
def test_the_even_sharding_fits_its_machine(
    kind: MemoryLayout, space: Space, tile: tuple[int, int] | None, rows: int, columns: int
) -> None:
    layout = shard_layout(
        (rows, columns), kind, MACHINE, data_type=F32, space=space, tile_shape=tile
    )
    tensor = TensorDesc((rows, columns), layout)
    place = footprint(tensor, MACHINE)
    assert place.nbytes >= rows * columns * 4
    assert place.size_per_bank % MACHINE.space(space).alignment == 0


@given(
    shape=st.lists(st.integers(0, 70), max_size=4).map(tuple),
    space=st.sampled_from(Space),
    tile=st.sampled_from([None, TILE_SHAPE]),
)
def test_an_interleaved_footprint_follows_the_formula(
    shape: tuple[int, ...], space: Space, tile: tuple[int, int] | None
) -> None:
    tensor = desc(shape, F32, space, tile)
    place, memory = footprint(tensor, MACHINE), MACHINE.space(space)
    assert place.nbytes >= tensor.elements * 4
    if space is Space.HOST and tile is None:
        expected = round_up(tensor.elements * 4, 64)
    else:
        expected = -(-place.pages // memory.banks) * round_up(place.page_nbytes, memory.alignment)
    assert place.size_per_bank == max(expected, memory.alignment)


@pytest.mark.parametrize("grid", [(3, 1), (1, 9), (1, 1)])
def test_a_grid_that_is_smaller_on_either_side_is_a_shortcoming(grid: tuple[int, int]) -> None:
    ours, compiled_for = (replace(MACHINE, core_grid=of) for of in (grid, (2, 5)))
    assert list(ours.shortcomings(compiled_for)) == [f"core grid: needs (2, 5), has {grid}"]
    assert not list(compiled_for.shortcomings(replace(MACHINE, core_grid=(2, 4))))


def test_other_addresses_are_not_listed_beside_the_cause() -> None:
    l1 = MACHINE.space(Space.L1)
    other = replace(MACHINE, l1=replace(l1, banks=l1.banks + 1, base=l1.base + l1.alignment))
    assert MACHINE.shortcomings(other) == (f"l1 banks: needs {l1.banks + 1}, has {l1.banks}",)
