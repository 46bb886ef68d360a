"""Orders of moves: nothing is lost, slides stage nothing, a cycle is cut as its machine likes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.machine import Machine, load_machine
from stitch.packing import gaps_between
from stitch.planner import CostCertificate, Plan, Relocate, check_plan, plan
from stitch.planner.mover.cycles import break_cycles
from stitch.planner.mover.order import STAGED, Move, Prices, order_moves
from stitch.program import DataType, Layout, Space, TensorDesc
from tests.support.machines import without_path
from tests.support.planner.byte_machine import ByteMachine
from tests.support.planner.small_requests import Scene, relaid

WORMHOLE = load_machine("wormhole_n150")
TINY = load_machine("tiny")


def prices_of(machine_name: str) -> Prices:
    return Prices(load_machine(machine_name), Space.L1, Space.DRAM)


def carried_out(moves: list[Move], limit: int, *, outside: int = 0) -> list[Move]:
    """Order and cut moves in `[0, limit)`, run them on bytes and compare; gives what was run."""
    first, core, last = order_moves(moves)
    done: list[Move] = []
    if core:
        busy = [(m.source, m.size) for m in moves if m.source == m.target]
        busy += [(m.source, m.size) for m in (*core, *last)]
        busy += [(m.target, m.size) for m in (*first, *core)]
        free = [(address, address + size) for address, size in gaps_between(busy, 0, limit)]
        done = break_cycles(core, free, outside, prices_of("tiny"), 1)
    ordered = [*first, *done, *last]
    before = Random(1).randbytes(limit)
    memory, aside = bytearray(before), {}
    for move in ordered:
        if move.target >= STAGED:
            aside[move.target] = memory[move.source : move.source + move.size]
        else:
            source = aside[move.source] if move.source >= STAGED else (
                memory[move.source : move.source + move.size])  # fmt: skip
            assert len(source) == move.size
            memory[move.target : move.target + move.size] = source
    for move in moves:
        wanted = before[move.source : move.source + move.size]
        assert memory[move.target : move.target + move.size] == wanted, f"{move} was lost"
    return ordered


def outside_bytes(moves: list[Move]) -> int:
    return sum(move.size for move in moves if move.target >= STAGED)


def shuffled_buffers(random: Random, *, slack: int) -> tuple[list[Move], int]:
    """Buffers at disjoint places, sent to disjoint places in another order; the space's end."""
    sizes = [random.randrange(1, 40) for _ in range(random.randrange(1, 9))]
    order = list(range(len(sizes)))
    places: list[dict[int, int]] = [{}, {}]
    limit = 0
    for starts in places:
        at = 0
        for i in order:
            at += random.randrange(slack + 1)
            starts[i] = at
            at += sizes[i]
        limit = max(limit, at)
        random.shuffle(order)
    return [Move(places[0][i], places[1][i], size) for i, size in enumerate(sizes)], limit


@given(st.randoms(use_true_random=False), st.integers(0, 12))
@settings(max_examples=400, deadline=None)
def test_a_random_rearrangement_loses_no_byte(random: Random, spare: int) -> None:
    moves, limit = shuffled_buffers(random, slack=random.choice((0, 0, 5)))
    carried_out(moves, limit + spare, outside=random.choice((1, 5, 400)))


