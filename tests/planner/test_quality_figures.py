"""How good searches are, as figures: sums over drawn problems that a worse search would exceed.

None of them is a time. Each limit stands just above what the search gives; where a better search
gives less, lower it.
"""

from __future__ import annotations

from random import Random

import pytest

from stitch.errors import OutOfMemoryError
from stitch.machine import load_machine
from stitch.packing import gaps_between
from stitch.planner import PlanRequest, plan
from stitch.planner.mover.arrange import SpaceProblem, arrange
from stitch.planner.mover.cycles import break_cycles
from stitch.planner.mover.order import STAGED, Move, Prices, order_moves
from stitch.planner.plan_state import RULES
from stitch.planner.residency import choose
from stitch.program import Space
from tests.support.planner.residency_chains import random_chain
from tests.support.planner.small_requests import DRAM, Scene, desc_of, machine_with, program

# -- residency ------------------------------------------------------------------------------------


def chosen(width: int) -> tuple[float, float]:
    """Seconds of the choices for ten chains, and their bounds."""
    choices = [choose(random_chain(s, tasks=100, tensors=12), width=width) for s in range(10)]
    assert None not in choices
    seconds = sum(c.seconds for c in choices if c)
    return seconds, sum(c.least_seconds for c in choices if c)


def test_choices_for_chains_of_100_tasks_are_within_6_percent_of_their_bounds() -> None:
    seconds, least = chosen(100)
    assert seconds <= 78.46 and least >= 74.30


# -- arranging --------------------------------------------------------------------------------


def dense(seed: int, buffers: int, gap: int, operation_size: int) -> SpaceProblem:
    """Buffers with gaps of up to so many granules between them, one in twelve of them stuck, and a
    piece that takes half of what is free, or more, or all."""
    random, at = Random(seed), 0
    movable, stuck = [], []
    for number in range(buffers):
        at += 16 * random.randrange(0, 2 + gap)
        size = 16 * random.randrange(1, 60)
        if random.randrange(12):
            movable.append((number, at, size))
        else:
            stuck.append((at, size))
        at += size
    limit = at + 16 * random.randrange(0, 8)
    free = limit - sum(size for *_, size in (*movable, *stuck))
    piece = max(16, free * random.choice((50, 80, 95, 100)) // 100 // 16 * 16)
    return SpaceProblem(0, limit, 16, tuple(movable), (), tuple(stuck), (piece,), operation_size)


@pytest.mark.parametrize(("gap", "operation_size", "most"), [(1, 0, 476_000), (3, 400, 1_052_000)])
def test_room_in_a_dense_space_is_made_by_moving_few_bytes(
    gap: int, operation_size: int, most: int
) -> None:
    cost = refused = 0
    for seed in range(40):
        found = arrange(dense(seed, 40, gap, operation_size))
        refused += found is None
        if found is not None:
            cost += found.moved_nbytes + operation_size * len(found.moves)
    assert refused <= 2 and cost <= most


# -- cycles -------------------------------------------------------------------------------------


def relayouts(machine: str, *, full: bool) -> tuple[float, int, int]:
    """Microseconds, moves and bytes outside of twenty relayouts of up to six buffers."""
    prices, seconds, count, outside = Prices(load_machine(machine), Space.L1, Space.DRAM), 0.0, 0, 0
    for seed in range(20):
        random = Random(seed)
        sizes = [16 * random.randrange(1, 1500) for _ in range(random.randrange(2, 7))]
        gaps = [0 if full else 16 * random.randrange(0, 30) for _ in sizes]
        order, places = list(range(len(sizes))), list[dict[int, int]]()
        for _ in range(2):
            at, starts = 0, {}
            for i in order:
                starts[i], at = at, at + sizes[i] + gaps[i]
            places.append(starts)
            random.shuffle(order)
        moves = [Move(places[0][i], places[1][i], size) for i, size in enumerate(sizes)]
        first, core, last = order_moves(moves)
        if not core:
            continue
        busy = [(m.source, m.size) for m in moves if m.source == m.target]
        busy += [(m.source, m.size) for m in (*core, *last)]
        busy += [(m.target, m.size) for m in (*first, *core)]
        free = [(a, a + size) for a, size in gaps_between(busy, 0, sum(sizes) + sum(gaps))]
        done = break_cycles(core, free, 1 << 20 if full else 0, prices, 16)
        seconds, count = seconds + prices.seconds(done), count + len(done)
        outside += sum(move.size for move in done if move.target >= STAGED)
    return seconds * 1e6, count, outside


@pytest.mark.parametrize(
    ("machine", "full", "microseconds", "moves"),
    # What comes back from DRAM waits 270 cycles for its first bytes, and for a barrier: 4.2 us.
    [("tiny", True, 56.5, 242), ("wormhole_n150", True, 102.2, 221),
     ("tiny", False, 150.2, 2_100), ("wormhole_n150", False, 352.7, 2_100)],
    ids=["tiny-full", "wormhole_n150-full", "tiny-gaps", "wormhole_n150-gaps"],
)  # fmt: skip
def test_relayouts_take_no_longer_and_no_more_moves_than_they_did(
    machine: str, full: bool, microseconds: float, moves: int
) -> None:
    took, count, outside = relayouts(machine, full=full)
    assert took <= microseconds and count <= moves and (full or not outside)


# -- whole plans ----------------------------------------------------------------------------------


def pressed(seed: int) -> PlanRequest:
    """Seven tensors of odd sizes, some of them in L1, and twenty programs that read one or two."""
    random, scene, at, below = Random(seed), Scene(machine_with(l1_nbytes=4096)), 1024, 0
    known: list[tuple[int, int]] = []
    while len(known) < 7:
        size = 16 * random.randrange(8, 80)
        if at + size <= 1024 + 4096 and random.random() < 0.8:
            known.append((scene.tensor(desc_of(size), at, keep=True), size))
            at += size
        else:
            known.append((scene.tensor(desc_of(size, DRAM), below, keep=True), size))
            below += size * 4
    for index in range(20):
        read = random.sample(known, random.randrange(1, 3))
        size = 16 * random.randrange(1, 100)
        what = program(f"p{index}", [desc_of(n) for _, n in read], [desc_of(size)],
                       scratch=16 * random.randrange(40))  # fmt: skip
        (made,) = scene.run(what, *(value for value, _ in read), keep=random.random() < 0.2)
        if random.random() < 0.5:
            known.append((made, size))
    return scene.request()


@pytest.mark.parametrize(
    ("rules", "most"),
    [(RULES, 507), (("farthest",), 525), (("chosen",), 508), (("sufficient",), 561),
     (("cheapest",), 536)],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_plans_under_pressure_take_no_longer_than_they_did(
    rules: tuple[str, ...], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all rules of eviction together, and by each."""
    monkeypatch.setattr("stitch.planner.planner.RULES", rules)
    seconds, made = 0.0, 0
    for seed in range(30):
        try:
            seconds += plan(pressed(seed)).seconds
        except OutOfMemoryError:
            continue
        made += 1
    assert made >= 25 and seconds <= most * 1e-6
