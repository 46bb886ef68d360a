"""The allocator's answers, one behaviour each."""

from __future__ import annotations

import random

import pytest

from stitch.errors import LayoutError, OutOfMemoryError, TaskError
from stitch.machine import Policy
from stitch.memory import Allocator
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


def holes_of(taken: list[bool]) -> list[tuple[int, int]]:
    """The holes (first granule, granules) of a map of granules."""
    edges = [i for i in range(len(taken) + 1) if (taken[i - 1] if i else True)
             != (taken[i] if i < len(taken) else True)]  # fmt: skip
    return [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]


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


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("steps", [400, pytest.param(20_000, marks=pytest.mark.campaign("memory"))])
def test_random_histories_agree_with_a_map_of_granules(policy: Policy, steps: int) -> None:
    drawn, base, count = random.Random(steps), 64, 60
    allocator, taken = Allocator(base, base + 16 * count, 16, policy), [False] * count
    live: dict[int, int] = {}
    for _ in range(steps):
        need, low = drawn.choice((1, 1, 2, 3, 5, 9)), drawn.random() < 0.5
        start = drawn.randrange(count)
        if drawn.random() < 0.4 and live:
            start = drawn.choice(sorted(live))
            taken[start : start + live[start]] = [False] * live[start]
            assert allocator.free(base + 16 * start) == 16 * live.pop(start)
            with pytest.raises(TaskError):
                allocator.free(base + 16 * start)
        elif drawn.random() < 0.5:
            is_free = start + need <= count and not any(taken[start : start + need])
            assert allocator.is_free(base + 16 * start, 16 * need) == is_free
            if is_free:
                allocator.alloc_at(base + 16 * start, 16 * need)
            else:
                with pytest.raises((OutOfMemoryError, LayoutError)):
                    allocator.alloc_at(base + 16 * start, 16 * need)
                continue
            live[start] = need
            taken[start : start + need] = [True] * need
        else:
            wanted = wanted_granule(taken, need, low, policy)
            address = allocator.try_alloc(16 * need - drawn.randrange(16), low=low)
            assert address == (None if wanted is None else base + 16 * wanted)
            if wanted is not None:
                live[wanted] = need
                taken[wanted : wanted + need] = [True] * need
        allocator.check()
        assert allocator.holes() == tuple((base + 16 * a, 16 * n) for a, n in holes_of(taken))
        if drawn.random() < 0.05:
            allocator = allocator.clone()
            allocator.become(allocator.buffers())


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
