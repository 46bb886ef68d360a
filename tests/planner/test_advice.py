"""The search for changes: as good as all sets where they are few, within its budget where not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from stitch.planner import Cost, Slot, SlotChange, best_changes
from stitch.program import DataType, Layout, Space
from tests.support.grids import every

PLACES = (Space.L1, Space.DRAM)


class Priced:
    """Prices drawn by chance: changes help each other, or stand in each other's way."""

    def __init__(self, seed: int, slots: int) -> None:
        draw = random.Random(seed)
        self.changes = [
            SlotChange(Slot(at // 2, "input", at % 2), Layout(DataType.FLOAT32, space))
            for at in range(slots)
            for space in PLACES
        ]
        self._alone = {change: draw.randint(-4, 4) for change in self.changes}
        self._pairs = {
            frozenset(pair): draw.choice((0, 0, -3, 3))
            for pair in itertools.combinations(self.changes, 2)
        }
        self._broken = set(draw.sample(self.changes, 1))
        self.asked: list[tuple[SlotChange, ...]] = []

    def __call__(self, changes: Sequence[SlotChange]) -> Cost | None:
        self.asked.append(tuple(changes))
        if self._broken & {*changes}:
            return None
        pairs = itertools.combinations(changes, 2)
        total = sum(self._alone[c] for c in changes)
        total += sum(self._pairs[frozenset(pair)] for pair in pairs)
        return Cost(100 + total, 0, (100 + total) * 1e-6)

    def least(self, most: int) -> int:
        """By trying every set that leaves no slot in two layouts."""
        found = []
        for size in range(most + 1):
            for chosen in itertools.combinations(self.changes, size):
                cost = self(chosen)
                if cost is not None and len({c.slot for c in chosen}) == size:
                    found.append(cost.order[0])
        return min(found)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most", [1, 2, 3])
def test_few_changes_give_the_best_of_all_sets(seed: int, most: int) -> None:
    price = Priced(seed, 3)
    found = best_changes(price.changes, price, most=most)
    assert len(price.asked) <= 64
    least = Priced(seed, 3).least(most)
    assert (Cost(100, 0, 1e-4).order[0] if found is None else found[2].order[0]) == least


@pytest.mark.parametrize("seed", every(4, range(20)))
def test_many_changes_keep_to_the_budget_and_never_cost_more(seed: int) -> None:
    price = Priced(seed, 30)
    found = best_changes(price.changes, price, most=3, trials=64)
    assert len(price.asked) <= 64 and price.asked[0] == ()
    again = best_changes(price.changes, Priced(seed, 30), most=3, trials=64)
    assert found == again and found is not None
    chosen, now, then = found
    assert then.order < now.order and 1 <= len(chosen) <= 3
    # None of the changes that were looked at first does better alone.
    alone = [cost.order for change in price.changes[:21] if (cost := price((change,))) is not None]
    assert then.order <= min(alone)


def test_nothing_is_advised_where_nothing_is_saved_or_known() -> None:
    price = Priced(0, 2)
    assert best_changes((), price) is None
    assert best_changes(price.changes, lambda changes: None) is None
    assert best_changes(price.changes, lambda changes: Cost(1, 1, 1e-6)) is None
