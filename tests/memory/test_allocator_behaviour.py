"""The allocator's answers, one behaviour each."""

from __future__ import annotations

import random

import pytest

from stitch.errors import LayoutError, OutOfMemoryError, TaskError
from stitch.machine import Policy
from stitch.memory import Allocator
from tests.support.grids import every


def test_a_buffer_lies_at_the_top_of_its_hole_unless_low() -> None:
    allocator = Allocator(64, 1024, 16)
    assert allocator.alloc(100) == 1024 - 112
    assert allocator.alloc(100, low=True) == 64


def test_sizes_are_rounded_up_and_an_empty_buffer_takes_one_granule() -> None:
    allocator = Allocator(0, 256, 32)
    address = allocator.alloc(0)
    assert allocator.size_of(address) == 32
    assert allocator.free(address) == 32
    assert allocator.free(allocator.alloc(33)) == 64


def test_base_and_limit_shrink_to_the_alignment() -> None:
    allocator = Allocator(10, 100, 32)
    assert (allocator.base, allocator.limit, allocator.capacity) == (32, 96, 64)


def test_the_best_fitting_hole_is_taken() -> None:
    allocator = Allocator(0, 1600, 16)
    for address, size in ((0, 100), (400, 100), (700, 100)):
        allocator.alloc_at(address // 16 * 16, size)
    sizes = [size for _, size in allocator.holes()]
    smallest = min(size for size in sizes if size >= 160)
    hole = next(h for h in allocator.holes() if h[1] == smallest)
    address = allocator.alloc(160)
    assert hole[0] <= address < hole[0] + hole[1]


def test_neighbouring_holes_become_one() -> None:
    allocator = Allocator(0, 480, 16)
    buffers = [allocator.alloc(160) for _ in range(3)]
    for address in (buffers[0], buffers[2], buffers[1]):
        allocator.free(address)
        allocator.check()
    assert allocator.holes() == ((0, 480),)


def in_pieces(drawn: random.Random) -> Allocator:
    """A space with holes of many sizes."""
    allocator = Allocator(0, 16 * 200, 16)
    for _ in range(drawn.randrange(12)):
        address = 16 * drawn.randrange(190)
        if allocator.is_free(address, 100):
            allocator.alloc_at(address, 100)
    return allocator


@pytest.mark.parametrize("seed", every(3, range(20)))
def test_places_for_several_are_those_that_are_found_one_by_one(seed: int) -> None:
    drawn = random.Random(seed)
    allocator = in_pieces(drawn)
    outside = [
        (at, at + drawn.randrange(1, 300)) for at in range(0, 3200, drawn.randrange(400, 900))
    ]
    size, count = drawn.randrange(1, 200), drawn.randrange(12)
    twin, one_by_one = allocator.clone(), list[int]()
    while len(one_by_one) < count and (found := twin.fit(size, outside)):
        twin.alloc_at(found[0], size)
        one_by_one += found
    places = allocator.fit(size, outside, count)
    assert places == one_by_one
    assert not any(at < end and start < at + size for at in places for start, end in outside)


@pytest.mark.parametrize("seed", every(3, range(20)))
def test_gaps_give_places_of_several_sizes_as_they_are_found_one_by_one(seed: int) -> None:
    drawn = random.Random(seed)
    allocator = in_pieces(drawn)
    outside = [(at, at + drawn.randrange(1, 300)) for at in range(0, 3200, 500)]
    gaps, twin = allocator.gaps(outside), allocator.clone()
    for _ in range(12):
        size, count = drawn.randrange(300), drawn.randrange(5)
        places = twin.fit(size, outside, count)
        assert gaps.take(size, count) == places
        for address in places:
            twin.alloc_at(address, size)


def test_an_unknown_address_cannot_be_freed() -> None:
    allocator = Allocator(0, 256, 16)
    address = allocator.alloc(32)
    allocator.free(address)
    with pytest.raises(TaskError, match="freed twice, or never allocated"):
        allocator.free(address)
    with pytest.raises(TaskError):
        allocator.free(address + 1)


def test_the_middle_of_a_buffer_cannot_be_freed() -> None:
    allocator = Allocator(0, 256, 16)
    address = allocator.alloc(64)
    with pytest.raises(TaskError):
        allocator.free(address + 16)
    assert allocator.buffers() == ((address, 64),)


def test_alloc_at_says_which_buffer_is_in_the_way() -> None:
    allocator = Allocator(0, 1024, 16)
    allocator.alloc_at(256, 128)
    with pytest.raises(OutOfMemoryError, match=r"taken by \[0x100, 0x180\)"):
        allocator.alloc_at(240, 32)


@pytest.mark.parametrize(
    ("address", "size", "reason"),
    [
        (8, 16, "multiple of 16"),
        (1024, 16, "outside the space"),
        (1008, 32, "outside the space"),
        (-16, 16, "outside the space"),
    ],
)
def test_alloc_at_says_what_is_wrong_with_a_range(address: int, size: int, reason: str) -> None:
    allocator = Allocator(0, 1024, 16)
    with pytest.raises(LayoutError, match=reason):
        allocator.alloc_at(address, size)
    assert not allocator.is_free(address, size)


def test_out_of_memory_names_needed_free_largest_hole_and_biggest_buffers() -> None:
    """The phi-2 case: bytes enough, but no hole that is large enough."""
    allocator = Allocator(0, 786_432 + 305_152 + 16, 16)
    low = allocator.alloc(254_912, low=True)
    allocator.alloc(786_432, low=True)
    allocator.free(low)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.alloc(305_152)
    text = str(caught.value)
    assert "305152 bytes" in text
    assert "305168 B free" in text
    assert "largest hole 254912 B" in text
    assert "786432 B at 0x3e3c0" in text


def test_try_alloc_gives_none_and_changes_nothing_when_full() -> None:
    allocator = Allocator(0, 64, 16)
    allocator.alloc(48)
    before = (allocator.buffers(), allocator.holes())
    assert allocator.try_alloc(32) is None
    assert (allocator.buffers(), allocator.holes()) == before


def test_a_clone_is_independent() -> None:
    allocator = Allocator(0, 4096, 16)
    allocator.alloc(64)
    twin = allocator.clone()
    assert twin.buffers() == allocator.buffers()
    twin.alloc(128)
    twin.check()
    allocator.check()
    assert len(allocator.buffers()) == 1
    assert twin.used_nbytes == allocator.used_nbytes + 128


def test_an_empty_space_has_no_hole() -> None:
    allocator = Allocator(16, 16, 16)
    assert (allocator.largest_hole, allocator.free_nbytes, allocator.try_alloc(1)) == (0, 0, None)


def test_check_notices_a_broken_index() -> None:
    allocator = Allocator(0, 256, 16)
    allocator.alloc(32)
    allocator._holes.append(1 << 40)
    with pytest.raises(AssertionError):
        allocator.check()


@pytest.mark.parametrize("policy", Policy)
def test_places_foreseen_are_those_that_are_taken(policy: Policy) -> None:
    drawn = random.Random(11)
    for _ in range(50):
        allocator = Allocator(0, 16 * 200, 16, policy)
        for _ in range(drawn.randrange(12)):
            address = 16 * drawn.randrange(190)
            if allocator.is_free(address, 100):
                allocator.alloc_at(address, 100)
        size = drawn.randrange(1, 400)
        foreseen = allocator.fit(size, count=6)
        taken = [allocator.try_alloc(size) for _ in foreseen]
        assert foreseen == taken
        allocator.check()


def test_first_fit_takes_the_highest_hole_or_the_lowest_from_below() -> None:
    for policy, place in ((Policy.FIRST_FIT, 944), (Policy.FIRST_FIT_UPWARDS, 0)):
        allocator = Allocator(0, 1024, 16, policy)
        allocator.alloc_at(64, 16)
        allocator.alloc_at(1008, 16)
        assert allocator.alloc(64) == place
        assert allocator.clone().policy is allocator.emptied().policy is policy
    assert Allocator(0, 1024, 16, Policy.FIRST_FIT).alloc(64, low=True) == 0