@given(st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_one_free_byte_keeps_every_cycle_inside_the_space(random: Random) -> None:
    moves, limit = shuffled_buffers(random, slack=random.choice((0, 1, 5)))
    full = limit == sum(move.size for move in moves)
    assert outside_bytes(carried_out(moves, limit + full)) == 0


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
    ordered = carried_out(moves, 300)
    real = [m for m in moves if m.source != m.target]
    assert sorted(ordered, key=lambda m: m.source) == real


@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_in_a_full_space_one_piece_leaves_once_for_all_cycles(random: Random) -> None:
    moves, limit = shuffled_buffers(random, slack=0)
    ordered = carried_out(moves, limit, outside=7)
    assert outside_bytes(ordered) <= 7
    assert all(move.source < STAGED for move in ordered) or outside_bytes(ordered)


# -- figures of the machine's curves --------------------------------------------------------------


def swap(a: int, b: int, gap: int = 0, base: int = 0) -> list[Move]:
    """Two neighbours change places; the gap between them stays between them."""
    return [Move(base, base + b + gap, a), Move(base + a + gap, base, b)]


def best_swap(a: int, b: int, *, gap: int = 0, outside: int = 0) -> tuple[float, list[Move]]:
    """Microseconds on Wormhole, and the moves."""
    prices = prices_of("wormhole_n150")
    moves = swap(a, b, gap)
    busy = [(m.source, m.size) for m in moves] + [(m.target, m.size) for m in moves]
    free = [(address, address + size) for address, size in gaps_between(busy, 0, a + b + gap)]
    done = break_cycles(moves, free, outside, prices, 16)
    return prices.seconds(done) * 1e6, done


L1_NBYTES = WORMHOLE.shape.space(Space.L1).capacity // 32 * 32


@pytest.mark.parametrize("a", [499_968, 681_296, 32 * 1001, 16])
def test_two_tensors_of_a_full_wormhole_l1_change_places_in_at_most_100_us(a: int) -> None:
    microseconds, done = best_swap(a, L1_NBYTES - a, outside=1 << 20)
    assert microseconds < 100 and len(done) < 250
    assert outside_bytes(done) * 64 < 2.2e6


# -- whole plans ----------------------------------------------------------------------------------


def swapped_in_wormhole(a: int, b: int, gap: int) -> Plan:
    """Two tensors that fill an L1 but for the gap between them, which stays between them."""
    base = WORMHOLE.shape.space(Space.L1).base
    tensors = (a, base, base + b + gap), (b, base + a + gap, base)
    return plan(relaid(Scene(WORMHOLE), *tensors))


def test_the_plan_of_a_full_wormhole_swap_takes_87_us_and_1_4_mb_of_dram_and_is_confirmed() -> None:
    capacity = WORMHOLE.shape.space(Space.L1).capacity
    made = swapped_in_wormhole(499_968, capacity - 499_968, 0)
    assert check_plan(made) == ()
    (step,) = made.copies
    assert isinstance(step, Relocate) and step.certificate is not None
    assert step.certificate.kind == "cycle"
    assert step.seconds < 87e-6 and step.bounced_nbytes < 1.4e6 and len(step.transfers) < 200


def test_a_swap_with_one_free_granule_leaves_l1_because_that_is_cheaper() -> None:
    capacity = WORMHOLE.shape.space(Space.L1).capacity
    made = swapped_in_wormhole(499_968, capacity - 499_968 - 32, 32)
    assert check_plan(made) == ()
    (step,) = made.copies
    assert isinstance(step, Relocate) and isinstance(step.certificate, CostCertificate)
    assert step.certificate.through_seconds == pytest.approx(step.seconds)
    assert step.seconds < 87e-6


@pytest.mark.parametrize("rooms", [32, 128, 4096])
def test_without_a_path_and_with_a_full_dram_tensors_pass_in_pieces(rooms: int) -> None:
    machine = without_path(TINY, Space.L1, Space.L1)
    l1, scene = machine.shape.space(Space.L1), nearly_full_dram(machine, rooms)
    size = l1.capacity // 2
    made = plan(relaid(scene, (size, l1.base, l1.base + size), (size, l1.base + size, l1.base)))
    assert check_plan(made) == () and ByteMachine(made, 1).run() == []
    (step,) = made.copies
    assert isinstance(step, Relocate) and step.certificate is not None
    assert step.certificate.kind == "no_path"


def nearly_full_dram(machine: Machine, rooms: int) -> Scene:
    """Of DRAM so many bytes per bank are free, and 64 for what the program makes there."""
    dram, scene = machine.shape.space(Space.DRAM), Scene(machine)
    filler = TensorDesc(
        (dram.banks, dram.capacity - rooms - 64), Layout(DataType.UINT8, Space.DRAM)
    )
    scene.tensor(filler, 0, keep=True, pinned=True)
    return scene


@pytest.mark.parametrize("by", [512, -512, 16, -16])
@pytest.mark.parametrize("rooms", [32, 256])
def test_a_tensor_goes_over_itself_in_pieces_that_the_space_beside_can_hold(
    rooms: int, by: int
) -> None:
    machine = without_path(TINY, Space.L1, Space.L1)
    l1, scene = machine.shape.space(Space.L1), nearly_full_dram(machine, rooms)
    start = l1.base + 1024
    made = plan(relaid(scene, (2048, start, start + by)))
    assert check_plan(made) == () and ByteMachine(made, 1).run() == []
    (step,) = made.copies
    assert isinstance(step, Relocate) and step.stage is not None and step.stage[1] <= rooms + 64
    assert step.bounced_nbytes == 2048 * l1.banks


def test_a_cycle_in_a_full_space_leaves_by_one_granule_where_no_more_is_free_beside_it() -> None:
    l1, scene = TINY.shape.space(Space.L1), nearly_full_dram(TINY, 32)
    size = l1.capacity // 2
    made = plan(relaid(scene, (size, l1.base, l1.base + size), (size, l1.base + size, l1.base)))
    assert check_plan(made) == () and ByteMachine(made, 1).run() == []
    (step,) = made.copies
    assert isinstance(step, Relocate) and step.bounced_nbytes == l1.granule * l1.banks
