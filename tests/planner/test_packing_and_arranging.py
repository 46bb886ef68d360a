"""Arranging against all choices of buffers that may move."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.memory import Allocator
from stitch.packing import gaps_between, pack
from stitch.planner import plan
from stitch.planner.checker.proof import packs
from stitch.planner.mover.arrange import Repacking, SpaceProblem, arrange
from stitch.planner.mover.order import Move, order_moves
from stitch.planner.plan_state import PlanState
from tests.support.planner.small_requests import Scene, desc_of, program

#: Above `arrange.EXACT_BUFFERS` the search is heuristic: bytes moved, summed, over the optimum.
HEURISTIC_FACTOR = 1.1


# -- arranging ----------------------------------------------------------------------------------


def random_problem(random: Random, buffers: int) -> SpaceProblem | None:
    """Buffers with holes between them, some stuck, perhaps one displaced; pieces up to no slack."""
    limit = random.choice((8, 12, 16)) * buffers
    at, movable, stuck = 0, [], []
    for number in range(random.randrange(1, buffers + 1)):
        at, size = at + random.randrange(6), random.randrange(1, 12)
        if at + size > limit:
            break
        if random.randrange(7):
            movable.append((number, at, size))
        else:
            stuck.append((at, size))
        at += size
    displaced = []
    if movable and not random.randrange(4):
        displaced = [movable.pop(random.randrange(len(movable)))]
        stuck.append(displaced[0][1:])
    free = limit - sum(size for *_, size in (*stuck, *movable, *displaced))
    if free < 1:
        return None
    total = max(1, free - random.choice((0, 0, 1, 3)))
    first = random.randrange(1, total + 1)
    pieces = (first, total - first) if first < total and random.randrange(2) else (first,)
    return SpaceProblem(
        0, limit, 1, tuple(movable), tuple(displaced), tuple(sorted(stuck)), pieces
    )  # fmt: skip


def least_bytes(problem: SpaceProblem, *, in_order: bool = False) -> int | None:
    """The optimum: the cheapest set of buffers such that all others can stay; with `in_order` each
    stays between the same buffers that do not move."""
    displaced = [size for _, _, size in problem.displaced]
    best: int | None = None
    for count in range(len(problem.movable) + 1):
        for chosen in itertools.combinations(problem.movable, count):
            cost = sum(displaced) + sum(size for _, _, size in chosen)
            if best is not None and cost >= best:
                continue
            stays = [(a, n) for i, a, n in problem.movable if (i, a, n) not in chosen]
            gaps = gaps_between([*problem.obstacles, *stays], problem.base, problem.limit)
            pieces = [*displaced, *problem.pieces, *(size for _, _, size in chosen)]
            if in_order:
                pieces = [*problem.pieces]
                gaps = tuple(
                    (at, size - sum(n for _, a, n in chosen if at <= a < at + size))
                    for at, size in gaps
                )
            if packs(pieces, [size for _, size in gaps if size]):
                best = cost
    return best


def check_arrangement(problem: SpaceProblem, found: Repacking) -> None:
    moved = dict(found.moves)
    assert {n for n, _, _ in problem.displaced} <= moved.keys()
    spans = [(moved.get(n, a), size) for n, a, size in (*problem.movable, *problem.displaced)]
    spans += [*problem.obstacles, *zip(found.pieces, problem.pieces, strict=True)]
    spans.sort()
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert spans[0][0] >= problem.base and sum(spans[-1]) <= problem.limit
    buffers = {n: (a, size) for n, a, size in (*problem.movable, *problem.displaced)}
    assert all(buffers[n][0] != address for n, address in moved.items())
    assert found.moved_nbytes == sum(buffers[n][1] for n in moved)


@given(st.randoms(use_true_random=False))
@settings(max_examples=250, deadline=None)
def test_with_few_buffers_the_fewest_possible_bytes_move(random: Random) -> None:
    problem = random_problem(random, 6)
    if problem is None:
        return
    found, best = arrange(problem), least_bytes(problem)
    assert (found is None) == (best is None)
    if found is not None:
        check_arrangement(problem, found)
        assert found.moved_nbytes == best


@given(st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_buffers_that_keep_their_order_move_the_fewest_bytes_and_form_no_cycle(
    random: Random,
) -> None:
    problem = random_problem(random, 6)
    if problem is None or problem.displaced:
        return
    found, best = arrange(problem, in_order=True), least_bytes(problem, in_order=True)
    assert (found is None) == (best is None)
    if found is not None:
        check_arrangement(problem, found)
        assert found.moved_nbytes == best
        to = dict(found.moves)
        moves = [Move(a, to[n], size) for n, a, size in problem.movable if n in to]
        assert order_moves(moves)[1] == []


def test_with_many_buffers_the_bytes_moved_stay_near_the_optimum() -> None:
    moved = best = count = 0
    for seed in range(600):
        problem = random_problem(Random(seed), 11)
        if problem is None or len(problem.movable) not in (9, 10):
            continue
        found, least = arrange(problem), least_bytes(problem)
        assert (found is None) == (least is None)
        if found is None or least is None:
            continue
        check_arrangement(problem, found)
        moved, best, count = moved + found.moved_nbytes, best + least, count + 1
    assert count > 20
    assert moved <= HEURISTIC_FACTOR * best, f"{moved} B moved, {best} B would do ({count} cases)"


def test_what_packs_without_a_search_is_arranged_if_the_search_ends_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other set of buffers is undecided within the limit; if all move, everything fits."""
    module = importlib.import_module("stitch.planner.mover.arrange")
    monkeypatch.setattr(module, "pack", partial(pack, placements=0))
    problem = SpaceProblem(0, 17, 1, ((0, 4, 1), (1, 6, 5)), (), ((2, 1), (13, 1), (16, 1)), (4, 2))
    found = arrange(problem)
    assert found is not None
    check_arrangement(problem, found)


