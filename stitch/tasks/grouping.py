"""Which tasks may become one: sets of tasks such that no path leaves a set and comes back.

First every task gets a level: no lower than those before it, and higher than those from which an
edge comes that must stay. Tasks of one level between which edges may vanish are a set: all other
edges lead to higher levels, so no path comes back, and sets never wait for each other in a circle.
Then sets all of whose followers (or all of whose forerunners) are one set join it, which makes no
new path, until nothing changes. All of it takes time linear in the edges, for each round.
Last, the sets are put into an order in which they may run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from graphlib import TopologicalSorter

#: Edges of a task: those before it, and whether the edge may vanish.
Edges = Sequence[dict[int, bool]]
#: Rounds of joining; each is linear, and few are ever needed.
MAX_ROUNDS = 16


class _Sets:
    """Disjoint sets of tasks; the least task stands for its set."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, task: int) -> int:
        parent = self.parent
        while parent[task] != task:
            parent[task] = task = parent[parent[task]]
        return task

    def join(self, one: int, other: int) -> None:
        a, b = self.find(one), self.find(other)
        self.parent[max(a, b)] = min(a, b)


def groups_of(before: Edges) -> list[int]:
    """For each task the least task of its set; `before[t]` has only tasks that are less than t."""
    sets = _Sets(len(before))
    levels = [0] * len(before)
    for task, edges in enumerate(before):
        levels[task] = max(
            (levels[earlier] + (not vanishes) for earlier, vanishes in edges.items()), default=0
        )
    for task, edges in enumerate(before):
        for earlier, vanishes in edges.items():
            if vanishes and levels[earlier] == levels[task]:
                sets.join(earlier, task)
    for _ in range(MAX_ROUNDS):
        if not (_join_neighbours(before, sets) or _join_neighbours(before, sets, forward=False)):
            break
    return [sets.find(task) for task in range(len(before))]


def _join_neighbours(before: Edges, sets: _Sets, *, forward: bool = True) -> bool:
    """Join sets with the only set that comes before them (or after them); whether any did.

    The neighbours are those of one moment: of two sets that are each other's only neighbours and
    of chains of such sets all join, and a chain of them in a set is a path that stays inside.
    """
    find = sets.find
    #: The one neighbour of a set; -1 where there are several.
    only: dict[int, int] = {}
    stays: set[tuple[int, int]] = set()
    for task, edges in enumerate(before):
        mine = find(task)
        for earlier, vanishes in edges.items():
            theirs = find(earlier)
            if theirs == mine:
                continue
            here, there = (mine, theirs) if forward else (theirs, mine)
            if only.setdefault(here, there) != there:
                only[here] = -1
            if not vanishes:
                stays.add((here, there))
    joined = False
    for here, there in only.items():
        if there >= 0 and (here, there) not in stays:
            sets.join(here, there)
            joined = True
    return joined


def members_of(groups: Sequence[int]) -> dict[int, list[int]]:
    """The tasks of each set, in order; the sets in the order of their first tasks."""
    members: dict[int, list[int]] = {}
    for task, group in enumerate(groups):
        members.setdefault(group, []).append(task)
    return members


def order_of_groups(before: Edges, groups: Sequence[int]) -> list[int]:
    """The sets in an order in which they may run: of those that may, the first."""
    waiting = TopologicalSorter[int]()
    for task, edges in enumerate(before):
        group = groups[task]
        waiting.add(group, *{groups[other] for other in edges} - {group})
    waiting.prepare()
    ready: list[int] = []
    order = []
    while waiting:
        for group in waiting.get_ready():
            heapq.heappush(ready, group)
        group = heapq.heappop(ready)
        order.append(group)
        waiting.done(group)
    return order
