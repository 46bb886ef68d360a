"""Orders of moves: nothing is lost, slides stage nothing, a cycle stages one granule."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.planner.moves import STAGE, Move, order_moves

SPACE = 600


def carried_out(moves: list[Move], *, spare: int | None, hole: int = SPACE) -> list[Move]:
    """Run ordered moves on bytes and compare; gives what was run. `hole` is where STAGE lies."""
    before = bytes(Random(1).randbytes(SPACE))
    memory = bytearray(before + bytes(SPACE))
    ordered, granule = order_moves(moves, spare=spare)
    for move in ordered:
        source = hole if move.source == STAGE else move.source
        target = hole if move.target == STAGE else move.target
        assert STAGE not in (move.source, move.target) or move.size == granule
        memory[target : target + move.size] = memory[source : source + move.size]
    for move in moves:
        wanted = before[move.source : move.source + move.size]
        assert memory[move.target : move.target + move.size] == wanted, f"{move} was lost"
    return ordered


def shuffled_buffers(random: Random, *, slack: int) -> list[Move]:
    """Buffers at disjoint places, sent to disjoint places in another order."""
    sizes = [random.randrange(1, 20) for _ in range(random.randrange(1, 9))]
    order = list(range(len(sizes)))
    sources: dict[int, int] = {}
    targets: dict[int, int] = {}
    for places in (sources, targets):
        at = 0
        for i in order:
            at += random.randrange(slack + 1)
            places[i] = at
            at += sizes[i]
        random.shuffle(order)
    return [Move(sources[i], targets[i], size) for i, size in enumerate(sizes)]


@given(st.randoms(use_true_random=False), st.integers(0, 12))
@settings(max_examples=400, deadline=None)
def test_a_random_rearrangement_loses_no_byte(random: Random, spare: int) -> None:
    moves = shuffled_buffers(random, slack=random.choice((0, 0, 5)))
    carried_out(moves, spare=spare)
    carried_out(moves, spare=None)


@given(st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_staging_leaves_the_space_only_where_no_byte_is_free(random: Random) -> None:
    moves = shuffled_buffers(random, slack=random.choice((0, 1, 5)))
    ordered, granule = order_moves(moves, spare=0)
    sources = {m.source + i for m in moves for i in range(m.size)}
    full = sources == {m.target + i for m in moves for i in range(m.size)}
    assert full or granule == 0, f"{moves} leave a byte free"
    assert (granule > 0) == any(STAGE in (m.source, m.target) for m in ordered)


@given(st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_relayout_that_keeps_the_order_stages_nothing_and_moves_each_buffer_once(
    random: Random,
) -> None:
    sizes = [random.randrange(1, 20) for _ in range(random.randrange(1, 9))]
    places: list[list[int]] = []
    for _ in range(2):
        at, starts = 0, []
        for size in sizes:
            at += random.randrange(6)
            starts.append(at)
            at += size
        places.append(starts)
    moves = [Move(a, b, n) for a, b, n in zip(*places, sizes, strict=True)]
    ordered = carried_out(moves, spare=0)
    real = [m for m in moves if m.source != m.target]
    assert sorted(ordered, key=lambda m: m.source) == real


def test_a_cycle_of_three_equal_buffers_stages_one_of_them() -> None:
    moves = [Move(0, 10, 10), Move(10, 20, 10), Move(20, 0, 10)]
    ordered = carried_out(moves, spare=0)
    assert order_moves(moves, spare=0)[1] == 10
    assert [STAGE in (m.source, m.target) for m in ordered] == [True, False, False, True]


def test_two_unequal_buffers_swap_with_one_granule_set_aside_at_a_time() -> None:
    ordered = carried_out([Move(0, 40, 60), Move(60, 0, 40)], spare=0)
    busy = 0
    for move in ordered:
        if move.target == STAGE:
            assert busy == 0, "two granules are set aside at once"
            busy = move.size
        elif move.source == STAGE:
            assert move.size == busy == 20
            busy = 0
    assert busy == 0


@pytest.mark.parametrize(("spare", "granule"), [(0, 64), (1, 1), (16, 16), (40, 32), (64, 64)])
def test_the_granule_is_the_largest_that_the_spare_region_holds(spare: int, granule: int) -> None:
    moves = [Move(0, 64, 64), Move(64, 0, 64)]
    assert order_moves(moves, spare=spare)[1] == granule
    carried_out(moves, spare=spare)


def test_buffers_outside_the_cycle_move_whole() -> None:
    moves = [Move(0, 50, 50), Move(50, 0, 50), Move(107, 160, 40), Move(200, 100, 47)]
    ordered = carried_out(moves, spare=0)
    assert moves[2] in ordered and moves[3] in ordered


def test_a_buffer_that_overlaps_itself_is_one_move() -> None:
    assert order_moves([Move(10, 4, 20)], spare=0) == ([Move(10, 4, 20)], 0)


def test_a_buffer_that_stays_is_no_move() -> None:
    assert order_moves([Move(4, 4, 20)], spare=0) == ([], 0)
