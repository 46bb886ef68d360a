"""What every allocator and every eviction rule must do: inherit a suite and name the policy.

The allocator's bookkeeping and the checker of plans are Stitch's; a policy only chooses. So a
policy cannot produce wrong results, but it can fail, leave memory unused, or not be deterministic.
"""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest

from stitch import api, plugins
from stitch.errors import LayoutError, OutOfMemoryError, TaskError
from stitch.graph import ComputationGraphBuilder
from stitch.machine import Policy, with_policies
from stitch.memory import Allocator
from stitch.program import Array
from stitch.testing.small_models import integers, model, one, tiny

GRANULE = 16


def chain_results(allocator: str | None, residency: str | None) -> tuple[list[Array], int]:
    """Run a chain whose tensors do not fit into L1 together; return them and the evictions."""
    machine = with_policies(tiny(l1_nbytes=16_384), allocator, residency)

    def build(b: ComputationGraphBuilder) -> None:
        b.output("y", b.input("x", (32, 96), "float32") + 1)

    placement = ["input.x.space=l1", "output.y.space=l1"]
    with api.open_device(machine, debug=True) as device:
        step = device.load(model("step", build, target=machine, placement=placement))
        tensors = [one(step(integers((32, 96), start))) for start in range(8)]
        sums = [one(step(tensor)) for tensor in tensors[::2] + tensors]
        arrays = [tensor.numpy() for tensor in (*tensors, *sums)]
        return arrays, device.explain().count("evict")


def holes_of(taken: list[bool]) -> list[tuple[int, int]]:
    """Return the holes (first granule, granules) of a map of granules."""
    edges = [i for i in range(len(taken) + 1) if (taken[i - 1] if i else True)
             != (taken[i] if i < len(taken) else True)]  # fmt: skip
    return [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]


class AllocatorSuite:
    """The tests of allocators.

    Attributes:
        allocator: The name of a plugin, or a policy of `Policy`.
        steps: The length of the random history.
    """

    allocator: ClassVar[str]
    steps: ClassVar[int] = 400

    def make(self, base: int, limit: int) -> Allocator:
        """Return an empty allocator with the policy."""
        if self.allocator in {policy.value for policy in Policy}:
            return Allocator(base, limit, GRANULE, Policy(self.allocator))
        return Allocator(base, limit, GRANULE, plugin=self.allocator)

    def check_choice(self, taken: list[bool], need: int, low: bool, found: int | None) -> None:
        """Assert that a chosen granule is right; `taken` says which granules are in use.

        A subclass may demand a certain one, `low` (at the bottom of a hole) or not.
        """
        fitting = [hole for hole in holes_of(taken) if hole[1] >= need]
        if found is None:
            assert not fitting, "a hole is large enough, and the policy found none"
        else:
            assert any(a <= found and found + need <= a + n for a, n in fitting)

    def test_random_histories_agree_with_a_map_of_granules(self) -> None:
        drawn, base, count = random.Random(self.steps), 4 * GRANULE, 60
        allocator, taken = self.make(base, base + GRANULE * count), [False] * count
        live: dict[int, int] = {}
        for _ in range(self.steps):
            need, low = drawn.choice((1, 1, 2, 3, 5, 9)), drawn.random() < 0.5
            start: int | None = drawn.randrange(count)
            assert start is not None
            if drawn.random() < 0.4 and live:
                start = drawn.choice(sorted(live))
                taken[start : start + live[start]] = [False] * live[start]
                assert allocator.free(base + GRANULE * start) == GRANULE * live.pop(start)
                with pytest.raises(TaskError):
                    allocator.free(base + GRANULE * start)
                start = None
            elif drawn.random() < 0.5:
                at, size = base + GRANULE * start, GRANULE * need
                is_free = start + need <= count and not any(taken[start : start + need])
                assert allocator.is_free(at, size) == is_free
                if is_free:
                    allocator.alloc_at(at, size)
                else:
                    with pytest.raises((OutOfMemoryError, LayoutError)):
                        allocator.alloc_at(at, size)
                    start = None
            else:
                nbytes, twin = GRANULE * need - drawn.randrange(GRANULE), allocator.clone()
                address = allocator.try_alloc(nbytes, low=low)
                assert twin.try_alloc(nbytes, low=low) == address, "the policy is not deterministic"
                start = None if address is None else (address - base) // GRANULE
                self.check_choice(taken, need, low, start)
            if start is not None:
                live[start] = need
                taken[start : start + need] = [True] * need
            allocator.check()
            holes = holes_of(taken)
            assert allocator.holes() == tuple((base + GRANULE * a, GRANULE * n) for a, n in holes)
            if drawn.random() < 0.05:
                allocator = allocator.clone()
                allocator.become(allocator.buffers())

    def test_gaps_are_taken_as_buffers_are_allocated(self) -> None:
        allocator = self.make(0, 100 * GRANULE)
        for start in range(7, 90, 13):
            allocator.alloc_at(start * GRANULE, 3 * GRANULE)
        expected: list[int] = []
        twin = allocator.clone()
        while (address := twin.try_alloc(2 * GRANULE)) is not None and len(expected) < 4:
            expected.append(address)
        assert allocator.gaps().take(2 * GRANULE, 4) == expected

    def test_results_do_not_depend_on_the_addresses(self) -> None:
        own = self.allocator if self.allocator in plugins.names("allocators") else None
        found, _ = chain_results(own, None)
        expected, _ = chain_results(None, None)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


class ResidencySuite:
    """The tests of eviction rules.

    Attributes:
        residency: The name of a plugin; None: the planner's own rules.
        most_evictions: Evictions of the suite's chain that are allowed, relative to the planner's.
    """

    residency: ClassVar[str | None]
    most_evictions: ClassVar[float] = 3.0

    def test_results_do_not_depend_on_what_is_evicted(self) -> None:
        found, evictions = chain_results(None, self.residency)
        expected, fewest = chain_results(None, None)
        assert evictions
        assert evictions <= fewest * self.most_evictions
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_a_rule_gives_the_same_plan_again(self) -> None:
        assert chain_results(None, self.residency)[1] == chain_results(None, self.residency)[1]