# -- scale ----------------------------------------------------------------------------------------


def scattered(count: int, seed: int) -> SpaceProblem:
    """So many buffers with a hole between any two, and a piece that takes four holes or more."""
    random, at, movable = Random(seed), 0, []
    for number in range(count):
        at += 16 * random.randrange(1, 30)
        size = 16 * random.randrange(1, 60)
        movable.append((number, at, size))
        at += size
    return SpaceProblem(0, at, 16, tuple(movable), (), (), (16 * random.choice((60, 150)),))


@pytest.mark.parametrize("seed", range(8))
def test_no_call_moves_more_than_the_best_slide(seed: int) -> None:
    problem = scattered(30, seed)
    found = arrange(problem)
    assert found is not None
    buffers, (size,) = problem.movable, problem.pieces
    edges = [0, *(x for _, a, n in buffers for x in (a, a + n)), problem.limit]
    holes = [b - a for a, b in zip(edges[::2], edges[1::2], strict=True)]
    slides = [
        sum(n for _, _, n in buffers[i:j])
        for i, j in itertools.combinations(range(len(holes)), 2)
        if sum(holes[i : j + 1]) >= size
    ]
    assert found.moved_nbytes <= min(slides)


def test_a_task_whose_result_is_kept_costs_the_same_however_many_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: Counter[str] = Counter()
    for owner, name in ((Allocator, "__init__"), (PlanState, "in_space")):
        real = getattr(owner, name)

        def counted(*arguments: Any, real: Any = real, name: str = name) -> Any:
            calls[name] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, counted)
    counts = []
    for tasks in (10, 400):
        calls.clear()
        scene = Scene()
        for _ in range(tasks):
            scene.run(program("p", [], [desc_of(16)], scratch=64), keep=True)
        assert plan(scene.request()).copies == ()
        counts.append(dict(calls))
    assert counts[0] == counts[1] == {"__init__": 3}
