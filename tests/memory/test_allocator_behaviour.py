"""The allocator's answers, one behaviour each."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from stitch.errors import LayoutError, OutOfMemoryError, TaskError
from stitch.machine import Policy
from stitch.memory import Allocator
from stitch.testing import AllocatorSuite, holes_of
from tests.support.grids import every


def test_sizes_are_rounded_up_and_an_empty_buffer_takes_one_granule() -> None:
    allocator = Allocator(0, 256, 32)
    address = allocator.alloc(0)
    assert allocator.size_of(address) == 32
    assert allocator.free(address) == 32
    assert allocator.free(allocator.alloc(33)) == 64


def in_pieces(drawn: random.Random) -> Allocator:
    """A space with holes of many sizes."""
    allocator = Allocator(0, 16 * 200, 16)
    for _ in range(drawn.randrange(12)):
        address = 16 * drawn.randrange(190)
        if allocator.is_free(address, 100):
            allocator.alloc_at(address, 100)
    return allocator


@pytest.mark.parametrize("seed", every(3, range(20)))
def test_gaps_give_places_of_several_sizes_as_they_are_found_one_by_one(seed: int) -> None:
    drawn = random.Random(seed)
    allocator = in_pieces(drawn)
    outside = [(at, at + drawn.randrange(1, 300)) for at in range(0, 3200, 500)]
    gaps, twin = allocator.gaps(outside), allocator.clone()
    for _ in range(12):
        size, count = drawn.randrange(300), drawn.randrange(5)
        places = twin.gaps(outside, size).take(size, count)
        assert gaps.take(size, count) == places
        for address in places:
            twin.alloc_at(address, size)


def wanted_granule(taken: list[bool], need: int, low: bool, policy: Policy) -> int | None:
    """The first granule of a new buffer, by the rule of a policy."""
    fitting = [hole for hole in holes_of(taken) if hole[1] >= need]
    low |= policy is Policy.FIRST_FIT_UPWARDS
    if not fitting:
        return None
    if policy is Policy.BEST_FIT:
        start, granules = min(fitting, key=lambda hole: (hole[1], hole[0]))
    else:
        start, granules = fitting[0 if low else -1]
    return start if low else start + granules - need


class OwnPolicy(AllocatorSuite):
    """The suite of all allocators, with the one granule that the policy must choose."""

    def check_choice(self, taken: list[bool], need: int, low: bool, found: int | None) -> None:
        assert found == wanted_granule(taken, need, low, Policy(self.allocator))


class TestBestFit(OwnPolicy):
    allocator: ClassVar[str] = "best_fit"


class TestFirstFit(OwnPolicy):
    allocator: ClassVar[str] = "first_fit"


class TestFirstFitUpwards(OwnPolicy):
    allocator: ClassVar[str] = "first_fit_upwards"


@pytest.mark.campaign("memory")
@pytest.mark.parametrize("policy", Policy)
def test_long_random_histories_agree_with_a_map_of_granules(policy: Policy) -> None:
    suite = type("Long", (OwnPolicy,), {"allocator": policy.value, "steps": 20_000})()
    suite.test_random_histories_agree_with_a_map_of_granules()


def test_an_unknown_address_cannot_be_freed() -> None:
    allocator = Allocator(0, 256, 16)
    address = allocator.alloc(32)
    allocator.free(address)
    with pytest.raises(TaskError, match="freed twice, or never allocated"):
        allocator.free(address)
    with pytest.raises(TaskError):
        allocator.free(address + 1)


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


def test_out_of_memory_names_needed_free_and_largest_hole() -> None:
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
        foreseen = allocator.gaps(least=size).take(size, 6)
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
